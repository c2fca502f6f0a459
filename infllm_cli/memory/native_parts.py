"""A layer's stored blocks as the C functions take them: a table, made anew when they change."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from infllm_cli.kernels.native.library import PartArgument, can_serve, parts_argument
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.segment import Segment

# Segments of a file that are scanned before what they brought into memory is given back.
MAPPED_AT_ONCE = 16


class NativeParts:
    """The table, and the parts that it tells of.

    Attributes:
        known: whether the functions can read all of them.
        count: of parts.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The tail may be another one with as many blocks."""
        self._segments: list[Segment] = []
        self._blocks = -1
        self._parts: list[Segment] = []
        self.known = False

    @property
    def count(self) -> int:
        """Number of parts."""
        return len(self._parts)

    def follow(self, arena: BlockArena) -> bool:
        """Tell of the parts of an arena as they are now; whether all can be read."""
        now = arena.segments
        same = self._blocks == arena.count and len(now) == len(self._segments)
        if same and all(a is b for a, b in zip(now, self._segments, strict=True)):
            return self.known
        self._segments, self._blocks = list(now), arena.count
        self._parts = list(arena.parts())
        self.known = all(
            part.slots is None and can_serve(part.keys, are_keys=True) and can_serve(part.values)
            for part in self._parts
        )
        self._table = parts_argument([(p.keys, p.values) for p in self._parts if self.known])
        return self.known

    @property
    def table(self) -> ctypes.Array[PartArgument]:
        """One entry per part."""
        return self._table

    def stretches(self) -> Iterator[tuple[int, int, int]]:
        """(first part, parts, first block) of what is scanned in one call.

        Behind each, the pages of files that it has brought into the process are given back.
        """
        mapped = any(part.release is not None for part in self._parts)
        at_once = MAPPED_AT_ONCE if mapped else len(self._parts)
        block = 0
        for first in range(0, len(self._parts), at_once):
            parts = self._parts[first : first + at_once]
            yield first, len(parts), block
            for part in parts:
                block += part.blocks
                if part.release is not None:
                    part.release()
