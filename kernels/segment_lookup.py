"""How much of each query's attention falls on each block, of keys that lie in many segments?

What `exact_lookup` tells, for all segments of a layer in one launch: a table of addresses says
where each segment lies, so segments are scanned where they were put, as the codec packed them, and
nothing is joined, unpacked or copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import kernels_for
from .packed_lookup import packed_lookup_torch
from .store_codec import Packed

# What the table holds of a segment: addresses, and the number of its blocks.
CODES, SCALE, LOW, STEP, BASE, BLOCKS = range(6)
COLUMNS = 6


@dataclass(frozen=True, slots=True)
class KeyTable:
    """Segments of one kind on one device, and which of their blocks are to be scanned.

    Attributes:
        parts: the segments' keys `[H_kv, n, B, d]`, held so that their addresses stay theirs.
        addresses: `[segments, 6]` int64, the columns named above.
        segment, inside: `[n]` int32, where each block lies.
        place: `[n]` int32, its number among all blocks of the layer.
    """

    parts: tuple[Packed, ...]
    addresses: Tensor
    segment: Tensor
    inside: Tensor
    place: Tensor

    @classmethod
    def of(cls, listed: Sequence[tuple[Packed, Sequence[int]]]) -> KeyTable:
        """A table of segments with the number of each of their blocks, -1: not to be scanned.

        All segments are of one kind, dtype, block size and device, and contiguous.
        """
        first = listed[0][0]
        rows, segment, inside, place = [], [], [], []
        for index, (packed, numbers) in enumerate(listed):
            assert (packed.kind, packed.codes.dtype) == (first.kind, first.codes.dtype)
            assert len(numbers) == packed.blocks
            assert all(tensor.is_contiguous() for tensor in packed.tensors().values())
            constants = (packed.scale, packed.low, packed.step, packed.base)
            found = [0 if tensor is None else tensor.data_ptr() for tensor in constants]
            rows.append([packed.codes.data_ptr(), *found, packed.blocks])
            for block, number in enumerate(numbers):
                if number >= 0:
                    segment.append(index)
                    inside.append(block)
                    place.append(number)
        device = first.codes.device
        lists = [torch.tensor(x, dtype=torch.int32).to(device) for x in (segment, inside, place)]
        addresses = torch.tensor(rows, dtype=torch.int64).to(device)
        return cls(tuple(packed for packed, _ in listed), addresses, *lists)

    @property
    def blocks(self) -> int:
        """Blocks to be scanned."""
        return len(self.place)


def segment_lookup(q: Tensor, tables: Sequence[KeyTable], n_blocks: int) -> tuple[Tensor, Tensor]:
    """Score every key of all tables and reduce the scores of each block; see `exact_lookup`.

    Args:
        q: `[H_kv, Q, d]`, scaled and rotated.
        tables: one for each kind of segment.
        n_blocks: N, all blocks of the layer; those in no table get -inf.

    Returns:
        `(lse, peak)`, both `[H_kv, Q, N]` float32.
    """
    arguments = (q, tables, n_blocks)
    return kernels_for(q.device.type).run("segment_lookup", segment_lookup_torch, *arguments)


def segment_lookup_torch(
    q: Tensor, tables: Sequence[KeyTable], n_blocks: int
) -> tuple[Tensor, Tensor]:
    """Do the same in plain torch, segment by segment: the kernel's twin."""
    lse = q.new_full((*q.shape[:2], n_blocks), float("-inf"), dtype=torch.float32)
    peak = lse.clone()
    for table in tables:
        for index, packed in enumerate(table.parts):
            here = table.segment == index
            inside, place = table.inside[here].long(), table.place[here].long()
            found = packed_lookup_torch(q, packed)
            for target, scores in zip((lse, peak), found, strict=True):
                target.index_copy_(2, place, scores.index_select(2, inside))
    return lse, peak
