"""Some blocks of past keys and values as they are stored; a full segment never changes."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.kernels.store_codec import Packed, unpack


@dataclass(frozen=True, slots=True)
class Segment:
    """Un-rotated keys [H_kv, n, B, d] and values [H_kv, n, B, d_v] of n blocks, as stored.

    Contiguous per KV head, so that an exact scan streams.

    Attributes:
        mapped: they lie in a file that is mapped in, not in memory of our own.
        release: gives back the pages that reading a mapped segment has brought into the process;
            None where they may stay.
        slots: [n] where each block is stored, -1: it was dropped; None: each in its own place.
    """

    keys: Packed
    values: Packed
    mapped: bool = False
    release: Callable[[], None] | None = None
    slots: Tensor | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks, dropped ones included."""
        return self.keys.blocks if self.slots is None else len(self.slots)

    def held(self) -> Tensor:
        """[n] whether each block is held."""
        if self.slots is None:
            return torch.ones(self.keys.blocks, dtype=torch.bool)
        return self.slots >= 0

    def without(self, dropped: Tensor) -> Segment:
        """The same with less blocks held; dropped [n] tells which are not."""
        kept = self.held() & ~dropped
        slots = torch.arange(self.blocks) if self.slots is None else self.slots
        keys, values = (x.take(slots[kept]).map(_in_own_pages) for x in (self.keys, self.values))
        places = torch.where(kept, kept.cumsum(0) - 1, -1)
        return Segment(keys, values, slots=places)

    def unpack(self, blocks: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, n, B, d] of some of the blocks; zeros where they were dropped."""
        if self.slots is None:
            return unpack(self.keys.cut(blocks), dtype), unpack(self.values.cut(blocks), dtype)
        return self._from_slots(self.slots[blocks], dtype)

    def take(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same of blocks by their indices [n]; copied."""
        if self.slots is None:
            return unpack(self.keys.take(blocks), dtype), unpack(self.values.take(blocks), dtype)
        return self._from_slots(self.slots[blocks], dtype)

    def _from_slots(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        gone = (slots < 0)[:, None, None]
        if self.keys.blocks == 0:  # nothing to take zeros from
            shapes = [
                (len(x.codes), len(slots), x.codes.shape[2], x.dim)
                for x in (self.keys, self.values)
            ]
            return torch.zeros(shapes[0], dtype=dtype), torch.zeros(shapes[1], dtype=dtype)
        keys, values = (
            unpack(x.take(slots.clamp(min=0)), dtype).masked_fill_(gone, 0)
            for x in (self.keys, self.values)
        )
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def cut(self, blocks: slice) -> Segment:
        """Some of the blocks, not copied."""
        return Segment(self.keys.cut(blocks), self.values.cut(blocks), self.mapped, self.release)


def _in_own_pages(tensor: Tensor) -> Tensor:
    return own_pages(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose memory goes back to the system when it is given up.

    What the allocator frees among other things it keeps, and a limit on memory would not hold.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
