"""Host memory that a GPU can read and write by itself, in exactly the bytes that are needed.

torch's own pinned memory comes in powers of two and is never given back; segments would take up to
twice their size for good. Here pages of our own are registered with the driver when that pays: it
takes about as long as filling them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _Pages(mmap.mmap):
    """Anonymous pages; those that are registered leave the driver before they leave the process."""

    registered = 0  # their address

    def __del__(self) -> None:
        if self.registered:
            with contextlib.suppress(Exception):  # the driver may have gone before us
                torch.cuda.cudart().cudaHostUnregister(self.registered)


class PageStore:
    """Tensors in pages of their own, which may be pinned later."""

    def __init__(self) -> None:
        self._pages: weakref.WeakValueDictionary[int, _Pages] = weakref.WeakValueDictionary()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose memory goes back to the system when it is given up."""
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        pages = _Pages(-1, size)
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        self._pages[tensor.data_ptr()] = pages
        return tensor.view(dtype).view(shape)

    def pin(self, tensor: Tensor) -> bool:
        """Register a tensor that begins where one of ours does; whether it is pinned now.

        Others (mapped files, for one) stay as they are: copies of them keep the host waiting.
        """
        pages = self._pages.get(tensor.data_ptr())
        if pages is None or not torch.cuda.is_available():
            return False
        if not pages.registered:
            driver = torch.cuda.cudart()
            address = tensor.data_ptr()
            if driver.cudaHostRegister(address, len(pages), PORTABLE) == driver.cudaError.success:
                pages.registered = address
            else:
                _forget_error()
        return bool(pages.registered)


def _forget_error() -> None:
    """The driver tells a failed call's error once more, to whoever asks next: let that be us."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
