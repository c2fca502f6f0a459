"""The blocks of a layer whose model is on a GPU: in pinned host memory, packed on the device.

The same blocks, segments and files as of any `BlockArena`. What leaves the window is copied beside
the computation; `tail`, which everybody reads through, waits for such copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.store_codec import Packed, pack_keys, pack_values
from infllm_cli.memory.blocks import BlockArena, Segment
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.pinned import pinned_pages
from infllm_cli.memory.transfers import Transfers


class DeviceArena(BlockArena):
    """Sealed blocks, most of them in memory that the device copies from and to by itself."""

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

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.transfers.asynchronous:
            return pinned_pages(shape, dtype)
        return super()._empty(shape, dtype)

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
        target = self._empty(tuple(tensor.shape), tensor.dtype)
        self.transfers.down(tensor, target)
        return target


def upload(packed: Packed, transfers: Transfers) -> Packed:
    """A copy on the device, on the current stream, contiguous."""
    return packed.map(lambda tensor: transfers.up(tensor.contiguous()))
