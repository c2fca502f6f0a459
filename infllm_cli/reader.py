"""Read a document into memory, ask it, and let the model answer.

Nothing is printed here: `read_steps` and `ask_steps` yield events, which a console draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infllm_cli import prompts, recall
from infllm_cli.attention import MemoryCall, forward
from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.document import Document
from infllm_cli.errors import DocumentError, UsageError
from infllm_cli.evidence import AttentionRecord, Passage, mass_on_document
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.models.loading import LoadedModel, load_model, quiet_transformers
from infllm_cli.passages import Passages, cut_passages
from infllm_cli.sampling import Answering, AnswerOptions, Sampler, is_looping
from infllm_cli.tokens import Tokens
from infllm_cli.words import WordIndex

# Tokens kept free for question and answer when a document might just fit as a whole.
RESERVE_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Impression:
    """What a question's own words look at: see `recall.attention_profile` and `evidence`."""

    profile: np.ndarray  # [heads, N]
    mass: np.ndarray  # [document tokens]


@dataclass
class Memory:
    """A document as the model has read it. Asking never changes it.

    Attributes:
        whole: the document fits the trained length and is attended whole, without blocks.
    """

    document: Document
    tokens: Tokens
    prefix_tokens: int
    state: ModelMemory
    passages: Passages
    whole: bool
    read_tokens: int = 0
    read_seconds: float = 0.0
    device_bytes_peak: int = 0
    neutral: Impression | None = None  # found at the first question, the same for all

    @property
    def first_position(self) -> int:
        """Absolute position of the document's first token."""
        return self.prefix_tokens

    @cached_property
    def words(self) -> WordIndex:
        """The words of every passage."""
        return WordIndex(self.document.text, self.tokens, self.passages)

    def to_passages(self, per_block: np.ndarray) -> np.ndarray:
        """Scores [N] of stored blocks, to passages [P]; passages outside all blocks get 0."""
        sizes = self.state.config
        borders = sizes.sink_tokens + np.arange(len(per_block) + 1) * sizes.block_tokens
        return self.passages.spread(per_block, borders - self.first_position)

    @property
    def complete(self) -> bool:
        """Whether every token of the document has been read."""
        return self.read_tokens == len(self.tokens.ids)


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk of the document went through the model."""

    tokens: int  # of the document, so far
    total: int
    seconds: float
    blocks: int
    device_bytes: int
    host_bytes: int
    loaded_blocks: int  # per KV head in this step


@dataclass(frozen=True, slots=True)
class Looked:
    """A step of asking or answering looked into the memory.

    Attributes:
        share: part of the step's attention mass that lay on the document (the rest: prompt,
            question, answer so far).
        passages: where in the document, most attended first, scores as parts of the same mass.
    """

    phase: Phase
    index: int
    token: str
    loaded_blocks: int
    share: float
    passages: list[Passage]
    seconds: float


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A piece of the answer's text became certain."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its evidence.

    Attributes:
        finish: "stop" (the model ended), "length" (`max_tokens`), "repeat" (a loop was stopped) or
            "interrupted".
        seconds: from the question to the last token.
        first_token_seconds: from the question to the first token.
        evidence: passages attended most, best first.
        reread: passages that stood as text beside the question, in document order.
    """

    question: str
    text: str
    finish: str
    tokens: int
    seconds: float
    first_token_seconds: float
    evidence: list[Passage] = field(default_factory=list)
    reread: list[Passage] = field(default_factory=list)


class Reader:
    """A frozen model that reads documents.

    Args:
        loaded: see `infllm_cli.models.loading`.
        config: sizes of the memory; by default what fits the model.

    Raises:
        UsageError: the sizes do not fit the model's trained length.
    """

    def __init__(self, loaded: LoadedModel, config: MemoryConfig | None = None) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.config = config or MemoryConfig.for_model(loaded.trained_length)
        self.config.check_fits(loaded.trained_length)
        with quiet_transformers():
            self.prompt = prompts.build_prompt(loaded.tokenizer, loaded.model.generation_config)

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        cache_dir: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        **sizes: int | None,
    ) -> Reader:
        """Find (fetch, convert) and load a model.

        Args:
            model: a name of the catalog, a hub id, a folder or a GGUF file; default: the catalog's.
            device: auto, cpu, cuda, cuda:1, ...
            dtype: auto, bf16, f16, f32.
            cache_dir: where models are kept; default: the user's cache folder.
            progress: called with a stage, steps done and steps in all while fetching.
            sizes: fields of `MemoryConfig`; None means the default.

        Raises:
            InfllmError: see `models.catalog.resolve` and `models.loading.load_model`.
        """
        from infllm_cli.models import catalog

        cache_dir = cache_dir or catalog.default_cache_dir()
        folder = catalog.resolve(model or catalog.DEFAULT_MODEL, cache_dir, progress)
        memo = cache_dir / "selftest.json"
        loaded = load_model(folder.path, folder.name, device=device, dtype=dtype, memo=memo)
        return cls(loaded, MemoryConfig.for_model(loaded.trained_length, **sizes))

    def reserve_for(self, questions: list[str], options: AnswerOptions) -> int:
        """Tokens that the longest question and its answer take behind a document."""
        longest = max(len(self.prompt.question_ids(question)) for question in questions)
        around = len(self.prompt.turn) + len(self.prompt.task_ids()) + len(self.prompt.closing)
        return longest + around + options.max_tokens

    # -- reading ----------------------------------------------------------------------------

    def open(
        self,
        document: Document,
        *,
        reserve_tokens: int = RESERVE_TOKENS,
        allow_whole: bool = True,
    ) -> Memory:
        """Tokenize a document and make an empty memory for it.

        Args:
            document: see `infllm_cli.document`.
            reserve_tokens: what question and answer may take if the document is attended whole.
            allow_whole: False sends even a short document through the tiers.

        Raises:
            DocumentError: no token comes out of the document.
        """
        tokens = self.prompt.tokenizer.encode(document.text)
        if len(tokens.ids) == 0:
            raise DocumentError(f"{document.name} holds no text that the model could read.")
        context = len(self.prompt.prefix) + len(tokens.ids)
        trained = self.loaded.trained_length
        whole = allow_whole and context + reserve_tokens <= trained
        length = context + reserve_tokens if whole else self.config.context_tokens
        state = ModelMemory(
            self.loaded.layers_for(length),
            self.config,
            trained_length=trained,
            whole_tokens=trained if whole else 0,
        )
        state.reserve(context + reserve_tokens)
        passages = cut_passages(document.text, tokens)
        return Memory(document, tokens, len(self.prompt.prefix), state, passages, whole)

    def read_steps(self, memory: Memory) -> Iterator[ChunkRead]:
        """Read what of the document has not been read yet, a chunk at a time."""
        ids = torch.from_numpy(memory.tokens.ids.astype(np.int64))
        total = len(ids)
        ids = torch.cat([torch.from_numpy(self.prompt.prefix), ids])
        while not memory.complete:
            began = time.perf_counter()
            start = memory.state.tokens
            step = self._forward(memory.state, Phase.READ, ids[start : start + self._chunk])[0]
            memory.read_tokens = max(0, memory.state.tokens - memory.prefix_tokens)
            memory.read_seconds += time.perf_counter() - began
            device_bytes = memory.state.device_bytes
            memory.device_bytes_peak = max(memory.device_bytes_peak, device_bytes)
            yield ChunkRead(
                tokens=memory.read_tokens,
                total=total,
                seconds=memory.read_seconds,
                blocks=memory.state.blocks,
                device_bytes=device_bytes,
                host_bytes=memory.state.host_bytes,
                loaded_blocks=_loaded(step),
            )
        assert memory.state.tokens == len(ids), "every token is read"

    def read(
        self, document: Document, *, on_event: Callable[[ChunkRead], None] | None = None
    ) -> Memory:
        """Read a document to its end; arguments and errors as `open`."""
        memory = self.open(document)
        for event in self.read_steps(memory):
            if on_event:
                on_event(event)
        return memory

    # -- asking -----------------------------------------------------------------------------

    def ask_steps(
        self, memory: Memory, question: str, options: AnswerOptions | None = None
    ) -> Iterator[Looked | TokenOut | Answer]:
        """Ask a question; the last event is the `Answer`.

        The memory is as before when the iterator ends or is closed.

        Raises:
            UsageError: an empty question.
        """
        options = options or AnswerOptions()
        if not question.strip():
            raise UsageError("the question is empty; give one after the file.")
        assert memory.complete, "a document is asked after it has been read"
        began = time.perf_counter()
        reread: list[int] = []
        if not memory.whole:
            if memory.neutral is None:
                memory.neutral = self._look_once(memory, recall.NEUTRAL_QUESTION)
            if options.answering is Answering.BOTH:
                reread = self._recall(memory, question, options.reread_tokens)
        record = AttentionRecord(
            memory.document,
            memory.tokens,
            memory.passages,
            memory.first_position,
            memory.neutral.mass if memory.neutral else None,
        )
        with memory.state.question():
            yield from self._answer(memory, question, reread, options, record, began)

    def _look_once(self, memory: Memory, question: str) -> Impression:
        """Put a question to the memory without an answer: where do its own words look?"""
        with memory.state.question():
            start = memory.state.tokens
            before = np.concatenate([self.prompt.turn, self.prompt.task_ids()])
            for ids in _pieces(before, self._chunk):
                self._forward(memory.state, Phase.ASK, ids, keep_from=start)
            profiles, masses = [], []
            for ids in _pieces(self.prompt.question_ids(question), self._chunk):
                step = self._forward(memory.state, Phase.ASK, ids, keep_from=start)[0]
                profiles.append(recall.attention_profile(step) * len(ids))
                masses.append(mass_on_document(step, memory.first_position, len(memory.tokens)))
        blocks = min(profile.shape[1] for profile in profiles)
        profile = sum(profile[:, :blocks] for profile in profiles)
        return Impression(
            profile / len(self.prompt.question_ids(question)), np.mean(masses, axis=0)
        )

    def _recall(self, memory: Memory, question: str, budget: int) -> list[int]:
        """The passages to re-read, in document order."""
        profile = self._look_once(memory, question).profile
        by_words = memory.words.scores(question)
        rankings = [by_words]
        if profile.size and memory.neutral is not None:
            per_block = recall.attention_scores(profile, memory.neutral.profile)
            rankings.append(memory.to_passages(per_block))
        sizes = np.diff(memory.passages.borders)
        return recall.choose(recall.fuse(rankings, recall.WEIGHTS), sizes, budget)

    def _reread(self, memory: Memory, chosen: list[int], record: AttentionRecord) -> None:
        """Let passages go through the model again, as text behind the document."""
        start = memory.state.tokens
        parts: list[np.ndarray] = []
        position = start
        between = self.prompt.plain_ids(prompts.BETWEEN_PASSAGES)
        for index in chosen:
            if parts:
                parts.append(between)
                position += len(between)
            first, last = memory.passages.borders[index : index + 2]
            parts.append(memory.tokens.ids[first:last].astype(np.int64))
            record.reread(position, int(first), int(last - first))
            position += int(last - first)
        parts.append(self.prompt.plain_ids(prompts.AFTER_PASSAGES))
        # Read like the document: scoring every stored key for each of these tokens would cost
        # more than it finds.
        for ids in _pieces(np.concatenate(parts), self._chunk):
            self._forward(memory.state, Phase.READ, ids, keep_from=start)

    def _answer(
        self,
        memory: Memory,
        question: str,
        reread: list[int],
        options: AnswerOptions,
        record: AttentionRecord,
        began: float,
    ) -> Iterator[Looked | TokenOut | Answer]:
        state = memory.state
        keep_from = state.tokens
        prompt = self.prompt
        self._forward(state, Phase.READ, torch.from_numpy(prompt.turn), keep_from=keep_from)
        if reread:
            self._reread(memory, reread, record)
        ids = [prompt.task_ids(), prompt.question_ids(question), prompt.closing]
        logits = None
        for index, piece in enumerate(_pieces(np.concatenate(ids), self._chunk)):
            before = time.perf_counter()
            step, logits = self._forward(
                state, Phase.ASK, piece, keep_from=keep_from, want_logits=True
            )
            yield _looked(step, index, "", record, before)
        sampler = Sampler(options)
        decoder = IncrementalDecoder(self.loaded.tokenizer.backend_tokenizer)
        written: list[int] = []
        text = ""
        first_token_seconds = 0.0
        finish = "length"
        while True:
            token = sampler(logits)
            if not written:
                first_token_seconds = time.perf_counter() - began
            if token in self.prompt.stop_ids:
                finish = "stop"
                break
            written.append(token)
            certain = decoder.push(token)
            text += certain
            if certain:
                yield TokenOut(certain)
            if len(written) >= options.max_tokens:
                break
            if is_looping(written):
                finish = "repeat"
                break
            before = time.perf_counter()
            step, logits = self._forward(
                state,
                Phase.ANSWER,
                torch.tensor([token]),
                keep_from=keep_from,
                want_logits=True,
            )
            yield _looked(step, len(written) - 1, certain, record, before)
        memory.device_bytes_peak = max(memory.device_bytes_peak, state.device_bytes)
        rest = decoder.finish()
        if rest:
            text += rest
            yield TokenOut(rest)
        yield Answer(
            question=question,
            text=text.strip(),
            finish=finish,
            tokens=len(written),
            seconds=time.perf_counter() - began,
            first_token_seconds=first_token_seconds,
            evidence=record.passages(),
            reread=[record.passage(index) for index in reread],
        )

    def ask(
        self,
        memory: Memory,
        question: str,
        options: AnswerOptions | None = None,
        *,
        on_event: Callable[[Looked | TokenOut], None] | None = None,
    ) -> Answer:
        """Ask a question and wait for the answer; arguments and errors as `ask_steps`."""
        answer = None
        for event in self.ask_steps(memory, question, options):
            if isinstance(event, Answer):
                answer = event
            elif on_event:
                on_event(event)
        assert answer is not None
        return answer

    # -- one pass ----------------------------------------------------------------------------

    @property
    def _chunk(self) -> int:
        return self.config.chunk_tokens

    def _forward(
        self,
        state: ModelMemory,
        phase: Phase,
        ids: Tensor,
        *,
        keep_from: int | None = None,
        want_logits: bool = False,
    ) -> tuple[Step, Tensor | None]:
        step = state.step(phase, len(ids), keep_from)
        with torch.inference_mode():
            call = MemoryCall(state, step)
            logits = forward(self.model, ids.to(self.loaded.device), call, want_logits=want_logits)
        state.finish(step)
        return step, logits


def _pieces(ids: np.ndarray, size: int) -> list[Tensor]:
    return list(torch.from_numpy(ids).split(size))


def _loaded(step: Step) -> int:
    """Blocks per KV head that joined the step."""
    return max((blocks.shape[-1] for blocks in step.loaded.values()), default=0)


def _looked(step: Step, index: int, token: str, record: AttentionRecord, before: float) -> Looked:
    share, per_passage = record.add(step)
    return Looked(
        phase=step.phase,
        index=index,
        token=token,
        loaded_blocks=_loaded(step),
        share=share,
        passages=record.best(per_passage, 3),
        seconds=time.perf_counter() - before,
    )
