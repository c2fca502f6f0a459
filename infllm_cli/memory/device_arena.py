"""The blocks of a layer whose model is on a GPU: in host memory, packed on the device.

The same blocks, segments and files as of any `BlockArena`. What leaves the window is copied beside
the computation; `tail`, which everybody reads through, waits for such copies. The tail is pinned;
segments are when their keys are streamed, which is the only time that all of one is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.store_codec import FULL, Packed, pack_keys, pack_values
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.pinned import PageStore
from infllm_cli.memory.segment import Segment
from infllm_cli.memory.transfers import Transfers


class DeviceArena(BlockArena):
    """Sealed blocks; what is on its way in lies in memory that the device writes by itself."""

    reuses_tail = True

    def __init__(
        self,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        segment_blocks: int,
        codec: Codec,
        transfers: Transfers,
    ) -> None:
        super().__init__(kv_heads, block_tokens, head_dim, value_dim, dtype, segment_blocks, codec)
        self.transfers = transfers
        self._store_of_pages = PageStore()
        self._spare: Segment | None = None  # room of a tail whose blocks are packed
        self._written: torch.cuda.Event | None = None  # the last copy into the tail

    def settle(self) -> None:
        """Wait until what was appended has arrived."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None

    @property
    def tail(self) -> Segment | None:
        """The blocks that no segment holds yet."""
        self.settle()
        return super().tail

    def pin_keys(self, segment: Segment) -> None:
        """Let the device copy a segment's keys by itself, from now on."""
        if self.transfers.asynchronous:
            for tensor in segment.keys.tensors().values():
                self._store_of_pages.pin(tensor)

    def _new_tail(self) -> Segment:
        """Pinned, and the same one again once its blocks are packed: pinning takes its time."""
        spare, self._spare = self._spare, None
        if spare is not None:
            return spare
        empty = self._store_of_pages.empty
        tail = Segment(
            Packed(FULL, self._key_shape[-1], empty(self._key_shape, self._dtype)),
            Packed(FULL, self._value_shape[-1], empty(self._value_shape, self._dtype)),
        )
        if self.transfers.asynchronous:
            for packed in (tail.keys, tail.values):
                self._store_of_pages.pin(packed.codes)
        return tail

    def freeze(self) -> None:
        """Make a segment of the tail, however short; what follows begins a new one."""
        before = self._tail
        packs = self.codec is not Codec.FULL and not self.temporary
        super().freeze()
        if packs and before is not None:
            self._spare = before

    def _store(self, target: Tensor, source: Tensor) -> None:
        transfers = self.transfers
        if source.device.type == "cpu" and transfers.asynchronous:
            self.settle()
            target.copy_(source)
            return
        # The window goes on in the meantime: its slots are soon written again.
        source = transfers.lend(source.clone(memory_format=torch.contiguous_format))
        with transfers.copying(transfers.event()):
            for head in range(len(source)):  # contiguous on both sides
                transfers.down(source[head], target[head])
            self._written = transfers.event()

    def _packed(self, tail: Segment) -> Segment:
        """Pack on the device: there it takes about as long as the way there and back."""
        if self.codec is Codec.FULL:
            return tail
        kind = self.codec.value
        packed = []
        for part, pack in ((tail.keys, pack_keys), (tail.values, pack_values)):
            found = pack(self.transfers.up(part.codes.contiguous()), kind)
            packed.append(found.map(self._home))
        event = self.transfers.event()
        if event is not None:
            event.synchronize()
        return Segment(*packed)

    def _home(self, tensor: Tensor) -> Tensor:
        target = self._store_of_pages.empty(tuple(tensor.shape), tensor.dtype)
        self.transfers.down(tensor, target)
        return target


def upload(packed: Packed, transfers: Transfers) -> Packed:
    """A copy on the device, on the current stream, contiguous."""
    return packed.map(lambda tensor: transfers.up(tensor.contiguous()))
