"""Blocks on a layer's device: a fixed number of slots per KV head, filled beside the computation.

Which block leaves is decided by `device_cache.Slots`. Blocks cross the bus as they are stored, all
that are missing in one copy, and are unpacked into their slots on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.native.library import Native
from infllm_cli.kernels.store_codec import unpack_into
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.device_cache import BlockSlots
from infllm_cli.memory.gathering import BlockGatherer
from infllm_cli.memory.knobs import CachePolicy
from infllm_cli.memory.segment import Segment
from infllm_cli.memory.transfers import Transfers


class DeviceBlocks(BlockSlots):
    """Keys, un-rotated, and values of some blocks, and the table that says where they lie.

    Args:
        capacity: slots per KV head; at least the blocks of a step.
        shape: KV heads, tokens of a block, and the sizes of a key and a value.
        native: functions in C, which gather blocks; None: there are none.

    Attributes:
        keys, values: [H_kv * capacity, B, d]; slot s of KV head h is row `h * capacity + s`.
    """

    def __init__(
        self,
        capacity: int,
        policy: CachePolicy,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        transfers: Transfers,
        native: Native | None = None,
    ) -> None:
        self.kv_heads, size, key_dim, value_dim = shape
        self.capacity = capacity
        self.transfers = transfers
        rows = self.kv_heads * capacity
        # Zeros: what a slot held before must not be what it is multiplied with, were it NaN.
        keys = torch.zeros(rows, size, key_dim, dtype=dtype, device=transfers.device)
        values = torch.zeros(rows, size, value_dim, dtype=dtype, device=transfers.device)
        super().__init__(self.kv_heads, capacity, policy, keys, values)
        self._gatherer = BlockGatherer(native)
        self._filled: torch.cuda.Event | None = None  # the last copy into slots
        self._read = transfers.event()  # the last attention over slots; now: they are zeros
        self._placed: tuple[list[list[int]], Tensor] | None = None

    def place(self, blocks: Tensor, arena: BlockArena) -> Tensor:
        """The slots [H_kv, n] int32, on the device, of blocks [H_kv, n] of the host.

        What is missing is fetched; the current stream waits for it, and for what was predicted.
        """
        self.follow(arena.sealed)
        rows, missing = [], []
        for head, (slots, row) in enumerate(zip(self.slots, blocks.tolist(), strict=True)):
            found, absent = slots.want(row)
            rows.append([head * self.capacity + slot for slot in found])
            at = dict(zip(row, rows[-1], strict=True))
            missing += [(head, block, at[block]) for block in absent]
        self._fetch(missing, arena)
        self.transfers.wait(self._filled)
        self._filled = None
        if self._placed is None or self._placed[0] != rows:
            table = self.transfers.staging(tuple(blocks.shape), torch.int32)
            table.copy_(torch.tensor(rows, dtype=torch.int32).view(blocks.shape))
            self._placed = (rows, table.to(self.transfers.device, non_blocking=True))
        return self._placed[1]

    def prefetch(self, predicted: list[list[int]], arena: BlockArena) -> None:
        """Fetch blocks of each KV head that will probably be wanted, and let nobody wait for it."""
        self.follow(arena.sealed)
        missing = []
        parts = list(arena.parts())
        for head, (slots, row) in enumerate(zip(self.slots, predicted, strict=True)):
            held = [block for block in row if block in slots or self._is_held(block, arena, parts)]
            found = slots.bring(held)
            missing += [(head, block, head * self.capacity + slot) for block, slot in found]
        self.transfers.moved.prefetched += len(missing)
        self._fetch(missing, arena)

    @staticmethod
    def _is_held(block: int, arena: BlockArena, parts: list[Segment]) -> bool:
        """Whether there is such a block: a question's are gone after it, others were dropped."""
        return block < arena.count and arena.locate(block, parts)[1] >= 0

    def used(self) -> None:
        """The attention over the slots has been put on the current stream."""
        self._read = self.transfers.event()

    def _fetch(self, missing: list[tuple[int, int, int]], arena: BlockArena) -> None:
        """Fill slots: (KV head, block, row of `keys` and `values`) each."""
        if not missing:
            return
        transfers = self.transfers
        heads, blocks, rows = torch.tensor(missing, dtype=torch.int64).T.contiguous().unbind()
        found = self._gatherer.gather(heads, blocks, rows, arena, transfers.staging)
        # Slots are written again only when the attention that reads them is done.
        with transfers.copying(self._read):
            for piece, memory in found:
                keys, values, into = piece.views(transfers.up(memory))
                unpack_into(keys, transfers.lend(self.keys), into)
                unpack_into(values, transfers.lend(self.values), into)
            self._filled = transfers.event()
