"""What the user allows: bytes in RAM, on disk, and of saved memories. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infllm_cli import machine
from infllm_cli.shelf import Shelf

DEFAULT_BUDGET = "20GB"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user allows, in bytes.

    Attributes:
        host: keys and values in RAM.
        disk: files of this document; None: what is free.
        budget: all saved memories together.
        save: whether to keep the memory for the next command.
        allow_drop: whether blocks that neither RAM nor disk hold may be given up.
        device: stored keys on a GPU; None: half of what is free there.
    """

    host: int
    disk: int | None
    budget: int
    save: bool = True
    allow_drop: bool = False
    device: int | None = None

    @classmethod
    def usual(cls) -> Limits:
        """What holds where no flag is given: half of the memory that is free."""
        return parse_limits(None, None, DEFAULT_BUDGET, save=True)


def parse_limits(
    host_limit: str | None,
    disk_limit: str | None,
    memory_budget: str,
    save: bool,
    allow_drop: bool = False,
    device_limit: str | None = None,
) -> Limits:
    """The limits that flags give; by default half of the memory that is free.

    Raises:
        UsageError: what is no size, by its flag.
    """
    if host_limit is None:
        host = machine.available_memory() // 2
    else:
        host = machine.parse_size(host_limit, "--host-limit")
    disk = None if disk_limit is None else machine.parse_size(disk_limit, "--disk-limit")
    budget = machine.parse_size(memory_budget, "--memory-budget")
    device = None if device_limit is None else machine.parse_size(device_limit, "--device-limit")
    return Limits(host, disk, budget, save, allow_drop, device)


def memories_folder(cache_dir: Path) -> Path:
    """The folder of the cache that holds one folder for each saved memory."""
    return cache_dir / "memories"


def disk_room(shelf: Shelf, limit: int | None, keep: str | None = None) -> int:
    """Bytes that a document may take on the disk of the shelf.

    What is free less a reserve for others, and what older memories would give back; not more than
    `limit`.
    """
    old = sum(entry.size for entry in shelf.entries() if entry.key != keep)
    free = machine.free_disk(shelf.folder) - machine.disk_reserve(shelf.folder) + old
    return max(0, free if limit is None else min(limit, free))
