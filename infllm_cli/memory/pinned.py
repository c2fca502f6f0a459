"""Host memory that a GPU can read and write by itself, in exactly the bytes that are needed.

torch's own pinned memory comes in powers of two and is never given back; segments would take up to
twice their size for good. Here pages of our own are registered with the driver instead.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


class _Registered(mmap.mmap):
    """Anonymous pages that are taken from the driver before they go back to the system."""

    address = 0

    def __del__(self) -> None:
        if self.address:
            with contextlib.suppress(Exception):  # the driver may have gone before us
                torch.cuda.cudart().cudaHostUnregister(self.address)


def pinned_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in registered pages.

    Where the driver registers no more (a limit on locked memory), the pages stay ordinary: copies
    are slower and keep the computation waiting, and `is_pinned` says so.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    pages = _Registered(-1, size)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, PORTABLE)) == 0:
        pages.address = tensor.data_ptr()
    return tensor.view(dtype).view(shape)
