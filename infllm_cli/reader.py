"""Read a document into memory, ask it, and let the model answer.

Nothing is printed here: `read_steps` and `ask_steps` yield events, which a console draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from infllm_cli import budget, prompts
from infllm_cli.asking import Asking
from infllm_cli.attention import MemoriesCall, MemoryCall, forward
from infllm_cli.capacity import Capacity, Room
from infllm_cli.document import Document
from infllm_cli.errors import DocumentError, InfllmError, UsageError
from infllm_cli.events import Answer, AskEvent, ChunkRead
from infllm_cli.gates import choose_gates
from infllm_cli.kernels.native.choice import NativeKernels
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.knobs import Policy
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.models.loading import LoadedModel, load_model, quiet_transformers
from infllm_cli.models.packed import count_parameters
from infllm_cli.passages import cut_passages
from infllm_cli.read_document import Memory
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.tokens import Tokens

if TYPE_CHECKING:
    from infllm_cli.digests import Summary
    from infllm_cli.encoder import SentenceEncoder
    from infllm_cli.summary_options import SummaryOptions

# Tokens kept free for question and answer when a document might just fit as a whole.
RESERVE_TOKENS = 512
NATIVE_FOLDER = "native"  # of the cache: what is compiled for this machine


class Reader:
    """A frozen model that reads documents.

    Args:
        loaded: see `infllm_cli.models.loading`.
        config: sizes and policy of the memory; by default what fits the model.

    Raises:
        UsageError: the sizes do not fit the model's trained length.
    """

    def __init__(self, loaded: LoadedModel, config: MemoryConfig | None = None) -> None:
        self.loaded = loaded
        self.model = loaded.model
        self.config = config or MemoryConfig.for_model(loaded.trained_length)
        self.config.check_fits(loaded.trained_length)
        self.gates = choose_gates(loaded, self.config)
        self._encoders: dict[str, SentenceEncoder] = {}
        self.lacks_encoder = False  # it could not be fetched, which has been told
        self._progress: Callable[[str, int, int], None] | None = None
        with quiet_transformers():
            self.prompt = prompts.build_prompt(loaded.tokenizer, loaded.model.generation_config)

    @cached_property
    def parameters(self) -> int:
        """Of the model, all together."""
        return count_parameters(self.model)

    @classmethod
    def load(
        cls,
        model: str | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        cache_dir: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        device_limit_bytes: int | None = None,
        **sizes: Any,
    ) -> Reader:
        """Find (fetch, convert) and load a model.

        Args:
            model: a name of the catalog, a hub id, a folder or a GGUF file; default: the catalog's.
            device: auto, cpu, cuda, cuda:1, gpus (the layers spread over all), ...
            dtype: auto, bf16, f16, f32.
            cache_dir: where models are kept; default: the user's cache folder.
            progress: called with a stage, steps done and steps in all while fetching.
            sizes: fields of `MemoryConfig`, `policy` among them; None means the default.

        Raises:
            InfllmError: see `models.catalog.resolve` and `models.loading.load_model`.
        """
        from infllm_cli.models import catalog

        cache_dir = cache_dir or catalog.default_cache_dir()
        folder = catalog.resolve(model or catalog.DEFAULT_MODEL, cache_dir, progress)
        memo = cache_dir / "selftest.json"
        loaded = load_model(folder.path, folder.name, device=device, dtype=dtype, memo=memo)
        loaded.cache_dir = cache_dir
        native = NativeKernels(cache_dir / NATIVE_FOLDER)
        if loaded.device.type in ("cpu", "cuda"):  # there they gather what crosses the bus
            native.prepare()
        loaded.device_options = DeviceOptions(limit_bytes=device_limit_bytes, native=native)
        reader = cls(loaded, MemoryConfig.for_model(loaded.trained_length, **sizes))
        reader._progress = progress
        return reader

    def encoder(self, name: str) -> SentenceEncoder:
        """The sentence encoder of this name, fetched and loaded when first asked for.

        Raises:
            InfllmError: see `models.encoders.resolve_encoder` and `SentenceEncoder`.
        """
        from infllm_cli.encoder import SentenceEncoder
        from infllm_cli.models import catalog, encoders

        if name not in self._encoders:
            cache_dir = self.loaded.cache_dir or catalog.default_cache_dir()
            report = self._progress or (lambda stage, done, total: None)
            folder = encoders.resolve_encoder(name, cache_dir, report)
            self._encoders[name] = SentenceEncoder(folder, self.loaded.device)
        return self._encoders[name]

    def reserve_for(self, questions: list[str], options: AnswerOptions) -> int:
        """Tokens that the longest question and its answer take behind a document."""
        longest = max((len(self.prompt.question_ids(q)) for q in questions), default=0)
        around = len(self.prompt.turn) + len(self.prompt.task_ids()) + len(self.prompt.closing)
        return longest + around + options.max_tokens

    # -- reading ----------------------------------------------------------------------------

    def open(
        self,
        document: Document,
        *,
        reserve_tokens: int = RESERVE_TOKENS,
        allow_whole: bool = True,
        room: Room | None = None,
    ) -> Memory:
        """Tokenize a document and make an empty memory for it.

        Args:
            document: see `infllm_cli.document`.
            reserve_tokens: what question and answer may take if the document is attended whole.
            allow_whole: False sends even a short document through the tiers; a policy that is not
                the program's own is never without a say.
            room: most RAM and disk that its keys and values may take; what passes the RAM moves to
                disk while it is read (see `keeping`).

        Raises:
            DocumentError: no token comes out of the document.
            CapacityError: it would pass the room; a long one is refused before it is tokenized.
        """
        capacity = None if room is None else self._capacity(room)
        prefix = len(self.prompt.prefix)
        if capacity is not None and len(document.text) > budget.MOST_COUNTED_CHARS:
            count = budget.estimate_tokens(
                lambda text: len(self.prompt.tokenizer.encode(text)), document.text
            )
            # Only what is far above the limit: this is an estimate.
            config = capacity.choose(self.config, prefix + count)
            capacity.check(document.name, config, prefix, count, estimated=True)
        tokens = self.prompt.tokenizer.encode(document.text)
        if len(tokens.ids) == 0:
            raise DocumentError(f"{document.name} holds no text that the model could read.")
        context = prefix + len(tokens.ids)
        trained = self.loaded.trained_length
        # Whatever the question and its answer take: a saved memory is to serve all of them.
        own = self.config.policy is Policy.INFLLM
        whole = allow_whole and own and context + RESERVE_TOKENS <= trained
        config = self.config
        if capacity is not None and not whole:
            config = capacity.choose(config, context)
            capacity.check(document.name, config, prefix, len(tokens.ids))
        return self.empty(
            document, tokens, whole=whole, reserve_tokens=reserve_tokens, config=config
        )

    def empty(
        self,
        document: Document,
        tokens: Tokens,
        *,
        whole: bool,
        reserve_tokens: int,
        config: MemoryConfig | None = None,
    ) -> Memory:
        """A memory of a document of which nothing has been read; `config`: another than ours."""
        context = len(self.prompt.prefix) + len(tokens.ids)
        reserve_tokens = max(reserve_tokens, RESERVE_TOKENS)
        trained = self.loaded.trained_length
        length = self.config.context_tokens
        if whole or self.config.policy is Policy.DENSE:
            length = context + reserve_tokens
        state = self.empty_state(length, whole_tokens=trained if whole else 0, config=config)
        state.reserve(context + reserve_tokens)
        passages = cut_passages(document.text, tokens, [part.heading for part in document.parts])
        return Memory(document, tokens, len(self.prompt.prefix), state, passages, whole)

    def empty_state(
        self,
        length: int | None = None,
        *,
        whole_tokens: int = 0,
        config: MemoryConfig | None = None,
    ) -> ModelMemory:
        """The memories of all layers, of nothing.

        Args:
            length: tokens that a context may hold; default: what the sizes make of it.
            whole_tokens: attend so many tokens whole before tiers begin.
            config: default: the reader's.
        """
        return ModelMemory(
            self.loaded.layers_for(length or self.config.context_tokens),
            config or self.config,
            trained_length=self.loaded.trained_length,
            whole_tokens=whole_tokens,
            device=self.loaded.device_options,
            gates=self.gates.weights,
        )

    def _capacity(self, room: Room) -> Capacity:
        loaded = self.loaded
        on_host = loaded.device.type == "cpu"
        return Capacity(loaded.shapes, loaded.dtype.itemsize, room, on_host)

    def read_steps(self, memory: Memory) -> Iterator[ChunkRead]:
        """Read what of the document has not been read yet, a chunk at a time."""
        ids = torch.from_numpy(memory.tokens.ids.astype(np.int64))
        total = len(ids)
        ids = torch.cat([torch.from_numpy(self.prompt.prefix), ids])
        while not memory.complete:
            began = time.perf_counter()
            start = memory.state.tokens
            step = self.forward(
                memory.state, Phase.READ, ids[start : start + self.config.chunk_tokens]
            )[0]
            done = max(0, memory.state.tokens - memory.prefix_tokens)
            memory.read_tokens = done - memory.reused_tokens
            memory.read_seconds += time.perf_counter() - began
            device_bytes = memory.note_device_bytes()
            yield ChunkRead(
                tokens=done,
                reused=memory.reused_tokens,
                total=total,
                seconds=memory.read_seconds,
                blocks=memory.state.blocks,
                device_bytes=device_bytes,
                host_bytes=memory.state.host_bytes,
                loaded_blocks=step.loaded_blocks,
            )
        assert memory.state.tokens == len(ids), "every token is read"
        memory.state.freeze()

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
        self,
        memory: Memory,
        question: str,
        options: AnswerOptions | None = None,
        *,
        told: Sequence[str] = (),
    ) -> Iterator[AskEvent]:
        """Ask a question; the last event is the `Answer`.

        The memory is as before when the iterator ends or is closed.

        Args:
            told: what the user has said before, and not asked.

        Raises:
            UsageError: an empty question.
        """
        if not question.strip():
            raise UsageError("the question is empty; give one after the file.")
        options = options or AnswerOptions()
        needs_memory = options.answering is not Answering.PASSAGES
        assert memory.complete or not needs_memory, "a document is asked after it has been read"
        return Asking(self, memory, question, options, told).steps()

    def ask(
        self,
        memory: Memory,
        question: str,
        options: AnswerOptions | None = None,
        *,
        on_event: Callable[[AskEvent], None] | None = None,
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

    # -- summarizing --------------------------------------------------------------------------

    def summarize(self, memory: Memory, options: SummaryOptions | None = None) -> Summary:
        """Summarize a document that has been read; see `infllm_cli.summarizing`."""
        from infllm_cli.summarizing import Summarizing
        from infllm_cli.summary_options import SummaryOptions

        *_, summary = Summarizing(self, memory, options or SummaryOptions()).steps()
        return summary

    # -- one pass ----------------------------------------------------------------------------

    def forward(
        self,
        state: ModelMemory,
        phase: Phase,
        ids: Tensor,
        *,
        keep_from: int | None = None,
        want_logits: bool = False,
    ) -> tuple[Step, Tensor | None]:
        """One pass of ids [L] over the memory -> the step, and logits [V] of the last if wanted."""
        step = state.step(phase, len(ids), keep_from)
        with torch.inference_mode():
            call = MemoryCall(state, step)
            logits = forward(
                self.model, ids.to(self.loaded.device), call, want_logits=int(want_logits)
            )
        self._check_finite(logits, step)
        state.finish(step)
        return step, None if logits is None else logits[0]

    def forward_together(
        self, states: list[ModelMemory], token: int, keep_from: list[int]
    ) -> list[tuple[Step, Tensor]]:
        """One answer token over several memories in one pass, so that weights are read once.

        Returns:
            As `forward` of each of them: its step, and logits [V].
        """
        steps = [
            state.step(Phase.ANSWER, 1, kept) for state, kept in zip(states, keep_from, strict=True)
        ]
        with torch.inference_mode():
            ids = torch.full((len(states),), token, device=self.loaded.device)
            call = MemoriesCall(states, steps)
            logits = forward(self.model, ids, call, want_logits=len(states))
        assert logits is not None
        self._check_finite(logits, steps[0])
        for state, step in zip(states, steps, strict=True):
            state.finish(step)
        return list(zip(steps, logits, strict=True))

    def _check_finite(self, logits: Tensor | None, step: Step) -> None:
        if logits is not None and not bool(torch.isfinite(logits).all()):
            dtype = str(self.loaded.dtype).removeprefix("torch.")
            raise InfllmError(
                f"the model's logits are not finite in {dtype} (step {step.phase.value}, token "
                f"{step.end:,} of the context): its numbers overflowed. "
                + (
                    "Its weights are damaged."
                    if self.loaded.dtype is torch.float32
                    else "Try --dtype f32; if it happens there too, the weights are damaged."
                )
            )
