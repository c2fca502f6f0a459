"""Is a saved memory what was written? Found out while the model is still being loaded.

Which memory will be asked is known for certain only then, for weights and geometry have their say.
But it is nearly always the one of the same document that was used last: its files are compared with
their checksums by threads of their own, and whoever loads it need not compare those again.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from infllm_cli.checksums import PIECE_BYTES, BrokenFile, FileRecord, check
from infllm_cli.shelf import Shelf

CHECKERS = 2  # threads that compare checksums
# A file that was written so shortly before could be written again within one tick of its clock.
SETTLED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Identity:
    """A file with the same identity has not been written to since."""

    inode: int
    size: int
    changed: tuple[int, int]  # ns


class EarlyCheck:
    """Compares the files of the memory that will probably be asked, in the background.

    Args:
        sha256: of the document's bytes.
    """

    def __init__(self, shelf: Shelf, sha256: str) -> None:
        self._waiting: deque[tuple[Path, FileRecord]] = deque()
        for entry in shelf.entries():  # the last used first
            record = entry.record
            if record is not None and record.document_sha256 == sha256:
                self._waiting.extend((entry.folder, file) for file in record.files)
                break
        self._found: dict[tuple[Path, FileRecord], Future[_Identity | None]] = {
            job: Future() for job in self._waiting
        }
        # Nobody waits for them where the command ends before.
        for _ in range(min(CHECKERS, len(self._waiting))):
            Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            try:
                job = self._waiting.popleft()
            except IndexError:
                return
            found = self._found[job]
            if not found.set_running_or_notify_cancel():
                continue
            identity = None
            try:
                identity = _compare(*job, buffer)
            finally:
                found.set_result(identity)

    def vouches(self, folder: Path, file: FileRecord) -> bool:
        """Whether a file has been compared and is still the same; waits where it is half done."""
        found = self._found.get((folder, file))
        if found is None or found.cancel():  # not begun: the caller is as quick
            return False
        identity = found.result()
        return identity is not None and identity == _identity(folder / file.name)

    def close(self) -> None:
        """Begin with no further file."""
        self._waiting.clear()


def _compare(folder: Path, file: FileRecord, buffer: memoryview) -> _Identity | None:
    """The identity of a file that is what was written; None where it is not, or too young."""
    path = folder / file.name
    before = _identity(path)
    if before is None or time.time_ns() - max(before.changed) < SETTLED_SECONDS * 1e9:
        return None
    try:
        check(folder, file, buffer)
    except BrokenFile:
        return None  # whoever loads it tells what is wrong with it
    return before


def _identity(path: Path) -> _Identity | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return _Identity(stat.st_ino, stat.st_size, (stat.st_mtime_ns, stat.st_ctime_ns))
