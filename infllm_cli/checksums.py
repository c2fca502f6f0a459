"""Is a file what was written?"""

from __future__ import annotations

import mmap
import zlib
from dataclasses import dataclass
from pathlib import Path

PAGE = max(4096, mmap.ALLOCATIONGRANULARITY)
# Beside a thread that imports, each piece waits for it, up to twice 5 ms (Python's switch
# interval); four times as large they fit no core's cache, and take 1.7 times the processor time.
PIECE_BYTES = 1 << 22
PARTIAL = ".partial"  # the end of the name of what is not whole yet


class BrokenFile(Exception):
    """A file is not what was written."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: its size in bytes, and the CRC-32 of all of them."""

    name: str
    size: int
    crc32: int


def check(folder: Path, record: FileRecord, buffer: memoryview | None = None) -> None:
    """Compare a file with what was written.

    Args:
        buffer: to read into, a piece at a time; it is written over.

    Raises:
        BrokenFile: it is gone, shorter, longer or changed.
    """
    path = folder / record.name
    checksum = size = 0
    if buffer is None:
        buffer = memoryview(bytearray(PIECE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum = zlib.crc32(buffer[:count], checksum)
                size += count
    except OSError as error:
        raise BrokenFile(f"{path}: {error.strerror or error}") from None
    if size != record.size:
        raise BrokenFile(f"{path}: {size:,} bytes instead of {record.size:,}")
    if checksum != record.crc32:
        raise BrokenFile(f"{path}: its checksum is another one")
