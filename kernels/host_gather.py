"""How do pieces that lie all over host memory come into one, for a single copy over the bus?

A step's blocks lie in many segments, each as several tensors. As views of tensors every piece costs
microseconds before a byte of it is moved; as addresses, computed for all of them at once, next to
nothing. The plain form is a loop around the C library's copy; the other one is that loop in C, on
several threads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .native.library import Native

THREAD_BYTES = 2**18  # less is not worth waking another thread


def host_gather(
    addresses: Tensor, sizes: list[int], offsets: list[int], to: Tensor, native: Native | None
) -> None:
    """Copy pieces of memory into a tensor.

    Args:
        addresses: `[kinds, n]` int64, contiguous: where the pieces of each kind lie. Whoever calls
            keeps what lies there.
        sizes: of a piece of each kind, in bytes.
        offsets: where in `to` those of a kind begin, in bytes; they follow each other.
        to: bytes, contiguous, on the host.
        native: functions in C; None: there are none.
    """
    kinds, n = addresses.shape
    assert addresses.dtype == torch.int64 and addresses.is_contiguous()
    assert len(sizes) == len(offsets) == kinds and to.is_contiguous()
    most = max((o + n * s for o, s in zip(offsets, sizes, strict=True)), default=0)
    assert most <= to.nbytes, (most, to.nbytes)
    if native is None:
        host_gather_plain(addresses, sizes, offsets, to)
        return
    threads = min(torch.get_num_threads(), 1 + n * sum(sizes) // THREAD_BYTES)
    native.gather(
        addresses.data_ptr(),
        kinds,
        n,
        (ctypes.c_int64 * kinds)(*sizes),
        (ctypes.c_int64 * kinds)(*offsets),
        to.data_ptr(),
        threads,
    )


def host_gather_plain(addresses: Tensor, sizes: list[int], offsets: list[int], to: Tensor) -> None:
    """Do the same piece by piece: the twin."""
    move, start = ctypes.memmove, to.data_ptr()
    for row, size, offset in zip(addresses.tolist(), sizes, offsets, strict=True):
        target = start + offset
        for address in row:
            move(target, address, size)
            target += size
