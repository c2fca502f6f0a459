"""Every policy through one test matrix, and each against its definition, written out slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layer_streams import CPU, TOLERANCE, Stream, make_geometry, make_stream, rotate
from torch import Tensor

from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import InfiniUpdate, Policy
from infllm_cli.memory.layer import Layer, LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.policies.choose import build_layer
from infllm_cli.policies.compressive import Memory, retrieve, sigma, written
from infllm_cli.policies.h2o import H2OLayer
from infllm_cli.policies.infini import InfiniLayer

TRAINED = 90
# Odd sizes on purpose: nothing divides anything.
SIZES = {
    "sink_tokens": 3,
    "window_tokens": 21,
    "block_tokens": 9,
    "chunk_tokens": 16,
    "answer_blocks": 2,
    "segment_blocks": 5,
    "infini_segment_tokens": 23,
    "codec": Codec.FULL,
}
POLICIES = list(Policy)
BLOCKLESS = [policy for policy in Policy if not policy.has_blocks]
# What a token sees does not depend on the chunk that it comes in.
CHUNK_FREE = [Policy.DENSE, Policy.STREAMING_LLM, Policy.LM_INFINITE, Policy.INFINI]
SHAPES = [(6, 2), (4, 4)]


def config_of(policy: Policy, **changes: object) -> MemoryConfig:
    return MemoryConfig(policy=policy, **{**SIZES, **changes})


def make_layer(
    policy: Policy, g: LayerGeometry, gates: Tensor | None = None, **changes: object
) -> Layer:
    config = config_of(policy, **changes)
    if policy.has_blocks:
        return LayerMemory(g, config, trained_length=TRAINED)
    return build_layer(g, config, TRAINED, gates)


def feed(
    layer: Layer,
    stream: Stream,
    chunks: list[int],
    start: int = 0,
    phase: Phase = Phase.READ,
    keep_from: int | None = None,
) -> Tensor:
    """Outputs [H, n, d] of the next tokens, in steps of so many."""
    out = []
    for length in chunks:
        step = Step(phase, start, length, keep_from)
        if phase is not Phase.READ:
            step.mass = torch.zeros(step.end)
        out.append(layer.attend(*stream.part(start, length), step))
        start += length
    return torch.cat(out, dim=1)


def in_chunks(total: int, size: int) -> list[int]:
    return [min(size, total - done) for done in range(0, total, size)]


def attended(
    g: LayerGeometry,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    distances: list[int],
) -> tuple[Tensor, Tensor]:
    """Output [H, d] and weights [H, n] of one query [H, d] over keys so many positions away."""
    group = g.heads // g.kv_heads
    scores = []
    for head in range(g.heads):
        # Only the distance counts: the query stands at 0, a key at minus its distance.
        turned = rotate(keys[head // group], [-d for d in distances], g.rotary)
        scores.append((turned @ q[head].double()) * g.scaling)
    score = torch.stack(scores)
    if g.softcap is not None:
        score = torch.tanh(score / g.softcap) * g.softcap
    weights = torch.softmax(score, dim=-1)
    out = [weights[h] @ values[h // group].double() for h in range(g.heads)]
    return torch.stack(out), weights


def defined(
    g: LayerGeometry, stream: Stream, sees: Callable[[int], list[tuple[int, int]]]
) -> Tensor:
    """Outputs [H, n, d] where the token at t sees `sees(t)`: positions and their distances."""
    out = []
    for t in range(stream.k.shape[1]):
        at = sees(t)
        places = [position for position, _ in at]
        keys, values = stream.k[:, places], stream.v[:, places]
        out.append(attended(g, stream.q[:, t], keys, values, [d for _, d in at])[0])
    return torch.stack(out, dim=1)


def dense(t: int) -> list[tuple[int, int]]:
    return [(j, t - j) for j in range(t + 1)]


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_the_window_is_attended_as_dense_attention_does(policy, shape, dtype) -> None:
    g = make_geometry(*shape, dtype=dtype)
    stream = make_stream(g, 23)  # of 3 + 21 + 2 * 9, and of the segment
    gates = torch.full((g.heads,), 0.5)
    found = feed(make_layer(policy, g, gates), stream, [7, 1, 9, 6])
    torch.testing.assert_close(
        found.double(), defined(g, stream, dense), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", CHUNK_FREE)
def test_chunk_sizes_make_no_difference(policy, shape, dtype) -> None:
    g = make_geometry(*shape, dtype=dtype, softcap=2.0)
    stream = make_stream(g, 140)
    gates = torch.linspace(0.1, 0.9, g.heads)
    one = feed(make_layer(policy, g, gates), stream, in_chunks(140, 1))
    for size in (11, 16, 140):
        other = feed(make_layer(policy, g, gates), stream, in_chunks(140, size))
        # A query's own rounding and that of the products' order.
        torch.testing.assert_close(other, one, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_question_leaves_no_trace(policy) -> None:
    g = make_geometry()
    stream, gates = make_stream(g, 160), torch.full((g.heads,), 0.3)
    layer, other = (make_layer(policy, g, gates) for _ in range(2))
    feed(layer, stream, in_chunks(97, 16))
    feed(other, stream, in_chunks(97, 16))
    held = layer.device_bytes + layer.host_bytes
    for asked in ([5, 1, 1, 1], [16, 16, 16]):
        layer.mark()
        feed(layer, stream, asked, 97, Phase.ASK, keep_from=97)
        layer.mark()
        feed(layer, stream, [7, 1], 97 + sum(asked), Phase.ANSWER, keep_from=97)
        layer.rollback()
        layer.rollback()
    rest = in_chunks(63, 16)
    assert torch.equal(feed(layer, stream, rest, 97), feed(other, stream, rest, 97))
    assert held > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_mass_adds_up_to_what_was_attended(policy) -> None:
    g = make_geometry()
    stream, gates = make_stream(g, 160), torch.full((g.heads,), 0.25)
    layer = make_layer(policy, g, gates)
    feed(layer, stream, in_chunks(140, 16))
    for length in (6, 1):
        step = Step(Phase.ASK, 140, length, 140)
        step.mass, step.by_layer = torch.zeros(step.end), {}
        layer.mark()
        layer.attend(*stream.part(140, length), step)
        layer.rollback()
        # Of Infini-attention the matrix has no place in the document.
        share = 0.75 if policy is Policy.INFINI else 1.0
        assert float(step.mass.sum()) == pytest.approx(g.heads * length * share, rel=1e-4)
        assert torch.equal(step.by_layer[g.index], step.mass)


@pytest.mark.parametrize("policy", [p for p in BLOCKLESS if p is not Policy.DENSE])
def test_the_budget_is_never_exceeded(policy) -> None:
    g = make_geometry()
    stream = make_stream(g, 400)
    layer = make_layer(policy, g)
    chunk = SIZES["chunk_tokens"]
    config = config_of(policy)
    most, start = [], 0
    for length in in_chunks(400, chunk):
        feed(layer, stream, [length], start)
        start += length
        most.append(layer.device_bytes)
        if isinstance(layer, H2OLayer):
            assert layer.kept.keys.shape[1] == min(start, config.budget_tokens)
        elif isinstance(layer, InfiniLayer):
            assert layer.held < config.infini_segment_tokens
        else:
            assert layer.sink_keys.shape[1] + len(layer.window) < config.budget_tokens
    assert len(set(most[8:])) == 1, "and takes the same bytes from then on"
    assert layer.host_bytes == layer.mapped_bytes == 0


def test_dense_attention_grows_with_every_token() -> None:
    g = make_geometry()
    stream = make_stream(g, 400)
    layer = make_layer(Policy.DENSE, g)
    torch.testing.assert_close(
        feed(layer, stream, in_chunks(400, 33)).double(),
        defined(g, stream, dense),
        rtol=0,
        atol=1e-5,
    )
    assert layer.device_bytes >= 400 * g.kv_heads * (g.head_dim + g.value_dim) * 4


# --- StreamingLLM and LM-Infinite ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_streaming_llm_is_sinks_and_window_at_the_places_of_the_cache(
    shape, dtype, interleaved
) -> None:
    g = make_geometry(*shape, dtype=dtype, interleaved=interleaved)
    stream, config = make_stream(g, 150), config_of(Policy.STREAMING_LLM)

    def sees(t: int) -> list[tuple[int, int]]:
        """The cache after the token has come in: its slots are the positions."""
        window = config.budget_tokens - config.sink_tokens
        cache = list(range(min(t + 1, config.sink_tokens)))
        cache += list(range(max(config.sink_tokens, t + 1 - window), t + 1))
        assert len(cache) <= config.budget_tokens
        return [(j, len(cache) - 1 - slot) for slot, j in enumerate(cache)]

    found = feed(make_layer(Policy.STREAMING_LLM, g), stream, in_chunks(150, 16))
    torch.testing.assert_close(
        found.double(), defined(g, stream, sees), rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_lm_infinite_caps_distances_at_the_trained_length(shape, dtype) -> None:
    g = make_geometry(*shape, dtype=dtype)
    stream, config = make_stream(g, 150), config_of(Policy.LM_INFINITE)
    assert config.budget_tokens < TRAINED < 140, "sinks pass the cap in the middle of a step"

    def sees(t: int) -> list[tuple[int, int]]:
        window = config.budget_tokens - config.sink_tokens
        seen = [j for j in range(t + 1) if j < config.sink_tokens or t - j < window]
        return [(j, min(t - j, TRAINED)) for j in seen]

    found = feed(make_layer(Policy.LM_INFINITE, g), stream, in_chunks(150, 16))
    torch.testing.assert_close(
        found.double(), defined(g, stream, sees), rtol=0, atol=TOLERANCE[dtype]
    )


def test_queries_that_are_scaled_by_position_stand_at_the_capped_one() -> None:
    g = make_geometry(beta=0.5)
    plain = make_geometry()
    stream, config = make_stream(g, 120), config_of(Policy.STREAMING_LLM)
    rotary = g.rotary

    def factor(t: int) -> float:
        place = min(t, config.budget_tokens - 1)
        return 1 + rotary.scale_beta * float(
            torch.log1p(torch.tensor(float(place // rotary.scale_length)))
        )

    scaled = stream.q * torch.tensor([factor(t) for t in range(120)])[None, :, None]
    expected = feed(
        make_layer(Policy.STREAMING_LLM, plain), replace(stream, q=scaled), in_chunks(120, 16)
    )
    found = feed(make_layer(Policy.STREAMING_LLM, g), stream, in_chunks(120, 16))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# --- H2O -----------------------------------------------------------------------------------------


class HeavyHitters:
    """Algorithm 1 of the paper, per KV head, with sinks and a window that are never evicted."""

    def __init__(self, g: LayerGeometry, config: MemoryConfig) -> None:
        self.g, self.c = g, config
        self.kept = [[] for _ in range(g.kv_heads)]
        self.score = [{} for _ in range(g.kv_heads)]

    def attend(self, stream: Stream, start: int, length: int) -> Tensor:
        g, group = self.g, self.g.heads // self.g.kv_heads
        out = torch.zeros(g.heads, length, g.value_dim, dtype=torch.float64)
        for head in range(g.kv_heads):
            cache = self.kept[head] + list(range(start, start + length))
            for j in cache:
                self.score[head].setdefault(j, 0.0)
            for t in range(start, start + length):
                seen = [(slot, j) for slot, j in enumerate(cache) if j <= t]
                own = seen[-1][0]
                one = replace(g, heads=1, kv_heads=1)
                places = [j for _, j in seen]
                for h in range(head * group, (head + 1) * group):
                    out[h, t - start], weights = (
                        x[0]
                        for x in attended(
                            one,
                            stream.q[h : h + 1, t],
                            stream.k[head : head + 1, places],
                            stream.v[head : head + 1, places],
                            [own - slot for slot, _ in seen],
                        )
                    )
                    for j, weight in zip(places, weights.tolist(), strict=True):
                        self.score[head][j] += weight
            while len(cache) > self.c.budget_tokens:
                between = cache[self.c.sink_tokens : len(cache) - self.c.window_tokens]
                lightest = min(between, key=self.score[head].__getitem__)
                cache.remove(lightest)  # and never comes back
                del self.score[head][lightest]
            self.kept[head] = cache
        return out


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_h2o_keeps_the_heaviest_hitters_of_the_paper(shape, chunk) -> None:
    g = make_geometry(*shape)
    stream, config = make_stream(g, 130), config_of(Policy.H2O)
    layer, paper = make_layer(Policy.H2O, g), HeavyHitters(g, config)
    start = 0
    for length in in_chunks(130, chunk):
        expected = paper.attend(stream, start, length)
        found = feed(layer, stream, [length], start)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
        start += length
        assert layer.kept.positions.tolist() == paper.kept
    assert {len(row) for row in paper.kept} == {config.budget_tokens}
    assert paper.kept[0] != paper.kept[1], "every KV head for itself"


@pytest.mark.parametrize("shape", SHAPES)
def test_h2o_in_bfloat16_keeps_its_budget_and_what_it_attends_is_close(shape) -> None:
    g = make_geometry(*shape, dtype=torch.bfloat16)
    stream = make_stream(g, 45)  # nothing has been evicted: choices may differ by rounding
    found = feed(make_layer(Policy.H2O, g), stream, in_chunks(42, 16))
    short = Stream(stream.q[:, :42], stream.k[:, :42], stream.v[:, :42])
    torch.testing.assert_close(
        found.double(), defined(g, short, dense), rtol=0, atol=TOLERANCE[torch.bfloat16]
    )


# --- Infini-attention ----------------------------------------------------------------------------


def infini_defined(
    g: LayerGeometry, stream: Stream, segment: int, gates: Tensor, delta: bool
) -> Tensor:
    """Equations 1 to 6 of the paper, a token and a head at a time, in float64."""
    group, total = g.heads // g.kv_heads, stream.k.shape[1]
    out = torch.zeros(g.heads, total, g.value_dim, dtype=torch.float64)

    def feature(x: Tensor) -> Tensor:
        x = x.double()
        return torch.where(x > 0, x + 1, x.exp())

    matrix = torch.zeros(g.kv_heads, g.head_dim, g.value_dim, dtype=torch.float64)
    z = torch.zeros(g.kv_heads, g.head_dim, dtype=torch.float64)
    for begin in range(0, total, segment):
        end = min(begin + segment, total)
        for t in range(begin, end):
            inside = list(range(begin, t + 1))
            local, _ = attended(
                g, stream.q[:, t], stream.k[:, inside], stream.v[:, inside], [t - j for j in inside]
            )
            for h in range(g.heads):
                f = feature(stream.q[h, t])
                if begin == 0:
                    out[h, t] = local[h]
                    continue
                read = (f @ matrix[h // group]) / (f @ z[h // group])
                out[h, t] = gates[h] * read + (1 - gates[h]) * local[h]
        before, z_before = matrix.clone(), z.clone()
        for head in range(g.kv_heads):
            for t in range(begin, end):
                f = feature(stream.k[head, t])
                value = stream.v[head, t].double()
                if delta and begin:
                    value = value - (f @ before[head]) / (f @ z_before[head])
                matrix[head] += torch.outer(f, value)
                z[head] += f
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("update", list(InfiniUpdate))
def test_infini_attention_is_the_papers_equations(shape, update, dtype) -> None:
    g = make_geometry(*shape, dtype=dtype)
    stream = make_stream(g, 100)
    gates = torch.linspace(0.05, 0.95, g.heads)
    layer = make_layer(Policy.INFINI, g, gates, infini_update=update)
    found = feed(layer, stream, in_chunks(100, 16))
    expected = infini_defined(g, stream, 23, gates, update is InfiniUpdate.DELTA)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert layer.memory.tokens == 92 and layer.held == 8


def test_a_question_stays_in_sight_of_its_answer() -> None:
    g = make_geometry()
    stream, gates = make_stream(g, 120), torch.zeros(g.heads)
    layer = make_layer(Policy.INFINI, g, gates)
    feed(layer, stream, in_chunks(40, 16))  # 17 in the second segment
    layer.mark()
    found = feed(layer, stream, [10, 1, 1, 20], 40, Phase.ASK, keep_from=40)

    def sees(t: int) -> list[tuple[int, int]]:
        return [(j, t - j) for j in range(23, t + 1)]

    end = Stream(stream.q[:, :72], stream.k[:, :72], stream.v[:, :72])
    expected = defined(g, end, lambda t: sees(t) if t >= 23 else dense(t))[:, 40:]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("update", list(InfiniUpdate))
def test_the_compressive_memory_stays_sound_over_a_million_tokens(update) -> None:
    generator = torch.Generator().manual_seed(3)
    memory = Memory.empty(2, 16, 16, CPU)
    segment, total = 8192, 2**20
    largest = 0.0
    for _ in range(total // segment):
        # Keys of real models have a mean and a few large dimensions.
        k = torch.randn(2, segment, 16, generator=generator) + torch.linspace(-2, 2, 16)
        v = torch.randn(2, segment, 16, generator=generator) + 0.5
        largest = max(largest, float(sigma(k).max()))
        memory = memory.plus(written(k, v, memory, update))
        read = retrieve(torch.randn(4, 8, 16, generator=generator), memory)
        assert bool(torch.isfinite(read).all())
        # A mean of values, weighted: never far outside of them.
        assert float(read.abs().max()) < 4
    assert memory.tokens == total
    assert bool(torch.isfinite(memory.matrix).all())
    assert float(memory.normalizer.min()) > 0
    assert float(memory.normalizer.max()) <= total * largest
    if update is InfiniUpdate.LINEAR:  # what all keys have in common is still told exactly
        torch.testing.assert_close(read.mean(), torch.tensor(0.5), rtol=0, atol=0.01)
