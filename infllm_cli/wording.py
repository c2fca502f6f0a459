"""How figures, places and foreign text are put into words for a reader."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infllm_cli.events import Looked
    from infllm_cli.evidence import Passage

# Foreign text can hold what a terminal obeys: it is shown, not sent. Tabs and line ends stay.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if code not in (0x09, 0x0A)}
_VISIBLE = {**_PICTURES, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


def visible(text: str) -> str:
    """Text without control characters: each becomes a picture of itself."""
    return text.translate(_VISIBLE)


def size(count: float) -> str:
    """Bytes with a decimal unit, as in "2.9 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds, or minutes and hours as on a clock."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds >= 86_400:
        return f"{seconds / 86_400:.1f} days"
    return time.strftime("%H:%M:%S", time.gmtime(seconds)).removeprefix("00:")


def place(passage: Passage) -> str:
    """Where a passage stands, as in "b.txt, lines 3-5"."""
    first, last = passage.lines
    lines = f"line {first}" if first == last else f"lines {first}-{last}"
    return f"{passage.file}, {lines}" if passage.file else lines


def places(passages: list[Passage]) -> str:
    """Where some passages stand, with their share of the attention."""
    return "   ".join(f"{place(p)} {100 * p.score:.1f} %" for p in passages)


def row(event: Looked) -> str:
    """A step's lookup in one line."""
    head = f"{event.phase.value} {event.index + 1}"
    token = f" {event.token!r}" if event.token else ""
    parts = [
        f"{head}{token}: document {100 * event.share:.0f} %, {event.loaded_blocks} blocks, "
        f"{1000 * event.seconds:.0f} ms"
    ]
    for passage in event.passages:
        parts.append(f"{place(passage)} {100 * passage.score:.1f} % {_short(passage.text)}")
    return "; ".join(parts)


def _short(text: str, most: int = 60) -> str:
    one_line = " ".join(text.split())
    return f"“{one_line[: most - 1]}…”" if len(one_line) > most else f"“{one_line}”"
