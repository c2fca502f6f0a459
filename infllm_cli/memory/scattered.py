"""Keys and values of tokens that lie anywhere in a memory, all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.layer import HOST
from infllm_cli.memory.layer_memory import LayerMemory


class Scattered:
    """Positions of a memory, found once for all its layers.

    Args:
        layer: one of them; all have read as far.
        positions: [m] absolute positions, at or behind the sinks; may repeat.
    """

    def __init__(self, layer: LayerMemory, positions: Tensor) -> None:
        sinks = layer.config.sink_tokens if layer.sinks is not None else 0
        self.window_start = layer.window.start
        size = layer.config.block_tokens
        blocks = positions.sub(sinks).div(size, rounding_mode="floor")
        in_window = positions >= self.window_start
        self.blocks = blocks[~in_window].unique()  # sorted
        # Where each is found among the tokens of these blocks, followed by the window's.
        place = torch.searchsorted(self.blocks, blocks) * size + (positions - sinks) % size
        behind = len(self.blocks) * size + positions - self.window_start
        self.index = torch.where(in_window, behind, place)
        self.reaches_window = bool(in_window.any())

    def of(self, layer: LayerMemory) -> tuple[Tensor, Tensor]:
        """Un-rotated keys and values [H_kv, m, d] of a layer, on the host."""
        assert layer.window.start == self.window_start and layer.window.raw is not None
        keys, values = blocks_of(layer.arena, self.blocks)
        keys, values = keys.flatten(1, 2), values.flatten(1, 2)
        if self.reaches_window:
            held = slice(layer.window.first, layer.window.last)
            keys = torch.cat([keys, layer.window.raw[:, held].to(HOST)], dim=1)
            values = torch.cat([values, layer.window.values[:, held].to(HOST)], dim=1)
        return keys.index_select(1, self.index), values.index_select(1, self.index)


def blocks_of(arena: BlockArena, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [H_kv, n, B, d] of blocks [n], rising, for all KV heads."""
    found = []
    start = 0
    for part in arena.parts():
        stop = start + part.blocks
        inside = blocks[(blocks >= start) & (blocks < stop)] - start
        if len(inside):
            found.append(part.take(inside, arena.dtype))
            if part.release is not None:
                part.release()
        start = stop
    if not found:
        keys, values = arena.stretch(0, 0)
        return keys.unflatten(1, (0, arena.block_tokens)), values.unflatten(
            1, (0, arena.block_tokens)
        )
    keys, values = zip(*found, strict=True)
    return torch.cat(keys, dim=1), torch.cat(values, dim=1)
