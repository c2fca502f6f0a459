"""Reading and answering at several lengths, turn by turn with the bare model and a dense cache.

A shared or throttling machine changes its speed from minute to minute, so what is compared runs
in turns within one process: a chunk of ours, one of the dense cache, and every few chunks one of
the bare model without any context, which nothing can pass that runs the same weights plainly.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from infllm_cli.bench.floor import Need, Rates, measure_rates, need_of, now
from infllm_cli.bench.stopwatch import Stopwatch
from infllm_cli.document import Document
from infllm_cli.events import Answer
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase
from infllm_cli.passages import cut_passages
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.tokens import Tokens
from infllm_cli.voices import Voice, follow

BARE_EVERY = 4  # chunks of ours for one of the bare model
QUESTION = "Who crossed the bridge, and what was painted on the day when the harbour was sold?"
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured.

    Attributes:
        lengths: tokens, rising; each a whole number of chunks.
        limit_seconds: most time that the dense cache may take for reading, all together.
        steps: answer tokens that are timed.
        candidates: as of `AnswerOptions`.
        profile: also tell where the time goes.
    """

    lengths: tuple[int, ...]
    limit_seconds: float
    steps: int = 16
    candidates: int = 128
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Point:
    """At one length; seconds are medians, `None`: not measured any more.

    Attributes:
        tokens: read so far.
        read_seconds: of reading them, altogether.
        recent_chunk, bare_chunk, dense_chunk: seconds of a chunk since the length before.
        dense_seconds: of reading so far with the dense cache.
        step, bare_step, dense_step: seconds of an answer token: the memory alone, the model without
            context, the dense cache.
        both_step: of an answer token as `infllm ask` gives it, of two contexts.
        first_token, next_first_token: seconds from the question to the first token of the answer,
            as `infllm ask` gives it: of the first question, and of a further one.
        device_bytes, host_bytes: of the memory's tiers; the first at its peak.
        dense_bytes: of the dense cache.
        read_need, step_need: what a chunk and an answer token need at least.
        parts: seconds of a chunk and of an answer token by what they were spent on.
    """

    tokens: int
    read_seconds: float
    recent_chunk: float
    bare_chunk: float
    step: float
    bare_step: float
    both_step: float
    first_token: float
    next_first_token: float
    device_bytes: int
    host_bytes: int
    dense_bytes: int
    read_need: Need
    step_need: Need
    dense_seconds: float | None = None
    dense_chunk: float | None = None
    dense_step: float | None = None
    parts: dict[str, dict[str, float]] = field(default_factory=dict)


class Bench:
    """Ours (`reader`) and `plain`, the same weights as the library loads and runs them.

    Args:
        progress: told what is done now.
    """

    def __init__(
        self, reader: Reader, plain: nn.Module, plan: Plan, progress: Callable[[str], None]
    ) -> None:
        self.reader = reader
        self.plain = plain
        self.plan = plan
        self.progress = progress
        self.device = reader.loaded.device
        self.chunk = reader.config.chunk_tokens
        self.rates: Rates | None = None
        self._bare_chunks: list[float] = []

    @torch.inference_mode()
    def run(self, document: Document, tokens: Tokens) -> Iterator[Point]:
        """Measure at every length of the plan.

        Args:
            tokens: of the document, at least as many as the greatest length.
        """
        reader, plan = self.reader, self.plan
        self.progress("measuring what this machine can do")
        self.rates = measure_rates(self.plain, self.chunk)
        ids = torch.from_numpy(
            np.concatenate([reader.prompt.prefix, tokens.ids[: plan.lengths[-1]].astype(np.int64)])
        )
        memory = reader.empty(document, tokens, whole=False, reserve_tokens=0)
        dense = DenseCache(self.plain)
        self._warm_up(ids)
        times: list[float] = []
        dense_times: list[float] = []
        bare_times: list[float] = []
        for length in plan.lengths:
            self.progress(f"reading to {length:,} tokens")
            end = len(reader.prompt.prefix) + length
            done = len(times), len(dense_times), len(bare_times)
            while memory.state.tokens < end:
                start = memory.state.tokens
                piece = ids[start : min(start + self.chunk, end)]
                times.append(self._timed(lambda p=piece: self._read(memory.state, p)))
                memory.note_device_bytes()
                if (len(times) - 1) % BARE_EVERY == 0:
                    bare_times.append(self._timed(lambda p=piece: self._bare(p)))
                if dense.alive:
                    dense_times.append(self._timed(lambda p=piece: dense.read(p)))
                    if sum(dense_times) > plan.limit_seconds and dense.tokens < len(ids):
                        dense.give_up()
            memory.state.freeze()
            recent = statistics.median(times[done[0] :])
            point = self._answers(
                self._cut(memory, document, tokens, length, sum(times)),
                ids,
                dense,
            )
            yield replace(
                point,
                read_seconds=sum(times),
                recent_chunk=recent,
                bare_chunk=statistics.median(bare_times[done[2] :] or bare_times),
                dense_seconds=sum(dense_times) if dense.alive else None,
                dense_chunk=statistics.median(dense_times[done[1] :]) if dense.alive else None,
            )

    def _warm_up(self, ids: Tensor) -> None:
        """The first passes of a process pay for what later ones find ready."""
        state = self.reader.empty_state()
        for _ in range(WARM_UP):
            self._read(state, ids[: self.chunk])
            self._bare(ids[: self.chunk])
            self._bare(ids[:1], want_logits=True)

    def _timed(self, run: Callable[[], object]) -> float:
        began = now(self.device)
        run()
        return now(self.device) - began

    def _read(self, state: ModelMemory, ids: Tensor) -> None:
        self.reader.forward(state, Phase.READ, ids)

    def _bare(self, ids: Tensor, *, want_logits: bool = False) -> None:
        arguments = {"input_ids": ids[None].to(self.device), "use_cache": False}
        if want_logits:
            self.plain(**arguments, logits_to_keep=1)
        else:
            self.plain.get_decoder()(**arguments)

    def _cut(
        self, memory: Memory, document: Document, tokens: Tokens, length: int, seconds: float
    ) -> Memory:
        """What has been read, as a document of its own that can be asked."""
        read = tokens[slice(0, length)]
        text = document.text[: int(read.spans[-1, 1])]
        cut = Memory(
            replace(document, text=text),
            read,
            memory.prefix_tokens,
            memory.state,
            cut_passages(text, read),
            whole=False,
            read_tokens=length,
            read_seconds=seconds,
            device_bytes_peak=memory.device_bytes_peak,
        )
        assert cut.complete
        return cut

    # -- answering ----------------------------------------------------------------------------

    def _answers(self, memory: Memory, ids: Tensor, dense: DenseCache) -> Point:
        plan, state = self.plan, memory.state
        self.progress(f"answering at {len(memory.tokens):,} tokens")
        read_need = need_of(self.plain, state, self.chunk, answering=False)
        asked = [self._ask(memory, 1), self._ask(memory, plan.steps)]
        steps: list[float] = []
        bare_steps: list[float] = []
        dense_steps: list[float] = []
        parts: dict[str, dict[str, float]] = {}
        with state.question():
            voice = self._asked_voice(memory)
            for index in range(plan.steps):
                token = int(ids[index])
                steps.append(self._timed(lambda t=token: follow([voice], t)))
                one = ids[index : index + 1]
                bare_steps.append(self._timed(lambda one=one: self._bare(one, want_logits=True)))
                if dense.alive and index < 4:  # each of them makes the cache longer
                    dense_steps.append(self._timed(lambda one=one: dense.step(one)))
            memory.note_device_bytes()
            step_need = need_of(self.plain, state, 1, answering=True)
            if plan.profile:
                parts["answer token"] = self._parts(lambda: follow([voice], int(ids[0])), 8)
        if plan.profile:
            with state.question():
                piece = ids[: self.chunk]
                parts["chunk"] = self._parts(lambda: self._read(state, piece), 2)
        return Point(
            tokens=len(memory.tokens),
            read_seconds=0.0,
            recent_chunk=0.0,
            bare_chunk=0.0,
            step=typical(steps),
            bare_step=statistics.median(bare_steps),
            dense_step=statistics.median(dense_steps) if dense_steps else None,
            both_step=_per_token(asked[1]),
            first_token=asked[0].first_token_seconds,
            next_first_token=asked[1].first_token_seconds,
            device_bytes=memory.device_bytes_peak,
            host_bytes=state.host_bytes,
            dense_bytes=dense.nbytes,
            read_need=read_need,
            step_need=step_need,
            parts=parts,
        )

    def _asked_voice(self, memory: Memory) -> Voice:
        prompt = self.reader.prompt
        voice = Voice(self.reader, memory.state)
        voice.read(np.concatenate([prompt.turn, prompt.task_ids()]))
        voice.ask(np.concatenate([prompt.question_ids(QUESTION), prompt.closing]))
        return voice

    def _ask(self, memory: Memory, tokens: int) -> Answer:
        options = AnswerOptions(
            max_tokens=tokens + 1, answering=Answering.BOTH, candidates=self.plan.candidates
        )
        return self.reader.ask(memory, QUESTION, options)

    def _parts(self, run: Callable[[], object], times: int) -> dict[str, float]:
        watch = Stopwatch(self.device)
        run()
        with watch.around(self.reader.model):
            for _ in range(times):
                run()
        return {part: seconds / times for part, seconds in watch.seconds.items()}


def typical(seconds: Sequence[float]) -> float:
    """The median of neighbours' means: of a long memory only every second token scans all keys."""
    pairs = [(a + b) / 2 for a, b in itertools.pairwise(seconds)]
    return statistics.median(pairs or seconds)


def _per_token(answer: Answer) -> float:
    """Seconds of a token behind the first."""
    return (answer.seconds - answer.first_token_seconds) / max(1, answer.tokens - 1)


class DenseCache:
    """The library's own cache, which keeps every key and attends to all of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.alive = True
        self.tokens = 0
        self._held: dict[str, Any] = {}

    def read(self, ids: Tensor) -> None:
        """A chunk; no logits."""
        self._keep(self.model.get_decoder()(**self._arguments(ids)))
        self.tokens += len(ids)

    def step(self, ids: Tensor) -> None:
        """An answer token."""
        self._keep(self.model(**self._arguments(ids), logits_to_keep=1))

    def give_up(self) -> None:
        """Forget it: it takes too long."""
        self.alive = False
        self._held = {}

    def _arguments(self, ids: Tensor) -> dict[str, Any]:
        device = self.model.get_input_embeddings().weight.device
        return {"input_ids": ids[None].to(device), "use_cache": True, **self._held}

    def _keep(self, out: Any) -> None:
        # The library has renamed it between versions; the newer name goes first.
        for name in ("cache", "past_key_values"):
            held = getattr(out, name, None)
            if held is not None:
                self._held = {name: held}
                return
        raise AssertionError("a cache was asked for")

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        layers = [layer for cache in self._held.values() for layer in cache.layers]
        held = [t for layer in layers for t in (layer.keys, layer.values) if t is not None]
        return sum(t.nbytes for t in held)
