"""Blocks of past keys and values in host memory: one growing arena per layer."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 1.5  # a doubling would leave half of a large arena unused


class BlockArena:
    """Un-rotated keys and values of sealed blocks, [H_kv, N_capacity, B, d] each.

    Contiguous per KV head, so that an exact scan streams; no object per block. Capacity is
    reserved ahead where the document's length is known: untouched pages cost no memory.
    """

    def __init__(
        self, kv_heads: int, block_tokens: int, head_dim: int, value_dim: int, dtype: torch.dtype
    ) -> None:
        self.count = 0
        self.block_tokens = block_tokens
        self.keys = torch.empty(kv_heads, 0, block_tokens, head_dim, dtype=dtype)
        self.values = torch.empty(kv_heads, 0, block_tokens, value_dim, dtype=dtype)

    @property
    def used_bytes(self) -> int:
        """Bytes that the sealed blocks take."""
        capacity = self.keys.shape[1]
        if capacity == 0:
            return 0
        return (self.keys.nbytes + self.values.nbytes) // capacity * self.count

    def reserve(self, blocks: int) -> None:
        """Make room for `blocks` blocks in all."""
        if blocks <= self.keys.shape[1]:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(old.shape[0], blocks, *old.shape[2:])
            new[:, : self.count] = old[:, : self.count]
            setattr(self, name, new)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Seal tokens keys, values [H_kv, n * B, d] as n blocks."""
        blocks = keys.shape[1] // self.block_tokens
        assert keys.shape[1] == blocks * self.block_tokens, "only whole blocks are sealed"
        needed = self.count + blocks
        if needed > self.keys.shape[1]:
            self.reserve(max(needed, int(self.keys.shape[1] * GROWTH)))
        shape = (keys.shape[0], blocks, self.block_tokens, -1)
        self.keys[:, self.count : needed].copy_(keys.reshape(shape))
        self.values[:, self.count : needed].copy_(values.reshape(shape))
        self.count = needed

    def truncate(self, count: int) -> None:
        """Forget the blocks after the first `count`."""
        assert 0 <= count <= self.count
        self.count = count

    def stretch(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, last - first, d] of tokens, counted from the first block on."""
        assert 0 <= first < last <= self.count * self.block_tokens
        return (
            self.keys.flatten(1, 2)[:, first:last],
            self.values.flatten(1, 2)[:, first:last],
        )

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, n * B, d] of blocks [H_kv, n], chosen per KV head."""
        kv_heads, chosen = blocks.shape
        capacity = self.keys.shape[1]
        rows = (blocks + torch.arange(kv_heads)[:, None] * capacity).flatten()
        found = []
        for arena in (self.keys, self.values):
            flat = arena.view(kv_heads * capacity, -1).index_select(0, rows)
            found.append(flat.view(kv_heads, chosen * self.block_tokens, -1))
        return found[0], found[1]
