"""A layer's stored keys on its device, as they are packed, to be scanned there.

Made when a question is first asked, and brought up to date before each scan: segments never change,
so only those that are new, or stand in another's place, are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.kernels.segment_lookup import KeyTable, segment_lookup
from infllm_cli.kernels.store_codec import FULL, Packed
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.device_arena import DeviceArena, upload
from infllm_cli.memory.segment import Segment
from infllm_cli.memory.transfers import Transfers

STREAMED_AT_ONCE = 2  # segments on the device while keys are streamed: one is scanned, one arrives


@dataclass(slots=True)
class Budget:
    """Bytes of a device that packed keys of all its layers together may take."""

    limit: int
    used: int = 0

    def room(self, held: int = 0) -> int:
        """What one layer may take that holds so many already."""
        return self.limit - self.used + held


@dataclass(slots=True)
class _Copy:
    """A segment's keys on the device, and what tells whether they are still the segment's."""

    identity: tuple[object, ...]
    blocks: int  # of the segment, dropped ones included
    packed: Packed
    numbers: Sequence[int]


class DeviceKeys:
    """Copies of one layer's keys.

    Args:
        budget: shared with the other layers of the device.
    """

    def __init__(self, transfers: Transfers, budget: Budget) -> None:
        self.transfers = transfers
        self.budget = budget
        self.nbytes = 0
        self._copies: list[_Copy] = []
        self._tail: Tensor | None = None  # [H_kv, segment's blocks, B, d], filled as the tail is
        self._tail_blocks = 0
        self._tail_start = 0
        self._tables: list[KeyTable] | None = None

    def needs(self, arena: BlockArena) -> int:
        """Bytes that all of them take on the device."""
        found = sum(segment.keys.nbytes for segment in arena.segments)
        tail = arena.tail
        if tail is not None:
            found += arena.segment_blocks * tail.keys.codes[:, :1].nbytes
        return found

    def tables(self, arena: BlockArena) -> list[KeyTable]:
        """What is to be scanned, up to date; on the current stream."""
        with self.transfers.copying(self.transfers.event()):
            changed = self._refresh_segments(arena)
            changed |= self._refresh_tail(arena)
            if not changed and self._tables is not None:
                return self._tables
            self._tables = self._listed(arena)
            event = self.transfers.event()
        held = [copy.packed.nbytes for copy in self._copies]
        held += [self._tail.nbytes] if self._tail is not None else []
        self.budget.used += sum(held) - self.nbytes
        self.nbytes = sum(held)
        self.transfers.wait(event)
        for table in self._tables:
            for tensor in (table.addresses, table.segment, table.inside, table.place):
                self.transfers.keep(tensor)
            for packed in table.parts:
                packed.map(self.transfers.keep)
        return self._tables

    def truncate(self, blocks: int) -> None:
        """The blocks from number `blocks` on are no more, or others now."""
        end = 0
        for index, copy in enumerate(self._copies):
            end += copy.blocks
            if end > blocks:
                del self._copies[index:]
                self._tables = None
                break
        if self._tail_start + self._tail_blocks > blocks:
            self._tail_blocks = max(0, blocks - self._tail_start)
            self._tables = None

    def drop(self) -> None:
        """Give the device's memory back."""
        self.budget.used -= self.nbytes
        self.nbytes = 0
        self._copies, self._tail, self._tables = [], None, None
        self._tail_blocks = 0

    def _refresh_segments(self, arena: BlockArena) -> bool:
        changed = len(self._copies) > len(arena.segments)
        del self._copies[len(arena.segments) :]
        start = 0
        for index, segment in enumerate(arena.segments):
            identity = _identity(segment, start)
            if index >= len(self._copies) or self._copies[index].identity != identity:
                packed = upload(segment.keys, self.transfers)
                copy = _Copy(identity, segment.blocks, packed, _numbers(segment, start))
                self._copies[index : index + 1] = [copy]
                changed = True
                if segment.release is not None:
                    segment.release()
            start += segment.blocks
        return changed

    def _refresh_tail(self, arena: BlockArena) -> bool:
        tail = arena.tail
        if tail is None:
            changed = self._tail_blocks > 0
            self._tail_blocks = 0
            return changed
        if self._tail_start != arena.sealed:
            self._tail_start, self._tail_blocks = arena.sealed, 0
        codes = tail.keys.codes
        if self._tail is None:
            shape = (codes.shape[0], arena.segment_blocks, *codes.shape[2:])
            self._tail = torch.zeros(shape, dtype=codes.dtype, device=self.transfers.device)
        new = slice(self._tail_blocks, tail.blocks)
        if new.start == new.stop:
            return False
        for head in range(len(codes)):  # contiguous on both sides
            self._tail[head, new] = self.transfers.up(codes[head, new])
        self._tail_blocks = tail.blocks
        return True

    def _listed(self, arena: BlockArena) -> list[KeyTable]:
        kinds: dict[tuple[str, torch.dtype], list[tuple[Packed, Sequence[int]]]] = {}
        listed = [(copy.packed, copy.numbers) for copy in self._copies]
        if self._tail_blocks:
            assert self._tail is not None
            filled = range(self._tail_start, self._tail_start + self._tail_blocks)
            numbers = [*filled, *[-1] * (arena.segment_blocks - self._tail_blocks)]
            listed.append((Packed(FULL, self._tail.shape[-1], self._tail), numbers))
        for packed, numbers in listed:
            if packed.blocks:  # of some segments every block was dropped
                kinds.setdefault((packed.kind, packed.codes.dtype), []).append((packed, numbers))
        return [KeyTable.of(same) for same in kinds.values()]


def _identity(segment: Segment, start: int) -> tuple[object, ...]:
    """What differs where other keys lie, or the same elsewhere."""
    codes = segment.keys.codes
    return codes.data_ptr(), segment.keys.kind, tuple(codes.shape), start, segment.blocks


def _numbers(segment: Segment, start: int) -> list[int]:
    """The number of each block that is stored, in the order of storage."""
    return (segment.held().nonzero()[:, 0] + start).tolist()


def stream(q: Tensor, arena: BlockArena, transfers: Transfers) -> tuple[Tensor, Tensor]:
    """Score keys that are copied to the device as they are scanned; see `segment_lookup`.

    Args:
        q: `[H_kv, Q, d]` on the device, scaled and rotated.

    Returns:
        `(lse, peak)`, both `[H_kv, Q, N]` float32.
    """
    done: deque[torch.cuda.Event | None] = deque()
    found = []
    for part in arena.parts():
        if len(done) == STREAMED_AT_ONCE:
            event = done.popleft()
            if event is not None:  # else the processor would order all copies at once
                event.synchronize()
        if isinstance(arena, DeviceArena):
            arena.pin_keys(part)
        with transfers.copying():
            packed = upload(part.keys, transfers)
            event = transfers.event()
        transfers.wait(event)
        packed = packed.map(transfers.keep)
        if packed.blocks:
            table = KeyTable.of([(packed, _numbers(part, 0))])
            found.append(segment_lookup(q, [table], part.blocks))
        else:
            nothing = q.new_full((*q.shape[:2], part.blocks), float("-inf"), dtype=torch.float32)
            found.append((nothing, nothing))
        done.append(transfers.event())
        if part.release is not None:
            part.release()
    lse, peak = (torch.cat(pieces, dim=-1) for pieces in zip(*found, strict=True))
    return lse, peak
