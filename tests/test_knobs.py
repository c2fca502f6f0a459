"""Every knob of the method against its definition, written out the slow way; the device cache."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from layer_streams import CPU, TOLERANCE, make_geometry, make_stream, rotate
from tiny_readers import SMALL, make_reader, memory_contents, read_text, same_contents
from tiny_tokenizers import prose
from torch import Tensor

from infllm_cli.errors import UsageError
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_cache import DeviceCache, Slots
from infllm_cli.memory.dropping import drop_least_used
from infllm_cli.memory.knobs import (
    CachePolicy,
    Policy,
    Positions,
    Relevance,
    RepresentativeRule,
    Sharing,
)
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.representatives import exemplars, stride
from infllm_cli.memory.step import Phase, Step
from infllm_cli.sampling import Answering, AnswerOptions

# Odd sizes on purpose: nothing divides anything.
CONFIG = MemoryConfig(
    sink_tokens=3,
    window_tokens=21,
    block_tokens=9,
    chunk_tokens=16,
    read_blocks=2,
    answer_blocks=3,
    segment_blocks=5,
    codec=Codec.FULL,
)
LONG = 100_000


class Defined:
    """What a layer must answer under any knobs; every key is looked at anew at every step."""

    def __init__(self, g: LayerGeometry, config: MemoryConfig) -> None:
        self.g, self.c = g, config
        self.q = self.k = self.v = None
        self.blocks = 0
        self.mass = torch.zeros(g.kv_heads, 0, dtype=torch.float64)  # drawn while in the window
        self.representatives: list[list[list[int]]] = []  # block -> KV head -> tokens

    def group(self, kv: int) -> range:
        size = self.g.heads // self.g.kv_heads
        return range(kv * size, (kv + 1) * size)

    def in_block(self, block: int) -> list[int]:
        start = self.c.sink_tokens + block * self.c.block_tokens
        return list(range(start, start + self.c.block_tokens))

    def step(self, q: Tensor, k: Tensor, v: Tensor, phase: Phase) -> tuple[Tensor, list[list[int]]]:
        """Output [H, L, d], and the blocks of each KV head."""
        g, c, length = self.g, self.c, q.shape[1]
        if self.k is None:
            self.q, self.k, self.v = q, k, v
        else:
            pairs = ((self.q, q), (self.k, k), (self.v, v))
            self.q, self.k, self.v = (torch.cat(pair, dim=1) for pair in pairs)
        end = self.k.shape[1]
        self.mass = torch.cat([self.mass, torch.zeros(g.kv_heads, length).double()], dim=1)
        chosen = self.choose(q, phase)
        start = c.sink_tokens + self.blocks * c.block_tokens if self.blocks else 0
        sinks = list(range(c.sink_tokens)) if self.blocks else []
        window = list(range(start, end))
        out = torch.zeros(g.heads, length, g.value_dim, dtype=torch.float64)
        for kv in range(g.kv_heads):
            far = sinks + [token for block in chosen[kv] for token in self.in_block(block)]
            context = far + window
            values = self.v[kv, context].double()
            for head in self.group(kv):
                for i in range(length):
                    own = len(context) - length + i  # where the query stands in the context
                    seen = range(own + 1)
                    if c.positions is Positions.SAME_DISTANCE:
                        distance = [c.window_tokens if s < len(far) else own - s for s in seen]
                    else:
                        distance = [own - s for s in seen]
                    keys = rotate(self.k[kv, context[: own + 1]], [-d for d in distance], g.rotary)
                    weights = torch.softmax(keys @ q[head, i].double() * g.scaling, dim=-1)
                    out[head, i] = weights @ values[: own + 1]
                    for slot, token in enumerate(context[: own + 1]):
                        if slot >= len(far):
                            self.mass[kv, token] += weights[slot]
        surplus = end - (start or c.sink_tokens) - c.window_tokens
        self.evict(surplus // c.block_tokens)
        return out, chosen

    def choose(self, q: Tensor, phase: Phase) -> list[list[int]]:
        c, reading = self.c, phase is Phase.READ
        wanted = c.read_blocks if reading else c.answer_blocks
        kind = c.read_lookup if reading else c.answer_lookup
        relevance = [self.relevance(q, kv, kind) for kv in range(self.g.kv_heads)]
        if c.sharing is Sharing.PER_LAYER:
            together = [sum(of_block) for of_block in zip(*relevance, strict=True)]
            relevance = [together] * self.g.kv_heads
        return [
            sorted(sorted(range(self.blocks), key=lambda b, row=row: -row[b])[:wanted])
            for row in relevance
        ]

    def relevance(self, q: Tensor, kv: int, kind: Lookup) -> list[float]:
        """Of each block, for one KV head."""
        c, exact = self.c, kind is Lookup.EXACT
        what = c.exact_relevance if exact else c.representatives_relevance
        far = rotate(q[self.group(kv)], [c.window_tokens] * q.shape[1], self.g.rotary)
        queries = far.reshape(-1, self.g.head_dim)
        scores = []
        for block in range(self.blocks):
            keys = self.k[kv, self.in_block(block)].double()
            if not exact and c.representative_rule is RepresentativeRule.MEAN:
                keys = keys.mean(dim=0, keepdim=True)
            elif not exact:
                keys = self.k[kv, self.representatives[block][kv]].double()
            scores.append(queries @ keys.T * self.g.scaling)  # [Q, keys]
        if not scores:
            return []
        if what is Relevance.SUM:
            return [float(s.sum()) for s in scores]
        if what is Relevance.MAX:
            return [float(s.max(dim=1).values.sum()) for s in scores]
        weights = torch.softmax(torch.cat(scores, dim=1), dim=1).sum(dim=0)
        return [float(part.sum()) for part in weights.split([s.shape[1] for s in scores])]

    def evict(self, blocks: int) -> None:
        for block in range(self.blocks, self.blocks + max(0, blocks)):
            last = self.blocks + blocks
            self.representatives.append(
                [self.stand_for(self.in_block(block), kv, last) for kv in range(self.g.kv_heads)]
            )
        self.blocks += max(0, blocks)

    def stand_for(self, tokens: list[int], kv: int, last: int) -> list[int]:
        rule, r, c = self.c.representative_rule, self.c.representatives_per_block, self.c
        if rule is RepresentativeRule.ATTENTION:
            return sorted(tokens, key=lambda t: -float(self.mass[kv, t]))[:r]
        if rule is RepresentativeRule.STRIDE:
            # The middle of r stretches as equal as they can be.
            return [tokens[int((i + 0.5) * len(tokens) / r)] for i in range(r)]
        if rule is RepresentativeRule.EXEMPLAR:
            keys = {t: self.k[kv, t].double() for t in tokens}
            mean = sum(keys.values()) / len(keys)
            chosen = [max(tokens, key=lambda t: float((keys[t] - mean).norm()))]
            while len(chosen) < r:
                rest = [t for t in tokens if t not in chosen]
                chosen.append(
                    max(rest, key=lambda t: min(float((keys[t] - keys[o]).norm()) for o in chosen))
                )
            return chosen
        if rule is RepresentativeRule.MEAN:
            return []
        in_window = self.k.shape[1] - c.sink_tokens - last * c.block_tokens
        followers = min(c.window_tokens, in_window)

        def score(token: int) -> float:
            places = range(token, token + 1 + followers)
            key = rotate(self.k[kv, token : token + 1], [token], self.g.rotary)[0]
            after = list(places)[1:]
            queries = rotate(self.q[self.group(kv)][:, after], after, self.g.rotary)
            return float((queries @ key).sum())

        return sorted(tokens, key=lambda t: -score(t))[:r]


def check(config: MemoryConfig, shape: tuple[int, int] = (6, 2), dtype=torch.float32) -> None:
    """A layer's steps against the definition, until there are ten blocks; then a question."""
    g = make_geometry(*shape, dtype=dtype)
    stream = make_stream(g, 150)
    layer, defined = LayerMemory(g, config, trained_length=LONG), Defined(g, config)
    start, found_blocks = 0, 0
    for phase, length in [(Phase.READ, 16)] * 8 + [(Phase.ASK, 7), (Phase.ANSWER, 1)]:
        step = Step(phase, start, length)
        if phase is not Phase.READ:
            step.mass = torch.zeros(step.end)
        part = stream.part(start, length)
        out = layer.attend(*part, step)
        expected, chosen = defined.step(*part, phase)
        found = step.loaded.get(g.index)
        assert (found.tolist() if found is not None else [[]] * g.kv_heads) == chosen
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[dtype])
        found_blocks = max(found_blocks, layer.arena.count)
        start += length
    assert found_blocks >= 10


PAPER = MemoryConfig(
    policy=Policy.INFLLM_PAPER,
    sink_tokens=3,
    window_tokens=21,
    block_tokens=9,
    chunk_tokens=16,
    answer_blocks=3,
    segment_blocks=5,
    codec=Codec.FULL,
)


@pytest.mark.parametrize("shape", [(6, 2), (4, 4)])
def test_the_published_method_is_what_was_published(shape) -> None:
    assert PAPER.read_blocks == PAPER.answer_blocks == 3
    assert PAPER.read_lookup is PAPER.answer_lookup is Lookup.REPRESENTATIVES
    assert PAPER.representative_rule is RepresentativeRule.ATTENTION
    assert PAPER.representatives_per_block == 4
    assert PAPER.sharing is Sharing.PER_LAYER
    assert PAPER.positions is Positions.SAME_DISTANCE
    check(PAPER, shape)


def test_what_is_given_wins_over_what_was_published() -> None:
    config = MemoryConfig.for_model(
        8192, policy=Policy.INFLLM_PAPER, answer_lookup=Lookup.EXACT, read_blocks=2
    )
    assert config.answer_lookup is Lookup.EXACT and config.read_blocks == 2
    assert config.positions is Positions.SAME_DISTANCE
    assert MemoryConfig.from_dict(config.as_dict()) == config


def test_all_kv_heads_of_a_layer_load_the_same_blocks() -> None:
    g = make_geometry(6, 3)
    stream, start = make_stream(g, 144), 0
    layer = LayerMemory(g, replace(CONFIG, sharing=Sharing.PER_LAYER), trained_length=LONG)
    alone = LayerMemory(g, CONFIG, trained_length=LONG)
    rows, own = [], []
    for _ in range(9):
        for memory, found in ((layer, rows), (alone, own)):
            step = Step(Phase.READ, start, 16)
            memory.attend(*stream.part(start, 16), step)
            found += [step.loaded[0]] if 0 in step.loaded else []
        start += 16
    assert all(bool((found == found[:1]).all()) for found in rows)
    assert not all(bool((found == found[:1]).all()) for found in own)


@pytest.mark.parametrize("rule", list(RepresentativeRule))
@pytest.mark.parametrize("count", [1, 3])
def test_every_rule_chooses_by_its_definition(rule, count) -> None:
    check(replace(CONFIG, representative_rule=rule, representatives_per_block=count))


@pytest.mark.parametrize("lookup", list(Lookup))
@pytest.mark.parametrize("relevance", list(Relevance))
def test_every_relevance_ranks_by_its_definition(relevance, lookup) -> None:
    check(replace(CONFIG, relevance=relevance, read_lookup=lookup, answer_lookup=lookup))


@pytest.mark.parametrize("shape", [(6, 2), (4, 4)])
@pytest.mark.parametrize("sharing", list(Sharing))
@pytest.mark.parametrize("positions", list(Positions))
def test_positions_and_sharing_are_as_defined(positions, sharing, shape) -> None:
    check(replace(CONFIG, positions=positions, sharing=sharing), shape)


def test_the_published_method_in_bfloat16_is_close_while_choices_are_the_same() -> None:
    g = make_geometry(dtype=torch.bfloat16)
    stream = make_stream(g, 80)
    # All blocks are loaded, so that no choice can differ by rounding.
    config = replace(PAPER, answer_blocks=9, read_blocks=9)
    layer, defined = LayerMemory(g, config, trained_length=LONG), Defined(g, config)
    for start in range(0, 80, 16):
        part = stream.part(start, 16)
        out = layer.attend(*part, Step(Phase.READ, start, 16))
        expected, _ = defined.step(*part, Phase.READ)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[torch.bfloat16])
    assert layer.arena.count >= 6


@pytest.mark.parametrize("size", [7, 32, 63, 128])
@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_a_stride_is_in_the_middle_of_equal_stretches(size, count) -> None:
    found = stride(size, count).tolist()
    assert len(set(found)) == count and found == sorted(found)
    assert found[0] >= 0 and found[-1] < size
    gaps = [b - a for a, b in itertools.pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_exemplars_are_different_tokens_even_of_equal_keys() -> None:
    found = exemplars(torch.ones(2, 3, 9, 5), 6)
    assert found.shape == (2, 3, 6)
    assert all(len(set(row)) == 6 for row in found.flatten(0, 1).tolist())


@pytest.mark.parametrize("relevance", list(Relevance))
@pytest.mark.parametrize("lookup", list(Lookup))
def test_dropped_blocks_are_found_by_no_ranking(relevance, lookup) -> None:
    config = replace(SMALL, segment_blocks=4, codec=Codec.INT8)
    config = replace(config, relevance=relevance, read_lookup=lookup, answer_lookup=lookup)
    reader = make_reader(config=config)
    memory = read_text(reader, prose(3000))
    dropped = drop_least_used(memory.state, 9)
    assert dropped == 9
    layer = memory.state.tiered[0]
    gone = set(layer.arena.missing().nonzero()[:, 0].tolist())
    step, _ = reader.forward(memory.state, Phase.ASK, torch.arange(5))
    found = set(step.loaded[0].flatten().tolist())
    assert len(gone) == 9 and found and not found & gone


# --- sizes ---------------------------------------------------------------------------------------


def test_representatives_are_1_to_16_and_a_cache_holds_a_step() -> None:
    with pytest.raises(UsageError, match="--representatives is 17; it can be at most 16"):
        MemoryConfig(representatives_per_block=17)
    with pytest.raises(UsageError, match="--device-cache is 7; it must hold at least the 8"):
        MemoryConfig(device_cache_blocks=7)
    with pytest.raises(UsageError, match="--infini-segment is 8193 tokens"):
        MemoryConfig.for_model(8192, policy=Policy.INFINI, infini_segment_tokens=8193)
    assert MemoryConfig.for_model(2048, policy=Policy.INFINI).infini_segment_tokens == 1024


@pytest.mark.parametrize("size", [32, 64, 256])
def test_blocks_of_other_sizes_hold_the_same_tokens(size) -> None:
    config = MemoryConfig.for_model(2048, block_tokens=size, codec=Codec.FULL)
    memory = read_text(make_reader(config=config), prose(6000))
    layer = memory.state.tiered[0]
    assert layer.arena.block_tokens == size and layer.arena.count > 1
    assert config.sink_tokens + layer.arena.count * size == layer.window.start


# --- device cache --------------------------------------------------------------------------------


def test_lru_gives_up_what_was_not_used_for_longest() -> None:
    slots = Slots(3, CachePolicy.LRU)
    for block in (1, 2, 3, 1):
        slots.want([block])
    slots.want([4])
    assert sorted(slots.blocks) == [1, 3, 4] and (slots.hits, slots.misses) == (1, 4)


def test_fifo_gives_up_what_came_first_however_often_it_was_used() -> None:
    slots = Slots(3, CachePolicy.FIFO)
    for block in (1, 2, 3, 1, 1):
        slots.want([block])
    slots.want([4])
    assert sorted(slots.blocks) == [2, 3, 4]


def test_lru_s_gives_up_the_lowest_score_and_scores_fade_by_a_tenth() -> None:
    slots = Slots(3, CachePolicy.LRU_S)
    expected: dict[int, float] = {}
    for step, (block, mass) in enumerate([(1, 9.0), (2, 0.5), (3, 0.2), (1, 0.1)]):
        slots.want([block])
        slots.attended([block], [mass])
        expected = {b: 0.1 * s for b, s in expected.items()}
        expected[block] = expected.get(block, 0.0) + mass
        assert slots.score == pytest.approx(expected), step
    slots.want([4])
    # 2 has faded to 0.005, 3 to 0.02.
    assert 2 not in slots and sorted(slots.blocks) == [1, 3, 4]


def test_random_gives_up_any_and_the_same_for_a_seed() -> None:
    def course(seed: int) -> list[list[int]]:
        slots = Slots(4, CachePolicy.RANDOM, seed)
        held = []
        for block in range(40):
            slots.want([block])
            held.append(sorted(slots.blocks))
        return held

    assert course(3) == course(3) != course(4)


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_what_a_step_needs_never_leaves_and_slots_are_never_shared(policy) -> None:
    draw = random.Random(5)
    slots, place = Slots(6, policy), {}
    for _ in range(500):
        blocks = draw.sample(range(20), draw.randint(1, 6))
        before = set(slots.blocks)
        found, missing = slots.want(blocks)
        assert set(missing) == set(blocks) - before
        assert len(set(found)) == len(blocks) and set(blocks) <= set(slots.blocks)
        for block, slot in zip(blocks, found, strict=True):
            assert block in missing or place[block] == slot, "who stays, stays in its slot"
            place[block] = slot
        slots.attended(blocks, [draw.random() for _ in blocks])
        assert len(slots.blocks) <= 6 and set(slots.score) == set(slots.blocks)
    assert slots.hits > 0 and slots.misses > 0


def test_blocks_that_are_no_more_are_forgotten() -> None:
    slots = Slots(4, CachePolicy.LRU)
    slots.want([1, 5, 8])
    slots.forget_from(5)
    assert slots.blocks == [1]
    assert slots.want([8])[1] == [8]


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_a_cache_gives_what_loading_gives(policy) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.randn(3, 30, 4, 5, generator=generator), torch.randn(3, 30, 4, 2)
    loaded = 0

    def load(blocks: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal loaded
        loaded += 1
        heads = torch.arange(3)[:, None]
        return keys[heads, blocks].flatten(1, 2), values[heads, blocks].flatten(1, 2)

    cache = DeviceCache(7, policy, (3, 4, 5, 2), torch.float32, CPU)
    for _ in range(60):
        few = [torch.randperm(9, generator=generator)[:4] for _ in range(3)]
        blocks = torch.stack(few).sort(dim=1).values
        expected = load(blocks)
        found = cache.fetch(blocks, load)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        cache.attended(blocks, torch.rand(3, 4, generator=generator))
    assert cache.hits + cache.misses == 60 * 3 * 4 and cache.hits > cache.misses
    assert cache.nbytes == 3 * 7 * 4 * (5 + 2) * 4


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_a_device_cache_changes_no_answer_and_no_memory(policy) -> None:
    options = AnswerOptions(max_tokens=6, answering=Answering.MEMORY)
    config = replace(SMALL, device_cache_blocks=4, device_cache_policy=policy)
    plain = make_reader()
    cached = make_reader(config=config)
    memories = [read_text(reader, prose(3000)) for reader in (plain, cached)]
    assert same_contents(*(memory_contents(memory) for memory in memories))
    for question in ("Who is it?", "And who else?"):
        texts = [
            reader.ask(memory, question, options).text
            for reader, memory in zip((plain, cached), memories, strict=True)
        ]
        assert texts[0] == texts[1]
    told = memories[1].state.device_cache
    assert told["hits"] > 0 and told["misses"] > 0
    assert memories[0].state.device_cache is None
