"""Tensors in a file: written once, whole or not at all, and mapped back in without a copy.

The files are ordinary safetensors. Tensors begin at multiples of a page, which the format allows
only without holes: small tensors of zeros lie between them. So that mapped numbers are computed
with exactly as those in memory, and so that the pages of one can be given back alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from io import RawIOBase
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from infllm_cli.checksums import (
    PAGE,
    PARTIAL,
    PIECE_BYTES,
    BrokenFile,
    FileRecord,
)

_PADDING = "padding."
_SEAL, _SEAL_BYTES = "crc32", 4
_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_tensors(
    path: Path,
    tensors: dict[str, Tensor],
    facts: dict[str, str],
    *,
    sealed: bool = False,
    done: Callable[[str], None] = lambda name: None,
) -> FileRecord:
    """Write tensors to a file that is there only when it is whole.

    Args:
        tensors: on the host, of any strides.
        facts: text, for the file's metadata.
        sealed: end with a tensor that holds the checksum of everything before it.
        done: is told of each tensor that has been written.

    Raises:
        OSError: nothing of it is left.
    """
    partial = path.with_name(f"{path.name}{PARTIAL}")
    checksum = size = 0
    try:
        with partial.open("wb", buffering=0) as file:
            for piece in _pieces(tensors, facts, sealed, done):
                checksum = zlib.crc32(piece, checksum)
                size += len(piece)
                _write(file, piece)
            if sealed:
                seal = checksum.to_bytes(_SEAL_BYTES, "little")
                checksum = zlib.crc32(seal, checksum)
                size += len(seal)
                _write(file, memoryview(seal))
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return FileRecord(path.name, size, checksum)


def _write(file: RawIOBase, piece: memoryview) -> None:
    while len(piece):  # a disk that is nearly full takes a part
        piece = piece[file.write(piece) :]


def check_sealed(path: Path) -> None:
    """Compare a file that was sealed with its checksum.

    Raises:
        BrokenFile: it cannot be read, or is not what was written.
    """
    checksum, held = 0, b""
    try:
        with path.open("rb", buffering=0) as file:
            left = os.fstat(file.fileno()).st_size - _SEAL_BYTES
            buffer = memoryview(bytearray(PIECE_BYTES))
            while left > 0 and (count := file.readinto(buffer[:left])):
                checksum = zlib.crc32(buffer[:count], checksum)
                left -= count
            held = file.read(_SEAL_BYTES) if left == 0 else b""
    except OSError as error:
        raise BrokenFile(f"{path}: {error.strerror or error}") from None
    if held != checksum.to_bytes(_SEAL_BYTES, "little"):
        raise BrokenFile(f"{path}: its checksum is another one")


def _pieces(
    tensors: dict[str, Tensor], facts: dict[str, str], sealed: bool, done: Callable[[str], None]
) -> Iterator[memoryview]:
    header: dict[str, object] = {"__metadata__": facts}
    at = padding = 0

    def place(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal at
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    fills = []
    for name, tensor in tensors.items():
        place(name, _NAMES[tensor.dtype], list(tensor.shape), tensor.nbytes)
        fill = -at % PAGE
        fills.append(fill)
        if fill:
            place(f"{_PADDING}{padding}", "U8", [fill], fill)
            padding += 1
    if sealed:
        place(_SEAL, "U8", [_SEAL_BYTES], _SEAL_BYTES)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for (name, tensor), fill in zip(tensors.items(), fills, strict=True):
        yield from _bytes_of(tensor)
        done(name)
        if fill:
            yield memoryview(bytes(fill))


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The numbers in order, copied a row of the first dimension at a time if they do not lie so."""
    if tensor.is_contiguous():
        if tensor.nbytes:
            data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for start in range(0, len(data), PIECE_BYTES):
                yield data[start : start + PIECE_BYTES]
        return
    for row in tensor:
        yield from _bytes_of(row.contiguous())


class MappedFile:
    """A file of tensors, mapped in read-only; it stays mapped as long as one of them is used.

    Raises:
        BrokenFile: it is no such file.
    """

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(self._map[:8], "little")
            header = json.loads(self._map[8 : 8 + length])
        except (OSError, ValueError, OverflowError) as error:
            raise BrokenFile(f"{path}: {error}") from None
        self.facts: dict[str, str] = header.pop("__metadata__", {})
        self.tensors: dict[str, Tensor] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        data = np.frombuffer(self._map, dtype=np.uint8)
        for name, entry in header.items():
            if name.startswith(_PADDING):
                continue
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            dtype = _DTYPES[entry["dtype"]]
            count = math.prod(entry["shape"])
            if end > len(data) or end - start != count * dtype.itemsize:
                raise BrokenFile(f"{path}: {name} lies outside of it")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "not writable": nobody writes
                flat = torch.from_numpy(data[start:end])
            self.tensors[name] = flat.view(dtype).view(entry["shape"])
            self._ranges[name] = (start, end)

    def release(self, prefix: str) -> Callable[[], None]:
        """What gives back the pages of the tensors whose names begin so; they stay usable."""
        spans = [span for name, span in self._ranges.items() if name.startswith(prefix)]
        low = min(start for start, _ in spans) // PAGE * PAGE
        length = max(end for _, end in spans) - low

        def give_back() -> None:
            if hasattr(mmap, "MADV_DONTNEED"):
                self._map.madvise(mmap.MADV_DONTNEED, low, length)

        return give_back
