"""Copies between host and device beside the computation: a second stream, its events, its bytes.

On a CPU device host and device are one, every copy is done when the call returns, and the same
code runs without streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Moved:
    """What has crossed the bus, in bytes, and how blocks were found.

    Attributes:
        to_device: blocks, keys to be scanned, and segments on their way to be packed.
        to_host: blocks that left the window, and packed segments.
        prefetched: blocks (of one KV head each) that were fetched because they were predicted.
    """

    to_device: int = 0
    to_host: int = 0
    prefetched: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain values."""
        return {
            "bytes_to_device": self.to_device,
            "bytes_to_host": self.to_host,
            "prefetched": self.prefetched,
        }

    def add(self, other: Moved) -> None:
        """Count another one's, too."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Transfers:
    """The copies of one device, on a stream of their own.

    Everything that computes runs on the stream that is current when it is called, here "the main
    stream".
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moved = Moved()
        self.asynchronous = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.asynchronous else None

    @contextmanager
    def copying(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Inside, the copying stream is current; it goes on when `after` has happened."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """What happens when all that was put on the current stream so far is done."""
        if not self.asynchronous:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream go on only when `event` has happened."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def lend(self, tensor: Tensor) -> Tensor:
        """Tell the allocator that the copying stream uses a tensor of the main stream."""
        if self._stream is not None and tensor.is_cuda:
            tensor.record_stream(self._stream)
        return tensor

    def keep(self, tensor: Tensor) -> Tensor:
        """Tell the allocator that the main stream uses a tensor of the copying stream."""
        if self.asynchronous and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor

    def up(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, as a copy; on the current stream, when its turn comes."""
        self.moved.to_device += tensor.nbytes
        if not self.asynchronous:
            return tensor.to(self.device, copy=True)
        return tensor.to(self.device, non_blocking=True)

    def down(self, source: Tensor, target: Tensor) -> None:
        """Copy a device tensor to a host tensor of the same shape, as `up`.

        The target may be read when the event of the current stream has happened.
        """
        self.moved.to_host += source.nbytes
        target.copy_(source, non_blocking=self.asynchronous)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory to gather into before a copy.

        Pinned where copies are asynchronous: torch's allocator gives it to nobody else before the
        copy out of it is done.
        """
        return torch.empty(shape, dtype=dtype, pin_memory=self.asynchronous)
