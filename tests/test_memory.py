"""The tiered memory against its definition, written out the slow way; its budget; its rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from infllm_cli.kernels.representative_scores import representative_scores
from layer_streams import CPU, TOLERANCE, Stream, make_geometry, make_stream, rotate
from torch import Tensor

from infllm_cli.errors import UsageError
from infllm_cli.memory import lookup
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.representatives import Representatives
from infllm_cli.memory.rotary import Rotary
from infllm_cli.memory.sliding import SlidingLayer
from infllm_cli.memory.step import Phase, Step
from infllm_cli.memory.window import Window

# Odd sizes on purpose: nothing divides anything.
CONFIG = MemoryConfig(
    sink_tokens=3,
    window_tokens=21,
    block_tokens=9,
    chunk_tokens=16,
    read_blocks=2,
    answer_blocks=3,
    representatives_per_block=4,
    segment_blocks=5,
    codec=Codec.FULL,
)
LONG = 100_000  # a trained length that nothing here reaches


# --- the definition ------------------------------------------------------------------------------


class Definition:
    """What a layer must answer: everything is kept and gathered anew at every step."""

    def __init__(self, g: LayerGeometry, config: MemoryConfig) -> None:
        self.g, self.c = g, config
        self.past: Stream | None = None
        self.blocks = 0
        self.tiers = False  # whether the sinks have left the window
        self.representatives: list[list[list[int]]] = []  # block -> KV head -> tokens

    @property
    def tokens(self) -> int:
        return 0 if self.past is None else self.past.k.shape[1]

    @property
    def window_start(self) -> int:
        return self.c.sink_tokens + self.blocks * self.c.block_tokens if self.tiers else 0

    def in_block(self, block: int) -> list[int]:
        start = self.c.sink_tokens + block * self.c.block_tokens
        return list(range(start, start + self.c.block_tokens))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        phase: Phase = Phase.READ,
        chosen: list[list[int]] | None = None,
        evict: bool = True,
    ) -> tuple[Tensor, list[list[int]]]:
        """The output [H, L, d] and the blocks of each KV head; `chosen` overrides the lookup."""
        g, c, length = self.g, self.c, q.shape[1]
        new = Stream(q, k, v)
        self.past = new if self.past is None else self._joined(new)
        if chosen is None:
            chosen = self.choose(q, phase)
        out = torch.empty(g.heads, length, g.value_dim, dtype=torch.float64)
        sinks = list(range(c.sink_tokens)) if self.tiers else []
        window = list(range(self.window_start, self.tokens))
        for kv in range(g.kv_heads):
            found = [token for block in chosen[kv] for token in self.in_block(block)]
            context = sinks + found + window
            # Positions are consecutive in the context, whatever they were in the document.
            keys = rotate(self.past.k[kv, context], range(len(context)), g.rotary)
            values = self.past.v[kv, context].double()
            places = torch.arange(len(context) - length, len(context))
            hidden = torch.arange(len(context))[None, :] > places[:, None]
            for head in self.group(kv):
                queries = rotate(q[head], places.tolist(), g.rotary)
                if g.rotary.scale_beta:
                    steps = torch.floor(places.double() / g.rotary.scale_length)
                    queries = queries * (1 + g.rotary.scale_beta * torch.log(1 + steps))[:, None]
                scores = queries @ keys.T * g.scaling
                if g.softcap is not None:
                    scores = g.softcap * torch.tanh(scores / g.softcap)
                scores[hidden] = float("-inf")
                out[head] = torch.softmax(scores, dim=-1) @ values
        if evict:
            window_tokens = self.tokens - (self.window_start or c.sink_tokens)
            self.evict((window_tokens - c.window_tokens) // c.block_tokens)
        return out, chosen

    def _joined(self, new: Stream) -> Stream:
        old = self.past
        assert old is not None
        pairs = zip((old.q, old.k, old.v), (new.q, new.k, new.v), strict=True)
        return Stream(*(torch.cat(pair, dim=1) for pair in pairs))

    def group(self, kv: int) -> range:
        size = self.g.heads // self.g.kv_heads
        return range(kv * size, (kv + 1) * size)

    def choose(self, q: Tensor, phase: Phase) -> list[list[int]]:
        """The blocks of each KV head with the highest relevance, in document order."""
        c = self.c
        wanted = c.read_blocks if phase is Phase.READ else c.answer_blocks
        kind = c.read_lookup if phase is Phase.READ else c.answer_lookup
        chosen = []
        for kv in range(self.g.kv_heads):
            relevance = (
                self.by_representatives(q, kv)
                if kind is Lookup.REPRESENTATIVES
                else self.by_mass(q, kv)
            )
            best = sorted(range(self.blocks), key=lambda block: -relevance[block])
            chosen.append(sorted(best[:wanted]))
        return chosen

    def far(self, q: Tensor) -> Tensor:
        """Queries, all one window away from every stored key."""
        return rotate(q, [self.c.window_tokens] * q.shape[1], self.g.rotary)

    def by_representatives(self, q: Tensor, kv: int) -> list[float]:
        """`sum_{i in X} sum_{j <= r} q_i . k_{b_j}`, over the query heads of the KV head."""
        assert self.past is not None
        queries = self.far(q[self.group(kv)]).reshape(-1, self.g.head_dim)
        relevance = []
        for block in range(self.blocks):
            keys = self.past.k[kv, self.representatives[block][kv]].double()
            relevance.append(float((queries @ keys.T).sum()))
        return relevance

    def by_mass(self, q: Tensor, kv: int) -> list[float]:
        """A softmax per query over all stored keys; the mass of each block."""
        if self.blocks == 0:
            return []
        assert self.past is not None
        queries = self.far(q[self.group(kv)]).reshape(-1, self.g.head_dim)
        stored = [token for block in range(self.blocks) for token in self.in_block(block)]
        scores = queries @ self.past.k[kv, stored].double().T * self.g.scaling
        mass = torch.softmax(scores, dim=-1).sum(dim=0)
        return mass.view(self.blocks, -1).sum(dim=1).tolist()

    def evict(self, blocks: int) -> None:
        """Move the window's oldest blocks out of it, and choose their representatives."""
        if blocks <= 0:
            return
        assert self.past is not None
        self.tiers = True
        first, last = self.blocks, self.blocks + blocks
        in_window = self.tokens - self.c.sink_tokens - last * self.c.block_tokens
        followers = min(self.c.window_tokens, in_window)
        keys = rotate(self.past.k, range(self.tokens), self.g.rotary)
        queries = rotate(self.past.q, range(self.tokens), self.g.rotary)

        def score(token: int, kv: int) -> float:
            key = keys[kv, token]
            if followers == 0:
                return float(key @ key)
            following = queries[self.group(kv), token + 1 : token + 1 + followers]
            return float((following @ key).sum()) / followers

        for block in range(first, last):
            per_head = []
            for kv in range(self.g.kv_heads):
                scores = {token: score(token, kv) for token in self.in_block(block)}
                best = sorted(scores, key=lambda token: -scores[token])
                per_head.append(best[: self.c.representatives_per_block])
            self.representatives.append(per_head)
        self.blocks = last

    def seal(self) -> None:
        if self.tiers:
            self.evict((self.tokens - self.window_start) // self.c.block_tokens)


# --- streams against the definition --------------------------------------------------------------

CHUNKS = {"1": [1], "5": [5], "16": [16], "mixed": [7, 1, 16, 3, 3, 11]}
chunkings = pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)


def pieces(chunks: list[int], tokens: int) -> Iterator[tuple[int, int]]:
    """Start and length of each step until `tokens` tokens have passed."""
    start = 0
    for chunk in cycle(chunks):
        if start >= tokens:
            return
        yield start, min(chunk, tokens - start)
        start += chunk


def make_memory(g: LayerGeometry, config: MemoryConfig = CONFIG, **kinds: int) -> ModelMemory:
    return ModelMemory([g], config, **{"trained_length": LONG, **kinds})


def run(
    memory: ModelMemory,
    streams: Stream | list[Stream],
    length: int,
    phase: Phase = Phase.READ,
    keep_from: int | None = None,
) -> tuple[Tensor, Step]:
    """One step of every layer; the last layer's output."""
    step = memory.step(phase, length, keep_from)
    streams = [streams] if isinstance(streams, Stream) else streams
    with torch.inference_mode():
        for layer, stream in zip(memory.layers, streams, strict=True):
            out = layer.attend(*stream.part(step.start, length), step)
    memory.finish(step)
    return out, step


def read(memory: ModelMemory, streams: Stream | list[Stream], tokens: int, chunk: int = 16) -> None:
    for _, length in pieces([chunk], tokens):
        run(memory, streams, length)


def check_step(
    definition: Definition,
    stream: Stream,
    out: Tensor,
    step: Step,
    *,
    evict: bool = True,
) -> None:
    """The step's output and its blocks equal the definition's."""
    loaded = step.loaded.get(0)
    given = None
    if definition.g.dtype is not torch.float32:
        # Rounding may tip a close choice, so that only the attention is compared.
        given = [[]] * definition.g.kv_heads if loaded is None else loaded.tolist()
    expected, chosen = definition.attend(
        *stream.part(step.start, step.length), step.phase, given, evict
    )
    assert ([[]] * definition.g.kv_heads if loaded is None else loaded.tolist()) == chosen
    tolerance = TOLERANCE[definition.g.dtype]
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def check_stream(
    g: LayerGeometry, chunks: list[int], config: MemoryConfig = CONFIG, tokens: int = 140
) -> None:
    stream = make_stream(g, tokens)
    memory, definition = make_memory(g, config), Definition(g, config)
    for _, length in pieces(chunks, tokens):
        out, step = run(memory, stream, length)
        check_step(definition, stream, out, step)
    [layer] = memory.tiered
    assert layer.arena.count == definition.blocks >= 8
    assert layer.window.start == definition.window_start


@chunkings
@pytest.mark.parametrize("heads", [(6, 2), (3, 3)], ids=["grouped", "ungrouped"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_reading_follows_the_definition(
    chunks: list[int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    check_stream(make_geometry(*heads, dtype), chunks)


@pytest.mark.parametrize(
    "kind",
    [{"interleaved": True}, {"softcap": 1.5}, {"beta": 0.7}],
    ids=["interleaved", "softcap", "query scale"],
)
def test_special_attention_follows_the_definition(kind: dict[str, float]) -> None:
    check_stream(make_geometry(**kind), CHUNKS["mixed"])


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, read_lookup=Lookup.EXACT),
        replace(CONFIG, read_blocks=0),
        replace(CONFIG, read_blocks=200, sink_tokens=1),  # more than there are
        replace(CONFIG, block_tokens=16, window_tokens=16, representatives_per_block=16),
        replace(CONFIG, representatives_per_block=1, chunk_tokens=64),
    ],
    ids=["exact", "no blocks", "all blocks", "one block window", "one representative"],
)
def test_other_sizes_follow_the_definition(config: MemoryConfig) -> None:
    check_stream(make_geometry(), [config.chunk_tokens, 5], config, tokens=200)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("read_tokens", [139, 150, 147])  # 147: the sealed window is empty
def test_asking_follows_the_definition(dtype: torch.dtype, read_tokens: int) -> None:
    g = make_geometry(dtype=dtype)
    stream = make_stream(g, 300)
    memory, definition = make_memory(g), Definition(g, CONFIG)
    for _, length in pieces([16], read_tokens):
        check_step(definition, stream, *run(memory, stream, length))
    with memory.question():
        definition.seal()
        steps = [(Phase.READ, 16), (Phase.ASK, 13), *[(Phase.ANSWER, 1)] * 5]
        for phase, length in steps:
            out, step = run(memory, stream, length, phase, keep_from=read_tokens)
            check_step(definition, stream, out, step, evict=False)
        assert memory.blocks == definition.blocks == (read_tokens - 3) // 9


def test_a_question_of_many_chunks_is_attended_whole() -> None:
    """Longer than the window, the slack behind it, and what the window's buffer first held."""
    g = make_geometry()
    stream = make_stream(g, 600)
    memory, definition = make_memory(g), Definition(g, CONFIG)
    for _, length in pieces([16], 150):
        check_step(definition, stream, *run(memory, stream, length))
    for _ in range(2):  # from the document's own buffer, and from the copy that came back
        with memory.question():
            asked = Definition(g, CONFIG)
            asked.__dict__.update(definition.__dict__)
            asked.representatives = list(definition.representatives)
            asked.seal()
            for _ in range(9):
                # What an allocator hands out may hold anything.
                junk = [torch.full((2, 300, 10), float("nan")) for _ in range(8)]
                del junk
                out, step = run(memory, stream, 16, Phase.ASK, keep_from=150)
                check_step(asked, stream, out, step, evict=False)


def test_mass_is_accounted_at_absolute_positions() -> None:
    g = make_geometry()
    stream = make_stream(g, 300)
    memory = make_memory(g)
    read(memory, stream, 150)
    with memory.question():
        _, step = run(memory, stream, 13, Phase.ASK, keep_from=150)
    assert step.mass is not None
    assert step.mass.shape == (163,)
    assert float(step.mass.sum()) == pytest.approx(6 * 13, rel=1e-5)
    attended = set(range(3)) | set(range(147, 163))
    for block in step.loaded[0].flatten().tolist():
        attended |= set(range(3 + 9 * block, 12 + 9 * block))
    assert set(step.mass.nonzero().flatten().tolist()) == attended


# --- representatives and lookup ------------------------------------------------------------------


def test_running_sums_give_the_scores_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(2, 40, 5, generator=generator)
    keys = torch.randn(2, 19, 5, generator=generator)
    scores = representative_scores(queries.cumsum(dim=1), keys, 21)
    for head in range(2):
        for m in range(19):
            following = queries[head, m + 1 : m + 22] @ keys[head, m]
            assert float(scores[head, m]) == pytest.approx(float(following.mean()), abs=1e-4)


def test_representatives_are_the_highest_and_only_their_keys_are_summed() -> None:
    generator = torch.Generator().manual_seed(4)
    keys, scores = torch.randn(2, 27, 5, generator=generator), torch.rand(2, 27)
    kept = Representatives(2, 3, 5, CPU)
    for _ in range(2):
        kept.append(keys, scores, 9)
    kept.truncate(4)
    kept.append(keys[:, :9], scores[:, :9], 9)
    assert kept.count == 5 and kept.used_bytes == 5 * 2 * (3 * 2 + 5 * 4)
    for block, source in enumerate([0, 1, 2, 0, 0]):
        for head in range(2):
            part = slice(9 * source, 9 * source + 9)
            best = sorted(range(9), key=lambda i: -float(scores[head, part][i]))[:3]
            assert sorted(kept.chosen[head, block].tolist()) == sorted(best)
            torch.testing.assert_close(kept.key_sum[head, block], keys[head, part][best].sum(dim=0))


def test_exact_lookup_picks_the_block_with_the_most_softmax_mass() -> None:
    arena = BlockArena(2, 8, 4, 4, torch.float32)
    keys = torch.zeros(2, 5 * 8, 4)
    # Head 0: block 3 holds one loud key, block 1 many keys of half that score.
    keys[0, 3 * 8 + 2, 0], keys[0, 8:16, 0] = 5.0, 3.5
    keys[1, 4 * 8 + 7, 0] = 2.0
    arena.append(keys, keys)
    q = torch.zeros(4, 1, 4)
    q[..., 0] = 1.0
    blocks, mass = lookup.exact(q, arena, 1.0, 1)
    # 8 * exp(3.5) is more than exp(5): the mass of a block counts, not its best key.
    assert blocks.tolist() == [[1], [4]]
    scores = torch.softmax(keys[..., 0], dim=-1).view(2, 5, 8).sum(dim=-1)
    torch.testing.assert_close(mass, 2 * scores)
    assert lookup.exact(q, arena, 1.0, 9)[0].shape == (2, 5)


def test_each_kv_head_has_its_own_blocks_in_document_order() -> None:
    relevance = torch.tensor([[3.0, 0.0, 2.0, 1.0], [0.0, 3.0, 1.0, 2.0]])
    assert lookup.top_blocks(relevance, 2).tolist() == [[0, 2], [1, 3]]
    assert lookup.top_blocks(relevance, 9).tolist() == [[0, 1, 2, 3]] * 2
    g = make_geometry()
    stream, memory = make_stream(g, 300), make_memory(g)
    read(memory, stream, 280)
    for phase in (Phase.READ, Phase.ASK):
        _, step = run(memory, stream, 9, phase)
        first, second = step.loaded[0].tolist()
        assert first != second
        assert first == sorted(first) and second == sorted(second)


# --- budget --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_device_holds_a_constant_amount(chunk: int) -> None:
    g = make_geometry()
    stream, memory = make_stream(g, 1500), make_memory(g)
    [layer] = memory.tiered
    held, blocks = set(), []
    for start, length in pieces([chunk], 1500):
        run(memory, stream, length)
        assert len(layer.window) < CONFIG.window_tokens + CONFIG.block_tokens + (
            0 if layer.sinks else CONFIG.sink_tokens
        )
        assert layer.window.start + len(layer.window) == start + length
        if start > 200:
            held.add(layer.device_bytes - layer.representatives.used_bytes)
            blocks.append(memory.blocks)
    assert len(held) == 1
    assert blocks[-1] - blocks[0] > 130
    per_block = CONFIG.block_tokens * g.kv_heads * (g.head_dim + g.value_dim) * 4
    assert memory.host_bytes == memory.blocks * per_block


def test_representatives_take_little_of_what_their_block_takes() -> None:
    config = MemoryConfig()
    g = replace(make_geometry(), head_dim=64, value_dim=64, rotary=Rotary(torch.ones(32)))
    kept = Representatives(g.kv_heads, config.representatives_per_block, g.head_dim, CPU)
    keys = torch.zeros(g.kv_heads, config.block_tokens, 64)
    kept.append(keys, keys[..., 0], config.block_tokens)
    assert kept.used_bytes < 0.01 * 2 * keys.nbytes


def test_the_window_may_not_outgrow_the_trained_length_even_for_a_question() -> None:
    g = make_geometry()
    stream = make_stream(g, 900)
    trained = 200
    memory = make_memory(g, trained_length=trained)
    read(memory, stream, 150)
    [layer] = memory.tiered
    with memory.question():
        for _ in range(40):
            run(memory, stream, 16, Phase.ASK, keep_from=150)
            lead = CONFIG.sink_tokens + CONFIG.most_blocks * CONFIG.block_tokens
            assert lead + len(layer.window) + CONFIG.chunk_tokens <= trained
        assert layer.window.start > 150  # it had to give up the question's beginning


def test_the_question_stays_in_the_window() -> None:
    g = make_geometry()
    stream, memory = make_stream(g, 400), make_memory(g)
    read(memory, stream, 150)
    [layer] = memory.tiered
    with memory.question():
        for _ in range(6):
            run(memory, stream, 16, Phase.ASK, keep_from=150)
            assert layer.window.start <= 150 < layer.window.end == memory.tokens
            assert 150 - layer.window.start < CONFIG.block_tokens
        assert len(layer.window) > CONFIG.window_tokens + CONFIG.block_tokens


# --- a question leaves no trace ------------------------------------------------------------------


def state_of(memory: ModelMemory) -> list[Tensor | int | None]:
    """Everything that a memory holds."""
    held: list[Tensor | int | None] = [memory.tokens]
    for layer in memory.layers:
        window = layer.window
        slots = slice(window.first, window.last)
        held += [window.start, window.end]
        for name in ("rotated", "values", "raw", "query_sums"):
            tensor = getattr(window, name)
            held.append(None if tensor is None else tensor[:, slots].clone())
        if isinstance(layer, LayerMemory):
            count = layer.arena.count
            held += [count, layer.representatives.count, layer.whole_tokens]
            held += layer.arena.stretch(0, count * layer.arena.block_tokens)
            held += [
                layer.representatives.chosen[:, :count].clone(),
                layer.representatives.key_sum[:, :count].clone(),
            ]
            held += [None, None] if layer.sinks is None else [t.clone() for t in layer.sinks]
    return held


def assert_same(a: list[Tensor | int | None], b: list[Tensor | int | None]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor) and torch.equal(one, other)
        else:
            assert one == other


Ask = Callable[[ModelMemory, list[Stream]], None]


def nothing(memory: ModelMemory, streams: list[Stream]) -> None:
    pass


def one_short_chunk(memory: ModelMemory, streams: list[Stream]) -> None:
    run(memory, streams, 4, Phase.ASK, keep_from=memory.tokens)


def many_chunks(memory: ModelMemory, streams: list[Stream]) -> None:
    start = memory.tokens
    for _ in range(12):
        run(memory, streams, 16, Phase.ASK, keep_from=start)
    for _ in range(20):
        run(memory, streams, 1, Phase.ANSWER, keep_from=start)


def evicting(memory: ModelMemory, streams: list[Stream]) -> None:
    """Nothing is kept, so that the question itself is sealed into blocks."""
    for phase in (Phase.READ, Phase.ASK, Phase.READ):
        for _ in range(5):
            run(memory, streams, 16, phase)


QUESTIONS = [nothing, one_short_chunk, many_chunks, evicting]
WHERE = {
    "before the window overflows": 15,
    "just before it does": 31,
    "in tiers": 150,
    "in tiers, window ends with a block": 147,
}
KINDS = {  # whole_tokens and dtype
    "tiers": (0, torch.float32),
    "tiers, bfloat16": (0, torch.bfloat16),
    "whole": (LONG, torch.float32),
    "whole until the question": (170, torch.bfloat16),
}


@pytest.mark.parametrize("ask", QUESTIONS)
@pytest.mark.parametrize("tokens", WHERE.values(), ids=WHERE)
@pytest.mark.parametrize(("whole_tokens", "dtype"), KINDS.values(), ids=KINDS)
def test_a_question_leaves_no_trace(
    ask: Ask, tokens: int, whole_tokens: int, dtype: torch.dtype
) -> None:
    layers = [
        make_geometry(dtype=dtype),
        make_geometry(dtype=dtype, sliding=12, index=1),
        make_geometry(dtype=dtype, index=2),
    ]
    streams = [make_stream(g, 700) for g in layers]
    memories = []
    for _ in range(2):
        memory = ModelMemory(layers, CONFIG, trained_length=LONG, whole_tokens=whole_tokens)
        read(memory, streams, tokens)
        memories.append(memory)
    asked, untouched = memories
    before = state_of(asked)
    for _ in range(2):
        with asked.question():
            ask(asked, streams)
        assert_same(state_of(asked), before)
    # And what follows is the same, bit for bit.
    for phase, length in [(Phase.READ, 16), (Phase.ASK, 5), *[(Phase.READ, 16)] * 4]:
        out, step = run(asked, streams, length, phase)
        expected, other = run(untouched, streams, length, phase)
        assert torch.equal(out, expected)
        assert step.loaded.keys() == other.loaded.keys()
        assert all(torch.equal(step.loaded[i], other.loaded[i]) for i in step.loaded)


def test_the_same_question_gives_the_same_bits_each_time() -> None:
    g = make_geometry()
    streams = [make_stream(g, 700)]
    memory = make_memory(g)
    read(memory, streams, 150)

    def ask() -> list[Tensor]:
        found = []
        with memory.question():
            for phase, length in [(Phase.READ, 16), (Phase.ASK, 16), *[(Phase.ANSWER, 1)] * 30]:
                out, step = run(memory, streams, length, phase, keep_from=150)
                found.append(out)
                if step.mass is not None:
                    found.append(step.mass)
        return found

    first = ask()
    with memory.question():
        evicting(memory, streams)
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, ask(), strict=True))


def test_a_question_that_fails_leaves_no_trace() -> None:
    g = make_geometry()
    streams, memory = [make_stream(g, 700)], make_memory(g)
    read(memory, streams, 150)
    before = state_of(memory)
    with pytest.raises(RuntimeError), memory.question():
        many_chunks(memory, streams)
        raise RuntimeError
    assert_same(state_of(memory), before)


# --- whole documents -----------------------------------------------------------------------------


@chunkings
def test_a_whole_document_is_attended_densely(chunks: list[int]) -> None:
    g = make_geometry()
    stream = make_stream(g, 150)
    memory, dense = make_memory(g, whole_tokens=150), Definition(g, CONFIG)
    for _, length in pieces(chunks, 150):
        out, step = run(memory, stream, length)
        check_step(dense, stream, out, step, evict=False)
    assert memory.blocks == 0


def test_an_outgrown_whole_document_turns_to_tiers() -> None:
    g = make_geometry()
    stream = make_stream(g, 300)
    memory, definition = make_memory(g, whole_tokens=100), Definition(g, CONFIG)
    definition.g = g
    for start, length in pieces([16], 300):
        outgrown = definition.tokens + length > 100
        if outgrown and not definition.tiers:
            definition.evict((start - CONFIG.sink_tokens - CONFIG.window_tokens) // 9)
        out, step = run(memory, stream, length)
        # Which tokens represent a block differs (no queries were kept), so the choice is given.
        loaded = step.loaded.get(0)
        given = [[], []] if loaded is None else loaded.tolist()
        expected, _ = definition.attend(
            *stream.part(start, length), Phase.READ, given, evict=outgrown
        )
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        assert memory.blocks == definition.blocks
        assert (memory.blocks > 0) == outgrown


def test_a_full_segment_is_never_copied_again() -> None:
    g = make_geometry()
    stream, memory = make_stream(g, 300), make_memory(g)
    [layer] = memory.tiered
    read(memory, stream, 150)
    first = layer.arena.segments[0].keys.codes.data_ptr()
    read(memory, stream, 150)
    assert layer.arena.segments[0].keys.codes.data_ptr() == first and memory.blocks > 25
    assert [part.blocks for part in layer.arena.parts()][:5] == [5] * 5


# --- sliding layers ------------------------------------------------------------------------------


@chunkings
@pytest.mark.parametrize("window", [1, 2, 12, 50])
def test_a_sliding_layer_attends_a_band(chunks: list[int], window: int) -> None:
    g = make_geometry(sliding=window)
    stream = make_stream(g, 80)
    layer = SlidingLayer(g, 16)
    keys = rotate(stream.k, range(80), g.rotary)
    queries = rotate(stream.q, range(80), g.rotary)
    held = set()
    for start, length in pieces(chunks, 80):
        step = Step(Phase.READ, start, length)
        out = layer.attend(*stream.part(start, length), step)
        assert len(layer.window) <= max(window - 1, 0)
        if start > 50:
            held.add(layer.device_bytes)
        for head in range(g.heads):
            for i in range(length):
                band = slice(max(0, start + i - window + 1), start + i + 1)
                scores = keys[head // 3, band] @ queries[head, start + i] * g.scaling
                expected = torch.softmax(scores, 0) @ stream.v[head // 3, band].double()
                torch.testing.assert_close(out[head, i].double(), expected, rtol=0, atol=1e-5)
    assert len(held) == 1


# --- the parts -----------------------------------------------------------------------------------


def make_window(lead: int = 4) -> Window:
    return Window(
        2, 3, 5, lead, dtype=torch.float32, device=CPU, keep_raw=True, keep_query_sums=True
    )


def fill(window: Window, tokens: int, slack: int = 3) -> None:
    """Keys and values that tell their position; every query is ones."""
    at = torch.arange(window.end, window.end + tokens, dtype=torch.float32)[None, :, None]
    window.make_room(tokens, slack)
    window.push(
        at.expand(2, -1, 3), -at.expand(2, -1, 3), at.expand(2, -1, 5), torch.ones(2, tokens, 3)
    )


def held_positions(window: Window) -> list[int]:
    assert window.raw is not None
    slots = slice(window.first, window.last)
    assert torch.equal(window.raw[:, slots], -window.rotated[:, slots])
    assert torch.equal(window.raw[0, slots, 0], window.values[1, slots, 4])
    return window.raw[0, slots, 0].int().tolist()


def test_a_window_holds_the_most_recent_tokens_wherever_they_lie() -> None:
    window = make_window()
    for _ in range(30):
        fill(window, 7)
        window.drop(max(0, len(window) - 10))
        assert held_positions(window) == list(range(window.start, window.end))
        assert window.first >= window.lead
        sums = window.query_sums
        assert sums is not None
        slots = slice(window.first, window.last)
        # Counted from the window's beginning: sums over a long document would lose their digits.
        assert sums[1, slots, 2].tolist() == list(range(len(window)))
    assert window.end == 210 and len(window) == 10
    assert window.rotated.shape[1] <= 4 + 10 + 7 + 3


def test_a_window_grows_only_when_more_is_held() -> None:
    window = make_window()
    fill(window, 9, slack=0)
    assert window.rotated.shape[1] == 13
    fill(window, 2, slack=5)
    grown = window.nbytes
    fill(window, 5, slack=5)
    assert window.nbytes == grown and held_positions(window) == list(range(16))
    window.drop(16)
    assert len(window) == 0 and window.start == window.end == 16
    fill(window, 3)
    assert held_positions(window) == [16, 17, 18] and window.nbytes == grown


def test_a_copied_window_is_independent() -> None:
    window = make_window()
    fill(window, 9)
    window.drop(2)
    twin = window.copy()
    fill(window, 4)
    window.rotated.fill_(0)
    assert held_positions(twin) == list(range(2, 9)) and twin.start == 2
    fill(twin, 4)
    assert held_positions(twin) == list(range(2, 13))


def test_an_arena_grows_and_gathers_per_head() -> None:
    arena = BlockArena(2, 4, 3, 5, torch.float32)
    assert arena.host_bytes == 0
    tokens = torch.arange(2 * 40, dtype=torch.float32).view(2, 40, 1)
    for start, length in ((0, 4), (4, 12), (16, 24)):
        part = tokens[:, start : start + length]
        arena.append(part.expand(-1, -1, 3), -part.expand(-1, -1, 5))
    assert arena.count == 10 and arena.host_bytes == 10 * 2 * 4 * (3 + 5) * 4
    keys, values = arena.gather(torch.tensor([[0, 9], [3, 4]]))
    assert keys.shape == (2, 8, 3) and values.shape == (2, 8, 5)
    assert keys[0, :, 2].tolist() == [0, 1, 2, 3, 36, 37, 38, 39]
    assert values[1, :, 4].tolist() == [-(40 + i) for i in range(12, 20)]
    arena.truncate(3)
    arena.append(tokens[:, :4].expand(-1, -1, 3), tokens[:, :4].expand(-1, -1, 5))
    assert arena.count == 4
    assert arena.gather(torch.tensor([[3], [2]]))[0][:, :, 0].tolist() == [
        [0, 1, 2, 3],
        [48, 49, 50, 51],
    ]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_stretch_is_the_same_whatever_parts_it_lies_in(frozen: bool) -> None:
    arena = BlockArena(1, 4, 1, 1, torch.float32, segment_blocks=3)
    tokens = torch.arange(44.0).view(1, -1, 1)
    arena.append(tokens[:, :20], -tokens[:, :20])
    if frozen:
        arena.freeze()
    arena.append(tokens[:, 20:], -tokens[:, 20:])
    assert [part.blocks for part in arena.parts()] == ([3, 2, 3, 3] if frozen else [3, 3, 3, 2])
    for first in range(45):
        for last in range(first, 45):
            keys, values = arena.stretch(first, last)
            assert torch.equal(keys, tokens[:, first:last]) and torch.equal(values, -keys)


def test_an_arena_seals_only_whole_blocks() -> None:
    arena = BlockArena(1, 4, 3, 3, torch.float32)
    with pytest.raises(AssertionError):
        arena.append(torch.zeros(1, 6, 3), torch.zeros(1, 6, 3))


def test_angles_stay_exact_at_a_million_tokens() -> None:
    rotary = Rotary(torch.tensor([1.0, 0.1]))
    x = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    turned = rotary.rotate(x, rotary.table(1_000_000, 3))
    expected = rotate(x, range(1_000_000, 1_000_003), rotary)
    torch.testing.assert_close(turned.double(), expected, rtol=0, atol=1e-6)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"sink_tokens": 0}, "--sinks is 0"),
        ({"window_tokens": 15}, "--window is 15"),
        ({"block_tokens": 7}, "--block is 7"),
        ({"chunk_tokens": 0}, "--chunk is 0"),
        ({"read_blocks": -1}, "--read-blocks is -1"),
        ({"answer_blocks": 0}, "--blocks is 0"),
        ({"representatives_per_block": 0}, "--representatives is 0"),
        ({"representatives_per_block": 129}, "representatives per block"),
        ({"window_tokens": 127}, "--window is 127; it must hold at least one block"),
    ],
)
def test_impossible_sizes_are_refused_by_their_flag(sizes: dict[str, int], flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        MemoryConfig(**sizes)


def test_a_context_longer_than_the_training_is_refused_with_its_parts() -> None:
    with pytest.raises(UsageError) as refusal:
        MemoryConfig().check_fits(2048)
    for part in ("64", "8 x 128", "1024", "512", "2752", "2048", "--window", "--blocks", "--chunk"):
        assert part in str(refusal.value)
    MemoryConfig().check_fits(MemoryConfig().context_tokens)


@pytest.mark.parametrize("trained", [512, 1024, 2048, 4096])
def test_defaults_shrink_to_the_trained_length(trained: int) -> None:
    config = MemoryConfig.for_model(trained)
    assert config.context_tokens <= trained
    assert config.context_tokens > trained / 3  # and not to nothing
    assert (config == MemoryConfig()) == (trained >= 2752)


def test_given_sizes_are_kept_or_refused() -> None:
    config = MemoryConfig.for_model(2048, window_tokens=1024, chunk_tokens=None)
    assert config.window_tokens == 1024 and config.context_tokens <= 2048
    config = MemoryConfig.for_model(2048, block_tokens=256, sink_tokens=60)
    assert (config.block_tokens, config.sink_tokens) == (256, 60)
    with pytest.raises(UsageError, match="trained on 1024"):
        MemoryConfig.for_model(1024, window_tokens=1024)


def test_sizes_are_reported_as_plain_values() -> None:
    assert MemoryConfig().as_dict()["read_lookup"] == "representatives"
    assert MemoryConfig().as_dict()["window_tokens"] == 1024
