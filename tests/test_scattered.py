"""Tokens from anywhere in a memory are those that a stretch at a time gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.scattered import Scattered, blocks_of


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("segment_blocks", [3, 64])
@pytest.mark.parametrize("where", ["blocks", "window", "both"])
def test_scattered_tokens_equal_stretches(codec, segment_blocks, where):
    config = replace(SMALL, codec=codec, segment_blocks=segment_blocks)
    memory = read_text(make_reader(config=config), prose(2500))
    layers = memory.state.tiered
    window = layers[0].window
    low = {"blocks": SMALL.sink_tokens, "window": window.start, "both": SMALL.sink_tokens}[where]
    high = {"blocks": window.start, "window": window.end, "both": window.end}[where]
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(low, high, (57,), generator=generator)
    found = Scattered(layers[0], positions)
    for layer in layers:
        keys, values = found.of(layer)
        for index, position in enumerate(positions.tolist()):
            key, value = layer.stretch(position, position + 1)
            assert torch.equal(keys[:, index], key[:, 0])
            assert torch.equal(values[:, index], value[:, 0])


def test_tokens_of_a_memory_without_blocks():
    memory = read_text(make_reader(), prose(300), whole=True)
    assert memory.whole
    layer = memory.state.tiered[0]
    keys, values = Scattered(layer, torch.tensor([5, 9, 5])).of(layer)
    for index, position in enumerate((5, 9, 5)):
        key, value = layer.stretch(position, position + 1)
        assert torch.equal(keys[:, index : index + 1], key)
        assert torch.equal(values[:, index : index + 1], value)


def test_dropped_blocks_are_zeros():
    memory = read_text(make_reader(config=replace(SMALL, segment_blocks=4)), prose(2500))
    arena = memory.state.tiered[0].arena
    gone = torch.tensor([True, False, True, False])
    arena.segments[0] = arena.segments[0].without(gone)
    keys, values = blocks_of(arena, torch.tensor([0, 1, 5]))
    assert not keys[:, 0].any() and not values[:, 0].any()
    assert keys[:, 1].any() and keys[:, 2].any()
    size = arena.block_tokens
    assert torch.equal(keys[:, 2], arena.stretch(5 * size, 6 * size)[0])
