"""Blocks of many segments, as they are stored, in one piece of host memory.

The piece crosses the bus in one copy. Nothing here is done block by block in Python: where all of
them lie is computed at once, from a table of the segments that is kept as long as these are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.kernels.host_gather import host_gather
from infllm_cli.kernels.native.library import Native
from infllm_cli.kernels.store_codec import FULL, Packed
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.segment import Segment

ALIGNMENT = 128  # bytes, of every tensor in the piece: kernels are compiled for what they see
COLUMNS = ("codes", "scale", "low", "step", "base")  # of keys, then of values
ADDRESS, HEAD, BLOCK = range(3)  # of the first block, and what to add for the next head and block

Kind = tuple[str, str, torch.dtype]  # of keys and values, and what the codes are
Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True, slots=True)
class _Place:
    """Of one tensor of m blocks in a piece: its column in the table, its first and last byte."""

    name: str
    column: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What lies where in a piece of m blocks. Numbers only: no segment is held by it.

    Attributes:
        kinds, dims: of keys and of values.
        places: of the tensors of keys, and of values.
        numbers: where the blocks' numbers are, bytes from and to.
    """

    blocks: int
    kinds: tuple[str, str]
    dims: tuple[int, int]
    places: tuple[tuple[_Place, ...], tuple[_Place, ...]]
    numbers: slice

    @classmethod
    def of(cls, part: Segment, blocks: int) -> Piece:
        """For blocks that are stored as those of this part."""
        end, places = 0, []
        for number, packed in ((0, part.keys), (len(COLUMNS), part.values)):
            found = []
            for name, tensor in packed.tensors().items():
                shape = (blocks, 1, *tensor.shape[2:])
                stop = end + math.prod(shape) * tensor.element_size()
                column = number + COLUMNS.index(name)
                found.append(_Place(name, column, tensor.dtype, shape, end, stop))
                end = -(-stop // ALIGNMENT) * ALIGNMENT
            places.append(tuple(found))
        numbers = slice(end, end + blocks * torch.int64.itemsize)
        both = (part.keys, part.values)
        kinds, dims = (both[0].kind, both[1].kind), (both[0].dim, both[1].dim)
        return cls(blocks, kinds, dims, (places[0], places[1]), numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return self.numbers.stop

    def views(self, memory: Tensor) -> tuple[Packed, Packed, Tensor]:
        """Keys and values `[m, 1, B, d]`, and numbers `[m]` int64, of a piece of memory [bytes]."""
        keys, values = (
            Packed(
                kind,
                dim,
                **{p.name: memory[p.first : p.stop].view(p.dtype).view(p.shape) for p in places},
            )
            for kind, dim, places in zip(self.kinds, self.dims, self.places, strict=True)
        )
        return keys, values, memory[self.numbers].view(torch.int64)


class BlockGatherer:
    """Where the blocks of one layer lie.

    Args:
        native: functions in C; None: there are none.
    """

    def __init__(self, native: Native | None = None) -> None:
        self.native = native
        self._pieces: dict[tuple[Kind, int], Piece] = {}
        self._parts: list[Segment] = []
        self._kinds: list[Kind] = []
        self._table = torch.zeros(0, 2 * len(COLUMNS), 3, dtype=torch.int64)
        self._starts = torch.zeros(0, dtype=torch.int64)  # first block of each part
        self._kind_of = torch.zeros(0, dtype=torch.int64)

    def gather(
        self, heads: Tensor, blocks: Tensor, rows: Tensor, arena: BlockArena, empty: Empty
    ) -> list[tuple[Piece, Tensor]]:
        """Blocks [m] of KV heads [m], each with a number [m] that goes along; int64.

        Args:
            empty: gives the memory that they are copied into.

        Returns:
            A piece for each kind of part that they lie in, with its memory [bytes].
        """
        self._follow(arena)
        least, most = blocks.aminmax()
        assert least >= 0 and most < arena.count, "addresses of nothing would be read"
        part = torch.bucketize(blocks, self._starts, right=True) - 1
        at = blocks - self._starts[part]
        for index, one in enumerate(self._parts):
            if one.slots is not None:  # of which blocks were dropped
                here = part == index
                at[here] = one.slots[at[here]]
        assert bool((at >= 0).all()), "what was dropped is not looked up"
        places = self._table[part]  # [m, columns, 3]
        addresses = places[..., ADDRESS] + heads[:, None] * places[..., HEAD]
        addresses += at[:, None] * places[..., BLOCK]
        found = []
        for kind in dict.fromkeys(self._kinds):
            # Most often there is one, and nothing to be chosen.
            some = slice(None)
            if len(set(self._kinds)) > 1:
                some = (self._kind_of[part] == self._kinds.index(kind)).nonzero()[:, 0]
            chosen = addresses[some]
            if len(chosen):
                found.append(self._copied(kind, chosen, rows[some], empty))
        return found

    def _copied(
        self, kind: Kind, addresses: Tensor, rows: Tensor, empty: Empty
    ) -> tuple[Piece, Tensor]:
        """The piece of blocks of one kind by their addresses [m, columns]."""
        key = (kind, len(addresses))
        if key not in self._pieces:
            self._pieces[key] = Piece.of(self._parts[self._kinds.index(kind)], len(addresses))
        piece = self._pieces[key]
        memory = empty((piece.nbytes,), torch.uint8)
        places = [*piece.places[0], *piece.places[1]]
        host_gather(
            addresses.T[[place.column for place in places]].contiguous(),
            [(place.stop - place.first) // piece.blocks for place in places],
            [place.first for place in places],
            memory,
            self.native,
        )
        memory[piece.numbers].view(torch.int64).copy_(rows)
        return piece, memory

    def _follow(self, arena: BlockArena) -> None:
        """Bring the table up to date; segments that are the same ones are not looked at again."""
        parts = list(arena.parts())
        same = 0
        for old, new in zip(self._parts, parts, strict=False):
            if not _lies_where(old, new):
                break
            same += 1
        known, self._parts = len(self._parts), parts  # what was replaced is not held here
        if same == len(parts) == known:
            return
        new = parts[same:]
        self._kinds[same:] = [(x.keys.kind, x.values.kind, x.keys.codes.dtype) for x in new]
        places = [[*_places(part.keys), *_places(part.values)] for part in new]
        changed = torch.tensor(places, dtype=torch.int64).view(-1, *self._table.shape[1:])
        self._table = torch.cat([self._table[:same], changed])
        sizes = torch.tensor([part.blocks for part in parts])
        self._starts = sizes.cumsum(0) - sizes
        numbers = [self._kinds.index(kind) for kind in self._kinds]
        self._kind_of = torch.tensor(numbers, dtype=torch.int64)


def _lies_where(old: Segment, new: Segment) -> bool:
    """Whether two parts are the same memory: segments are one object, the tail is another one
    every time.
    """
    if old is new:
        return True
    if old.slots is not None or new.slots is not None:
        return False
    if {x.kind for x in (old.keys, old.values, new.keys, new.values)} != {FULL}:
        return False
    pairs = ((old.keys.codes, new.keys.codes), (old.values.codes, new.values.codes))
    return all(
        (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)
        for a, b in pairs
    )


def _places(packed: Packed) -> list[list[int]]:
    """Address and steps of each column, in bytes; zeros where there is no such tensor."""
    found = []
    for name in COLUMNS:
        tensor = getattr(packed, name)
        if tensor is None:
            found.append([0, 0, 0])
            continue
        assert tensor.device.type == "cpu" and (tensor.numel() == 0 or tensor[0, 0].is_contiguous())
        size = tensor.element_size()
        # A constant of all blocks is the same one for each of them.
        step = 0 if tensor.shape[1] == 1 else tensor.stride(1) * size
        found.append([tensor.data_ptr(), tensor.stride(0) * size, step])
    return found
