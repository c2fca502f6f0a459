"""`infllm memory`: what lies on the shelf, for people and scripts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from infllm_cli.checksums import BrokenFile, check
from infllm_cli.errors import InfllmError, UsageError
from infllm_cli.limits import memories_folder
from infllm_cli.shelf import Entry, Shelf
from infllm_cli.wording import size, visible


def listing(cache_dir: Path) -> str:
    """A line per memory: key, document, model, tokens, bytes, last use, and what is missing."""
    lines = []
    for entry in Shelf(memories_folder(cache_dir)).entries():
        record = entry.record
        if record is None:
            facts = ["", "", "", size(entry.size), "", "unusable"]
        else:
            state = "whole" if record.complete else f"{record.read_tokens:,} tokens so far"
            facts = [record.document, record.model, f"{record.tokens:,} tokens"]
            facts += [size(entry.size), _when(entry.last_used), state]
        lines.append("\t".join([entry.key[:12], *map(visible, facts)]) + "\n")
    return "".join(lines)


def description(cache_dir: Path, key: str) -> str:
    """What is known of a memory, a line per fact; its files are compared with their checksums.

    Raises:
        UsageError: no such memory.
    """
    entry = Shelf(memories_folder(cache_dir)).find(key)
    facts: dict[str, object] = {"key": entry.key, "path": entry.folder, "size_bytes": entry.size}
    record = entry.record
    if record is not None:
        facts |= {
            "document": record.document,
            "model": record.model,
            "tokens": record.tokens,
            "read_tokens": record.read_tokens,
            "complete": str(record.complete).lower(),
            "whole": str(record.whole).lower(),
            "blocks": record.blocks,
            "files": len(record.files),
            "created": record.created,
            "last_used": _when(entry.last_used),
        }
    facts["state"] = _state(entry)
    return "".join(f"{name}\t{visible(str(value))}\n" for name, value in facts.items())


def remove(cache_dir: Path, keys: Sequence[str], *, every: bool = False) -> None:
    """Remove memories.

    Raises:
        UsageError: no such memory, or none named.
        InfllmError: one is in use; the others are gone.
    """
    if bool(keys) == every:
        raise UsageError("name the memories to remove, or give --all.")
    shelf = Shelf(memories_folder(cache_dir))
    wanted = shelf.entries() if every else [shelf.find(key) for key in keys]
    used = [entry.key[:12] for entry in wanted if not shelf.remove(entry.key)]
    if used:
        raise InfllmError(f"in use, not removed: {', '.join(used)}.")


def prune(cache_dir: Path, most: int) -> str:
    """Remove the least recently used memories until all take at most `most` bytes; a line for each.

    What processes that were killed have moved out of the RAM goes, too.

    Raises:
        InfllmError: those that are left are in use, and take more.
    """
    shelf = Shelf(memories_folder(cache_dir))
    shelf.sweep()
    gone = shelf.make_room(most)
    left = sum(entry.size for entry in shelf.entries())
    if left > most:
        raise InfllmError(
            f"the memories that are left take {size(left)} and are in use; {len(gone)} are gone."
        )
    names = [(e.key[:12], e.record.document if e.record else "", size(e.size)) for e in gone]
    return "".join("\t".join(map(visible, facts)) + "\n" for facts in names)


def path(cache_dir: Path, key: str | None) -> Path:
    """The folder of a memory, or of all of them.

    Raises:
        UsageError: no such memory.
    """
    folder = memories_folder(cache_dir)
    return folder if key is None else Shelf(folder).find(key).folder


def _state(entry: Entry) -> str:
    if entry.record is None:
        return "unusable: it is not finished or damaged"
    try:
        for file in entry.record.files:
            check(entry.folder, file)
    except BrokenFile as error:
        return f"damaged: {error}"
    return "sound"


def _when(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp).isoformat(" ", "minutes")
