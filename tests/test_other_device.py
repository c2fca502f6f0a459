"""The device path where host and device do not share their memory: nothing is mixed up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_streams import make_geometry, make_stream
from native_library import kernels
from other_device import THERE, Held, OtherDevice
from torch import Tensor

from infllm_cli.memory import shortlist
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_layer import DeviceLayer
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.join import join, lay_out
from infllm_cli.memory.knobs import CachePolicy, Relevance, RepresentativeRule, Sharing
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.rotary import Rotary
from infllm_cli.memory.scan_cost import Place
from infllm_cli.memory.snapshot import (
    place_segment,
    restore_state,
    segment_tensors,
    segments_of,
    state_of,
)
from infllm_cli.memory.step import Phase
from infllm_cli.memory.transfers import Moved

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
READ_STEPS = 9
LONG = 100_000


Found = list[tuple[list[Tensor], Tensor | None, dict[int, Tensor]]]


def course(memory: ModelMemory, streams, between=lambda memory, number: memory) -> Found:
    """Outputs, mass and loaded blocks of every step, on the CPU."""
    found: Found = []
    there = memory.layers[0].geometry.device == THERE

    def run(phase: Phase, length: int) -> None:
        step = memory.step(phase, length)
        outs = []
        for layer, stream in zip(memory.layers, streams, strict=True):
            part = [x.to(THERE) if there else x for x in stream.part(step.start, length)]
            out = layer.attend(*part, step)
            assert isinstance(out, Held) == there
            outs.append(out.cpu())
        memory.finish(step)
        mass = None if step.mass is None else step.mass.cpu()
        found.append((outs, mass, {i: blocks.cpu() for i, blocks in step.loaded.items()}))

    for number in range(READ_STEPS):
        run(Phase.READ, 16)
        memory = between(memory, number)
    memory.freeze()
    with memory.question():
        for phase, length in ((Phase.ASK, 7), *[(Phase.ANSWER, 1)] * 3):
            run(phase, length)
    return found


def both(config: MemoryConfig, options: DeviceOptions, between=lambda m, n: m, **lengths) -> Moved:
    """Go through the course here and there, compare every number; what was moved there."""
    here = [replace(make_geometry(), index=i) for i in range(2)]
    streams = [make_stream(g, 400) for g in here]
    lengths = {"trained_length": LONG, "device": options, **lengths}
    expected = course(ModelMemory(here, config, **lengths), streams, between)
    with OtherDevice() as device:
        rotary = Rotary(here[0].rotary.inv_freq.to(THERE), False, 0.0, 17)
        layers = [replace(g, rotary=rotary, device=THERE) for g in here]
        memory = ModelMemory(layers, config, **lengths)
        assert all(isinstance(layer, DeviceLayer) for layer in memory.layers)
        found = course(memory, streams, between)
    for (outs, mass, loaded), (others, other, other_loaded) in zip(expected, found, strict=True):
        assert all(torch.equal(out, x) for out, x in zip(outs, others, strict=True))
        assert mass is other is None or torch.equal(mass, other)
        assert loaded.keys() == other_loaded.keys()
        assert all(torch.equal(blocks, other_loaded[i]) for i, blocks in loaded.items())
    assert device.crossings["there"] > 0 and device.crossings["back"] > 0
    return memory.device_path.moved


KNOBS = [
    {},
    {"codec": Codec.FULL},
    {"codec": Codec.INT4},
    {"codec": Codec.FP8},
    {"sharing": Sharing.PER_LAYER},
    {"relevance": Relevance.SUM},
    {"relevance": Relevance.MAX},
    {"relevance": Relevance.MASS},
    {"representative_rule": RepresentativeRule.ATTENTION},
    {"representative_rule": RepresentativeRule.EXEMPLAR},
    {"representative_rule": RepresentativeRule.MEAN},
    {"read_lookup": Lookup.EXACT},
    {"answer_lookup": Lookup.REPRESENTATIVES},
    {"device_cache_policy": CachePolicy.LRU_S},
    {"scan_every": 3},
]


def name(knob: dict) -> str:
    return "-".join(f"{key}={getattr(value, 'value', value)}" for key, value in knob.items())


@pytest.mark.parametrize("place", list(Place))
@pytest.mark.parametrize("knob", KNOBS, ids=name)
@torch.inference_mode()
def test_what_is_computed_there_is_what_is_computed_here(monkeypatch, knob, place: Place) -> None:
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", 1)
    options = DeviceOptions(on_cpu=True, scan=place, native=kernels())
    moved = both(replace(CONFIG, **knob), options)
    assert moved.to_device > 0 and moved.to_host > 0 and moved.prefetched > 0


@pytest.mark.parametrize("place", list(Place))
@torch.inference_mode()
def test_outgrown_and_with_blocks_dropped_it_is_the_same(place: Place) -> None:
    def drop(memory: ModelMemory, number: int) -> ModelMemory:
        if number == READ_STEPS - 3:
            for layer in memory.layers:
                layer.arena.drop([1, 4])
        return memory

    both(CONFIG, DeviceOptions(on_cpu=True, scan=place), drop, whole_tokens=60)


@torch.inference_mode()
def test_saved_there_and_restored_it_is_the_same() -> None:
    def restored(memory: ModelMemory, number: int) -> ModelMemory:
        if number != READ_STEPS - 3:
            return memory
        options = memory.device_path.options
        layers = [layer.geometry for layer in memory.layers]
        fresh = ModelMemory(layers, memory.config, trained_length=LONG, device=options)
        for index in range(segments_of(memory)):
            tensors = segment_tensors(memory, index)
            stored = {key: x for key, x in tensors.items() if not isinstance(x, Held)}
            assert any(".keys." in key for key in stored)  # blocks lie on the host
            place_segment(fresh, index, {key: x.cpu() for key, x in tensors.items()}, None)
        state = state_of(memory)
        assert not any(isinstance(tensor, Held) for tensor in state.tensors.values())
        restore_state(fresh, state)
        return fresh

    both(CONFIG, DeviceOptions(on_cpu=True, scan=Place.DEVICE), restored)


@torch.inference_mode()
def test_joined_there_it_is_the_same() -> None:
    def twice(memory: ModelMemory, number: int) -> ModelMemory:
        if number != READ_STEPS - 1:
            return memory
        memory.freeze()
        return join([memory, memory], lay_out([memory, memory], 3), trained_length=LONG)

    both(CONFIG, DeviceOptions(on_cpu=True, scan=Place.DEVICE), twice)


def test_what_a_gpu_refuses_is_refused() -> None:
    with OtherDevice() as device:
        x, here = torch.ones(3, 4, device=THERE), torch.ones(3, 4)
        with pytest.raises(AssertionError, match="two devices"):
            x + here
        with pytest.raises(AssertionError, match="two devices"):
            here[x[:, 0].long()]
        assert isinstance(x + 1, Held) and isinstance(x[torch.tensor([0, 2])], Held)
        x.add_(here.to(THERE))
        assert torch.equal(x.cpu(), 2 * here) and device.crossings == {"there": 1, "back": 1}
