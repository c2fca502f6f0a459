"""The folder of saved memories: one folder each, locked while in use, within a budget.

A process that makes a memory holds its lock alone; those that ask it share the lock. So nobody
removes a memory in use, and two processes on the same document do not write the same files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from infllm_cli.checksums import PARTIAL, FileRecord
from infllm_cli.errors import UsageError

FORMAT = 2  # of the files of a memory; part of its key as well
MANIFEST = "memory.json"
DOCUMENT = "document_sha256"  # in it
LOCK = "lock"
# What has been found out about a memory and lies beside it: see `impressions`, `meaning_files`.
IMPRESSIONS, MEANINGS = "neutral-", "meaning-"
SPILLED = "spilled-"  # folders of blocks that are not kept, only out of the RAM


@dataclass(frozen=True, slots=True)
class Record:
    """What `memory.json` says.

    Attributes:
        complete: False: a checkpoint of a reading that did not come to its end.
        document, model: names, for people.
        document_sha256: of its bytes, to find the memory before its key is known.
        tokens: of the document; `read_tokens` of them are in this memory.
        files: the segments in order, and last the state.
    """

    key: str
    complete: bool
    document: str
    model: str
    created: str
    tokens: int
    read_tokens: int
    blocks: int
    whole: bool
    files: list[FileRecord]
    format: int = FORMAT
    document_sha256: str = ""  # older records have none

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


def load_record(folder: Path) -> Record | None:
    """The record of a folder, or None where there is none or it is broken."""
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = told["memory"]
        if told["sha256"] != _digest(body):
            return None
        files = [FileRecord(**file) for file in body.pop("files")]
        if body["format"] != FORMAT:
            return None
        return Record(**body, files=files, document_sha256=told.get(DOCUMENT, ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_record(folder: Path, record: Record) -> None:
    """Write the record in one stroke.

    Raises:
        OSError: the old one is still there.
    """
    body = asdict(record)
    # Beside the record and not in it, where older versions would not know it.
    told = {DOCUMENT: body.pop("document_sha256"), "memory": body, "sha256": _digest(body)}
    fresh = folder / f"{MANIFEST}{PARTIAL}"
    try:
        fresh.write_text(json.dumps(told), encoding="utf-8")
        fresh.replace(folder / MANIFEST)
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder of the shelf; `record` is None where it holds no memory that can be used."""

    key: str
    folder: Path
    record: Record | None
    size: int
    last_used: float


class Place:
    """A memory's folder, locked by this process.

    Attributes:
        alone: whether this process may write in it.
    """

    def __init__(self, folder: Path, lock: IO[str], alone: bool) -> None:
        self.folder = folder
        self.alone = alone
        self._lock = lock

    @property
    def record(self) -> Record | None:
        """What the folder holds."""
        return load_record(self.folder)

    def share(self) -> None:
        """Let others ask the memory too; nobody may write from now on."""
        self.alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def claim(self) -> bool:
        """Try to be alone."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        return self.alone

    def touch(self) -> None:
        """Note that the memory has been used now."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / MANIFEST)

    def keep_only(self, names: set[str]) -> None:
        """Remove all other files, those that a killed process left among them."""
        assert self.alone
        for path in self.folder.iterdir():
            if path.name not in names and path.name != LOCK:
                with contextlib.suppress(OSError):
                    path.unlink()

    def clear(self) -> None:
        """Remove the memory, if this process is alone with it."""
        if self.alone:
            _remove(self.folder)

    def close(self) -> None:
        """Give the lock back; an empty folder goes."""
        if self.alone and self.record is None:
            _remove(self.folder)
        self._lock.close()


class Shelf:
    """All saved memories of a cache folder.

    Args:
        folder: need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, key: str) -> Place | None:
        """Lock the folder of a memory, which is made if need be; None: another process writes it.

        Raises:
            OSError: the folder cannot be used.
        """
        folder = self.folder / key
        folder.mkdir(parents=True, exist_ok=True)
        place = _lock(folder)
        if place is None or not place.alone:
            return place
        record = place.record
        known: set[str] = set()
        if record:
            known = {MANIFEST, *(file.name for file in record.files)}
            beside = (folder.glob(f"{prefix}*.npz") for prefix in (IMPRESSIONS, MEANINGS))
            known |= {file.name for files in beside for file in files}
        place.keep_only(known)
        return place

    def spill_folder(self) -> Place:
        """A new folder for blocks that are only moved out of the RAM.

        Raises:
            OSError: it cannot be made.
        """
        self.sweep()
        folder = self.folder / f"{SPILLED}{os.getpid()}-{os.urandom(4).hex()}"
        folder.mkdir(parents=True)
        place = _lock(folder)
        assert place is not None
        return place

    def sweep(self) -> None:
        """Remove what processes that were killed have spilled."""
        for folder in self.folder.glob(f"{SPILLED}*"):
            _remove_unused(folder)

    def entries(self) -> list[Entry]:
        """What is there, the last used first."""
        found = []
        with contextlib.suppress(OSError):
            for folder in self.folder.iterdir():
                if folder.is_dir() and not folder.name.startswith((SPILLED, ".")):
                    found.append(_entry(folder))
        return sorted(found, key=lambda entry: -entry.last_used)

    def find(self, prefix: str) -> Entry:
        """The memory whose key begins so.

        Raises:
            UsageError: none, or several.
        """
        found = [entry for entry in self.entries() if prefix and entry.key.startswith(prefix)]
        if len(found) != 1:
            count = f"{len(found)} memories begin" if found else "no memory begins"
            raise UsageError(f"{count} with {prefix!r}; `infllm memory list` tells the keys.")
        return found[0]

    def remove(self, key: str) -> bool:
        """Remove a memory; False: it is in use."""
        return _remove_unused(self.folder / key)

    def make_room(
        self, most: int, enough: Callable[[], bool] = lambda: True, keep: str | None = None
    ) -> list[Entry]:
        """Remove the least recently used memories; those that are gone.

        Until the others take at most `most` bytes and `enough` says so. Neither `keep` nor one
        that is in use goes.
        """
        gone: list[Entry] = []
        entries = [entry for entry in self.entries() if entry.key != keep]
        total = sum(entry.size for entry in entries)
        for entry in reversed(entries):
            if total <= most and enough():
                break
            if self.remove(entry.key):
                gone.append(entry)
                total -= entry.size
        return gone


def _entry(folder: Path) -> Entry:
    size, last = 0, 0.0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            stat = path.stat()
            size += stat.st_size
            if path.name == MANIFEST:
                last = stat.st_mtime
    return Entry(folder.name, folder, load_record(folder), size, last)


def _lock(folder: Path) -> Place | None:
    """Lock a folder alone, or shared where others share it; None where neither is possible."""
    while True:
        path = folder / LOCK
        lock = path.open("a")
        try:
            for mode in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, mode | fcntl.LOCK_NB)
                    break
            else:
                lock.close()
                return None
            # Somebody may have removed the folder between opening and locking.
            if path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
                return Place(folder, lock, mode == fcntl.LOCK_EX)
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
        except BaseException:
            lock.close()
            raise
        lock.close()
        time.sleep(0.01)


def _remove_unused(folder: Path) -> bool:
    """Remove a folder that no process uses; False: one does, or it is not there."""
    with contextlib.suppress(OSError), (folder / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
        return True
    return False


def _remove(folder: Path) -> None:
    # The record first: what remains when this is interrupted is no memory.
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
