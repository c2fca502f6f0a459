"""The device path, driven on CPU tensors, against the CPU path: the same blocks, the same numbers.

With the torch twins the difference is rounding of the order of additions; with the kernels, in the
interpreter, what their tests allow.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from infllm_cli.kernels.dispatch import kernels_for
from layer_streams import Stream, make_geometry, make_stream
from tiny_readers import make_reader, read_text
from torch import Tensor

from infllm_cli.document import decode_document
from infllm_cli.memory import shortlist
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_layer import DeviceLayer
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.join import join, lay_out
from infllm_cli.memory.knobs import CachePolicy, Relevance, RepresentativeRule, Sharing
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.scan_cost import Place
from infllm_cli.memory.snapshot import (
    place_segment,
    restore_state,
    segment_tensors,
    segments_of,
    state_of,
)
from infllm_cli.memory.step import Phase, Step
from infllm_cli.reader import Reader
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.told import as_json, report_facts

CONFIG = MemoryConfig(
    sink_tokens=3,
    window_tokens=21,
    block_tokens=9,
    chunk_tokens=16,
    read_blocks=2,
    answer_blocks=3,
    representatives_per_block=4,
    segment_blocks=5,
    codec=Codec.INT8,
)
LONG = 100_000
# Largest difference of outputs of order 1, of masses as a share of the queries.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}
MASS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

# A document, a question, an answer, another question.
COURSE = [
    *[(Phase.READ, 16)] * 9,
    *[(Phase.ASK, 7), (Phase.ANSWER, 1), (Phase.ANSWER, 1), (Phase.ANSWER, 1)],
]


def make_layers(dtype: torch.dtype = torch.float32, **kinds):
    return [replace(make_geometry(dtype=dtype, **kinds), index=i) for i in range(2)]


def both(config: MemoryConfig, options: DeviceOptions, layers) -> tuple[ModelMemory, ModelMemory]:
    plain = ModelMemory(layers, replace(config, device_cache_blocks=0), trained_length=LONG)
    ours = ModelMemory(layers, config, trained_length=LONG, device=options)
    assert all(isinstance(layer, DeviceLayer) for layer in ours.layers)
    assert not any(isinstance(layer, DeviceLayer) for layer in plain.layers)
    return plain, ours


def run(
    memory: ModelMemory, streams: list[Stream], phase: Phase, length: int, at: int | None = None
):
    step = memory.step(phase, length)
    start = step.start if at is None else at
    with torch.inference_mode():
        outs = [
            layer.attend(*stream.part(start, length), step)
            for layer, stream in zip(memory.layers, streams, strict=True)
        ]
    memory.finish(step)
    return outs, step


def compare(a: tuple[list[Tensor], Step], b: tuple[list[Tensor], Step], dtype) -> None:
    (outs, plain), (others, ours) = a, b
    for out, other in zip(outs, others, strict=True):
        torch.testing.assert_close(other, out, rtol=0, atol=TOLERANCE[dtype])
    assert plain.loaded.keys() == ours.loaded.keys()
    for index, blocks in plain.loaded.items():
        assert torch.equal(blocks, ours.loaded[index])
    assert plain.block_mass.keys() == ours.block_mass.keys()
    for index, mass in plain.block_mass.items():
        atol = MASS_TOLERANCE[dtype] * plain.length * 3
        torch.testing.assert_close(ours.block_mass[index], mass, rtol=0, atol=atol)
    if plain.mass is not None:
        atol = MASS_TOLERANCE[dtype] * plain.length * 6
        torch.testing.assert_close(ours.mass, plain.mass, rtol=0, atol=atol)
        torch.testing.assert_close(ours.mass.sum(), plain.mass.sum(), rtol=1e-3, atol=0)


def follow(config, options, dtype=torch.float32, course=COURSE, **kinds) -> ModelMemory:
    """Let both go through a course, compare every step; the device path's memory."""
    layers = make_layers(dtype, **kinds)
    streams = [make_stream(g, 400) for g in layers]
    plain, ours = both(config, options, layers)
    asked = False
    for phase, length in course:
        if phase is not Phase.READ and not asked:
            for memory in (plain, ours):
                memory.freeze()
                for layer in memory.layers:
                    layer.mark()
                    layer.seal()
            asked = True
        found = [run(memory, streams, phase, length) for memory in (plain, ours)]
        compare(*found, dtype)
    return ours


PLACES = list(Place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("codec", list(Codec))
def test_the_device_path_computes_what_the_cpu_path_does(codec: Codec, place: Place) -> None:
    ours = follow(replace(CONFIG, codec=codec), DeviceOptions(on_cpu=True, scan=place))
    assert all(layer.scanned is place for layer in ours.layers)
    assert (ours.layers[0].keys.nbytes > 0) == (place is Place.DEVICE)


@pytest.mark.parametrize(
    ("codec", "place"),
    [(Codec.FULL, Place.DEVICE), (Codec.INT8, Place.DEVICE), (Codec.INT4, Place.BUS)],
)
def test_the_kernels_compute_it_too(monkeypatch, codec: Codec, place: Place) -> None:
    monkeypatch.setattr(kernels_for("cpu"), "triton", True)
    config = replace(CONFIG, codec=codec, segment_blocks=2)
    course = [*[(Phase.READ, 16)] * 4, (Phase.ASK, 2), (Phase.ANSWER, 1)]
    options = DeviceOptions(on_cpu=True, scan=place)
    ours = follow(config, options, course=course, heads=2, kv_heads=1)
    assert len(ours.layers[0].arena.segments) > 1
    assert not kernels_for("cpu").failed


def test_in_bfloat16_blocks_and_numbers_are_the_same() -> None:
    follow(CONFIG, DeviceOptions(on_cpu=True, scan=Place.HOST), torch.bfloat16)


@pytest.mark.parametrize(
    "kinds", [{"interleaved": True}, {"softcap": 3.0}, {"beta": 0.3}, {"kv_heads": 6}]
)
def test_special_attention_is_the_same(kinds: dict) -> None:
    follow(CONFIG, DeviceOptions(on_cpu=True), **kinds)


KNOBS = [
    {"sharing": Sharing.PER_LAYER},
    {"relevance": Relevance.MAX},
    {"relevance": Relevance.SUM},
    {"relevance": Relevance.MASS},
    {"representative_rule": RepresentativeRule.ATTENTION},
    {"representative_rule": RepresentativeRule.MEAN},
    {"read_lookup": Lookup.EXACT},
    {"answer_lookup": Lookup.REPRESENTATIVES},
]


@pytest.mark.parametrize("knob", KNOBS, ids=lambda k: "-".join(str(v.value) for v in k.values()))
def test_the_method_s_choices_are_the_same(knob: dict) -> None:
    follow(replace(CONFIG, **knob), DeviceOptions(on_cpu=True, scan=Place.DEVICE))


@pytest.mark.parametrize("policy", list(CachePolicy))
@pytest.mark.parametrize("predicted", [0, 2])
def test_neither_the_cache_nor_a_prediction_changes_anything(policy, predicted: int) -> None:
    config = replace(CONFIG, device_cache_blocks=5, device_cache_policy=policy)
    ours = follow(config, DeviceOptions(on_cpu=True, predicted_blocks=predicted))
    moved = ours.device_path.moved
    assert (moved.prefetched > 0) == (predicted > 0)
    assert ours.layers[0].cache.hits > 0 and ours.layers[0].cache.misses > 0


def test_between_scans_an_answer_chooses_among_the_best(monkeypatch) -> None:
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", 1)
    config = replace(CONFIG, scan_every=3)
    ours = follow(config, DeviceOptions(on_cpu=True), course=[*COURSE, *[(Phase.ANSWER, 1)] * 3])
    assert all(layer._shortlist is not None for layer in ours.layers)


def test_a_wrong_prediction_is_corrected() -> None:
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    plain, ours = both(CONFIG, DeviceOptions(on_cpu=True), layers)
    for phase, length in COURSE[:9]:
        for layer in ours.layers:  # blocks that nobody wants, and some that do not exist
            layer._predicted = [[0, 1, 77], [1, 2, 99]]
        found = [run(memory, streams, phase, length) for memory in (plain, ours)]
        compare(*found, torch.float32)


def test_a_question_leaves_no_trace_on_the_device() -> None:
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    plain, ours = both(CONFIG, DeviceOptions(on_cpu=True, scan=Place.DEVICE), layers)
    for memory in (plain, ours):
        for _ in range(9):
            run(memory, streams, Phase.READ, 16)
        memory.freeze()
    # Long enough to seal blocks of its own, which the next question must not find.
    for first in (150, 230, 150):
        answers = []
        for memory in (plain, ours):
            with memory.question():
                steps = [
                    run(memory, streams, phase, length, at=first + at)
                    for phase, length, at in (
                        (Phase.READ, 16, 0),
                        (Phase.READ, 16, 16),
                        (Phase.READ, 16, 32),
                        (Phase.READ, 16, 48),
                        (Phase.ASK, 5, 64),
                        (Phase.ANSWER, 1, 69),
                    )
                ]
            answers.append(steps)
        for a, b in zip(*answers, strict=True):
            compare(a, b, torch.float32)


def test_an_outgrown_whole_document_turns_to_the_device_path() -> None:
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    plain, ours = (
        ModelMemory(layers, CONFIG, trained_length=LONG, whole_tokens=60, device=options)
        for options in (None, DeviceOptions(on_cpu=True))
    )
    for _ in range(9):
        found = [run(memory, streams, Phase.READ, 16) for memory in (plain, ours)]
        compare(*found, torch.float32)
    assert ours.blocks > 0


def test_dropped_blocks_are_not_found() -> None:
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    plain, ours = both(CONFIG, DeviceOptions(on_cpu=True, scan=Place.DEVICE), layers)
    for number in range(14):
        found = [run(memory, streams, Phase.READ, 16) for memory in (plain, ours)]
        compare(*found, torch.float32)
        if number == 10:
            for memory in (plain, ours):
                for layer in memory.layers:
                    layer.arena.drop([1, 4])
    found = [run(memory, streams, Phase.ASK, 5) for memory in (plain, ours)]
    compare(*found, torch.float32)


def test_the_device_holds_a_constant_amount_but_for_keys_within_their_limit() -> None:
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    _, ours = both(CONFIG, DeviceOptions(on_cpu=True, limit_bytes=0), layers)
    held = []
    for _ in range(20):
        run(ours, streams, Phase.READ, 16)
        grown = sum(layer.representatives.used_bytes for layer in ours.layers)
        held.append(ours.device_bytes - grown)
    assert held[-1] == held[10]
    run(ours, streams, Phase.ASK, 5)
    assert ours.layers[0].scanned is not Place.DEVICE
    assert sum(layer.keys.nbytes for layer in ours.layers) == 0


def test_a_layer_that_it_does_not_suit_goes_the_usual_way() -> None:
    from infllm_cli.memory.knobs import Positions

    config = replace(CONFIG, positions=Positions.SAME_DISTANCE)
    memory = ModelMemory(
        make_layers(), config, trained_length=LONG, device=DeviceOptions(on_cpu=True)
    )
    assert all(type(layer) is LayerMemory for layer in memory.layers)


# --- the whole program ---------------------------------------------------------------------------


def readers() -> tuple[Reader, Reader]:
    plain, ours = make_reader(), make_reader()
    ours.loaded.device_options = DeviceOptions(on_cpu=True)
    for reader in (plain, ours):
        reader.config = replace(reader.config, codec=Codec.INT8, segment_blocks=4)
    return plain, ours


TEXT = "".join(
    f"Line {i}: the number {i * 7919 % 1000} is kept by neighbour {i % 13}.\n" for i in range(40)
)


def test_the_program_reads_and_answers_the_same_and_tells_what_it_moved() -> None:
    answers = []
    for reader in readers():
        memory = read_text(reader, TEXT)
        options = AnswerOptions(max_tokens=6, answering=Answering.MEMORY)
        answer = reader.ask(memory, "Which number is kept by neighbour 4?", options)
        told = as_json(reader, memory, None, [answer], 3)["memory"]
        facts = dict(report_facts(reader, memory, [answer], 0))
        answers.append((answer, told, facts))
    (a, plain, plain_facts), (b, ours, facts) = answers
    assert (a.text, a.tokens) == (b.text, b.tokens)
    for p, q in zip(a.evidence, b.evidence, strict=True):
        assert p.lines == q.lines and abs(p.score - q.score) < 1e-4
    assert plain["device_cache"] is None and "moved" not in plain_facts
    moved = ours["device_cache"]
    assert moved["hits"] > 0 and moved["misses"] > 0
    assert moved["bytes_to_device"] > 0 and moved["bytes_to_host"] > 0
    assert moved["keys_scanned_on"] == "device" and ours["replaced_kernels"] == {}
    assert "to the device" in facts["moved"] and facts["keys scanned"] == "on: device"


def test_a_checkpoint_stays_as_it_is_while_the_reading_goes_on() -> None:
    plain, ours = readers()
    states = []
    for reader in (plain, ours):
        memory = reader.open(decode_document(TEXT.encode(), "text"), allow_whole=False)
        steps = reader.read_steps(memory)
        for _ in range(9):
            next(steps)
        assert memory.state.layers[0].arena.tail is not None
        state = state_of(memory.state)
        before = {name: tensor.clone() for name, tensor in state.tensors.items()}
        for _ in steps:  # through several more segments
            pass
        for name, tensor in state.tensors.items():
            assert torch.equal(tensor, before[name]), name
        states.append(state)
    for name, tensor in states[0].tensors.items():
        torch.testing.assert_close(states[1].tensors[name], tensor, rtol=0, atol=1e-4)


def test_a_memory_is_restored_to_the_device_path() -> None:
    _, reader = readers()
    memory = read_text(reader, TEXT)
    fresh = reader.empty(memory.document, memory.tokens, whole=False, reserve_tokens=0)
    for index in range(segments_of(memory.state)):
        place_segment(fresh.state, index, segment_tensors(memory.state, index), None)
    restore_state(fresh.state, state_of(memory.state))
    fresh.read_tokens = len(fresh.tokens.ids)
    options = AnswerOptions(max_tokens=4, answering=Answering.MEMORY)
    first, second = (reader.ask(m, "Which number?", options) for m in (memory, fresh))
    assert first.text == second.text
    assert [p.score for p in first.evidence] == [p.score for p in second.evidence]
    assert all(isinstance(layer, DeviceLayer) for layer in fresh.state.tiered)


def test_joined_memories_are_asked_on_the_device_path() -> None:
    found = []
    for reader in readers():
        memories = [read_text(reader, text) for text in (TEXT, TEXT[::-1])]
        places = lay_out([m.state for m in memories], len(reader.prompt.prefix))
        joined = join([m.state for m in memories], places, trained_length=2048)
        ids = torch.from_numpy(reader.prompt.question_ids("Which number?"))
        with joined.question():
            step, logits = reader.forward(joined, Phase.ASK, ids, want_logits=True)
        found.append((type(joined.tiered[0]), step.block_mass[0], logits))
    assert (found[0][0], found[1][0]) == (LayerMemory, DeviceLayer)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0, atol=1e-3)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=0, atol=1e-4)
