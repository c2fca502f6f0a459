"""A layer that answers in C against one that answers in torch: same blocks, same numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from infllm_cli.kernels.dispatch import kernels_for
from infllm_cli.kernels.native import choice, compiling
from infllm_cli.kernels.native.choice import NAME, NativeKernels
from layer_streams import make_geometry, make_stream
from native_library import kernels
from tiny_readers import make_reader, memory_contents, read_text, same_contents

from infllm_cli.memory import shortlist
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.knobs import Positions, Relevance, RepresentativeRule, Sharing
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.native_layer import NativeLayer
from infllm_cli.memory.step import Phase
from infllm_cli.sampling import AnswerOptions

BF16 = torch.bfloat16
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
# A document, a question, an answer so long that the window gives up blocks.
COURSE = [*[(Phase.READ, 16)] * 9, (Phase.ASK, 7), *[(Phase.ANSWER, 1)] * 25]


def make_layers(**kinds):
    return [replace(make_geometry(dtype=BF16, **kinds), index=i) for i in range(2)]


def both(config: MemoryConfig, layers, whole: int = 0) -> tuple[ModelMemory, ModelMemory]:
    sizes = {"trained_length": LONG, "whole_tokens": whole}
    options = DeviceOptions(native=kernels())
    return ModelMemory(layers, config, **sizes), ModelMemory(
        layers, config, device=options, **sizes
    )


def run(memory: ModelMemory, streams, phase: Phase, length: int):
    step = memory.step(phase, length)
    with torch.inference_mode():
        parts = [stream.part(step.start, length) for stream in streams]
        outs = [layer.attend(*p, step) for layer, p in zip(memory.layers, parts, strict=True)]
    memory.finish(step)
    return outs, step


def follow(
    config: MemoryConfig, course=COURSE, whole: int = 0, *, scans: bool = True, **kinds
) -> ModelMemory:
    """Let both go through a course, compare every step; the memory that answers in C.

    `scans`: at the same steps, too.
    """
    layers = make_layers(**kinds)
    streams = [make_stream(g, 400) for g in layers]
    memories = both(config, layers, whole)
    asked = False
    for phase, length in course:
        if phase is not Phase.READ and not asked:
            for memory in memories:
                memory.freeze()
                for layer in memory.layers:
                    layer.mark()
                    layer.seal()
            asked = True
        (outs, plain), (others, ours) = (run(m, streams, phase, length) for m in memories)
        if not scans:
            ours.block_mass = dict(plain.block_mass)
        compare(outs, plain, others, ours)
    return memories[1]


def compare(outs, plain, others, ours) -> None:
    for out, other in zip(outs, others, strict=True):
        torch.testing.assert_close(other, out, rtol=2**-6, atol=2**-7)
    assert plain.loaded.keys() == ours.loaded.keys()
    for index, blocks in plain.loaded.items():
        assert torch.equal(blocks, ours.loaded[index])
    assert plain.block_mass.keys() == ours.block_mass.keys()
    for index, mass in plain.block_mass.items():
        torch.testing.assert_close(ours.block_mass[index], mass, rtol=1e-2, atol=1e-3)
    if plain.mass is not None:
        torch.testing.assert_close(ours.mass, plain.mass, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(ours.mass.sum(), plain.mass.sum(), rtol=1e-3, atol=0)


def calls(monkeypatch) -> list[str]:
    """The names of what is computed in C from now on."""
    library = kernels().get()
    found: list[str] = []
    for name in ("begin", "scan", "scan_listed", "choose", "load", "attend", "note"):
        function = getattr(library, name)

        def counted(*arguments, name=name, function=function):
            found.append(name)
            return function(*arguments)

        monkeypatch.setattr(library, name, counted)
    return found


@pytest.mark.parametrize("codec", list(Codec))
def test_a_token_in_c_is_the_token_of_torch(codec, monkeypatch):
    found = calls(monkeypatch)
    ours = follow(replace(CONFIG, codec=codec))
    assert all(isinstance(layer, NativeLayer) for layer in ours.layers)
    known = codec in (Codec.FULL, Codec.INT8)
    assert set(found) == {"begin", "attend", "note"} | (
        {"scan", "choose", "load"} if known else set()
    )
    assert ours.layers[0].arena.count > 15, "the window has given up blocks while answering"


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_question_is_scanned_in_c_too(length, monkeypatch):
    found = calls(monkeypatch)
    ours = follow(CONFIG, [*COURSE[:9], (Phase.ASK, length)])
    assert found.count("scan") == found.count("choose") == len(ours.layers)


@pytest.mark.parametrize(
    ("codec", "listed"),
    # Torch unpacks what is listed before it scores it, so that of equals another may come first.
    [(Codec.FULL, 1), (Codec.FULL, 2), (Codec.FULL, 100), (Codec.INT8, 1), (Codec.INT8, 2)],
)
def test_between_scans_listed_blocks_alone_are_scored(codec, listed, monkeypatch):
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", 1)
    for name in ("PER_LOADED", "PER_LOADED_NATIVE"):
        monkeypatch.setattr(shortlist, name, listed)
    found = calls(monkeypatch)
    follow(replace(CONFIG, scan_every=3, codec=codec))
    assert found.count("scan_listed") > found.count("scan") / 2 > 0


def test_long_memories_are_scanned_seldom_by_themselves(monkeypatch):
    found = calls(monkeypatch)
    follow(CONFIG)
    assert "scan_listed" not in found
    monkeypatch.setattr(shortlist, "AUTO_BLOCKS", 4)
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(shortlist, "PER_LOADED_NATIVE", 1000)
    found.clear()
    # All are listed: torch, which scans them, chooses the same.
    follow(replace(CONFIG, scan_every=0, codec=Codec.FULL), scans=False)
    assert found.count("scan_listed") > found.count("scan") / 2 > 0


KINDS = [
    {"heads": 2},
    {"heads": 10},
    {"heads": 3, "kv_heads": 1},
    {"heads": 5, "kv_heads": 5},
    {"interleaved": True},
]


@pytest.mark.parametrize("kinds", KINDS)
def test_heads_and_rotations(kinds):
    follow(CONFIG, **kinds)


@pytest.mark.parametrize(
    "knob",
    [
        {"relevance": Relevance.MAX},
        {"sharing": Sharing.PER_LAYER},
        {"answer_lookup": Lookup.REPRESENTATIVES},
        {"answer_blocks": 1},
        {"positions": Positions.SAME_DISTANCE},
        {"representative_rule": RepresentativeRule.ATTENTION},
        {"device_cache_blocks": 4},
        {"block_tokens": 8},
    ],
)
def test_what_the_functions_do_not_know_is_left_to_torch(knob):
    follow(replace(CONFIG, **knob))


def test_layers_of_other_kinds_stay_as_they_are():
    def kind(config=CONFIG, dtype=BF16, **kinds):
        layers = [make_geometry(dtype=dtype, **kinds)]
        options = DeviceOptions(native=kernels())
        return type(ModelMemory(layers, config, trained_length=LONG, device=options).layers[0])

    assert kind() is NativeLayer
    assert kind(dtype=torch.float32) is LayerMemory
    assert kind(softcap=3.0) is LayerMemory
    assert kind(beta=0.5) is LayerMemory
    assert kind(replace(CONFIG, positions=Positions.SAME_DISTANCE)) is LayerMemory


def test_a_document_attended_whole(monkeypatch):
    found = calls(monkeypatch)
    follow(CONFIG, whole=400)
    assert set(found) == {"begin", "attend", "note"}


def test_dropped_blocks_are_left_to_torch(monkeypatch):
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    memories = both(CONFIG, layers)
    for memory in memories:
        for phase, length in COURSE[:9]:
            run(memory, streams, phase, length)
        memory.freeze()
        for layer in memory.tiered:
            layer.arena.drop([1, 3])
    for _ in range(3):
        (outs, plain), (others, ours) = (run(m, streams, Phase.ANSWER, 1) for m in memories)
        compare(outs, plain, others, ours)


def test_pages_of_files_are_given_back_a_few_segments_at_a_time(monkeypatch):
    layers = make_layers()
    streams = [make_stream(g, 900) for g in layers]
    config = replace(CONFIG, segment_blocks=2)
    memories = both(config, layers)
    given_back = []
    for memory in memories:
        for _ in range(24):
            run(memory, streams, Phase.READ, 16)
        memory.freeze()
    arena = memories[1].layers[0].arena
    assert len(arena.segments) > 16
    for index, segment in enumerate(arena.segments):
        arena.place(
            index, replace(segment, mapped=True, release=lambda i=index: given_back.append(i))
        )
    found = calls(monkeypatch)
    (outs, plain), (others, ours) = (run(m, streams, Phase.ANSWER, 1) for m in memories)
    compare(outs, plain, others, ours)
    assert given_back == list(range(len(arena.segments)))
    assert found.count("scan") == 2 + 1


def test_a_question_leaves_no_trace():
    layers = make_layers()
    streams = [make_stream(g, 400) for g in layers]
    _, memory = both(CONFIG, layers)
    for _ in range(9):
        run(memory, streams, Phase.READ, 16)
    memory.freeze()
    found = []
    for _ in range(2):
        with memory.question():
            outs = [run(memory, streams, Phase.ANSWER, 1)[0] for _ in range(20)]
            found.append(torch.stack([out for pair in outs for out in pair]))
    assert torch.equal(*found)


# --- with a model --------------------------------------------------------------------------------

TEXT = " ".join(
    f"The {i}th line says that {i * 37 % 101} goes to {i * 53 % 89}." for i in range(60)
)


def test_a_reader_answers_in_c_and_its_memory_stays_as_it_was(monkeypatch):
    reader = make_reader(BF16)
    reader.loaded.device_options = DeviceOptions(native=kernels())
    memory = read_text(reader, TEXT)
    before = memory_contents(memory)
    found = calls(monkeypatch)
    answers = [
        reader.ask(memory, "What goes to 17?", AnswerOptions(max_tokens=12)) for _ in range(2)
    ]
    assert answers[0].text == answers[1].text and answers[0].tokens == 12
    assert set(found) >= {"begin", "scan", "choose", "attend", "note"}
    assert same_contents(before, memory_contents(memory))
    assert NAME not in kernels_for("cpu").failed


def test_where_there_is_no_compiler_the_answer_is_the_same_as_without(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    choice._in_folder.cache_clear()
    try:
        layers = make_layers()
        streams = [make_stream(g, 400) for g in layers]
        plain = ModelMemory(layers, CONFIG, trained_length=LONG)
        options = DeviceOptions(native=NativeKernels(tmp_path))
        ours = ModelMemory(layers, CONFIG, trained_length=LONG, device=options)
        for phase, length in COURSE:
            outs, others = (run(m, streams, phase, length)[0] for m in (plain, ours))
            assert all(torch.equal(a, b) for a, b in zip(outs, others, strict=True))
        assert NAME in kernels_for("cpu").failed
    finally:
        choice._in_folder.cache_clear()
        kernels_for("cpu").failed.pop(NAME, None)
