"""How figures, places and foreign text are put into words for a reader."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infllm_cli.digests import PassDone, PieceTold, Summary
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


STRIP = " ▁▂▃▄▅▆▇█"
PLAIN_STRIP = " .:-=+*#%"  # where the terminal has no such characters


def strip(mass: Sequence[float], columns: int = 40, *, plain: bool = False) -> str:
    """The document from left to right in so many characters: the higher, the more attended."""
    if not len(mass) or max(mass) <= 0:
        return ""
    levels = PLAIN_STRIP if plain else STRIP
    sums = [0.0] * min(columns, len(mass))
    for index, one in enumerate(mass):
        sums[index * len(sums) // len(mass)] += one
    # The root, as in the pictures, so that weaker places are seen, too.
    heights = [math.sqrt(value / max(sums)) for value in sums]
    return "".join(levels[round(height * (len(levels) - 1))] for height in heights)


def row(event: Looked, *, plain: bool = False) -> str:
    """A step's lookup in one line."""
    head = f"{event.phase.value} {event.index + 1}"
    token = f" {event.token!r}" if event.token else ""
    parts = [
        f"{head}{token}: document {100 * event.share:.0f} %, {event.loaded_blocks} blocks, "
        f"{1000 * event.seconds:.0f} ms"
    ]
    bar = strip(event.mass, plain=plain)
    if bar:
        parts.append(f"[{bar}]")
    for passage in event.passages:
        parts.append(f"{place(passage)} {100 * passage.score:.1f} % {_short(passage.text)}")
    return "; ".join(parts)


def told(event: PieceTold) -> str:
    """A piece's summary in one line."""
    part = event.part
    which = f" {part.pieces.index(event.piece) + 1} of {len(part.pieces)}" * (len(part.pieces) > 1)
    title = f"{part.title or part.file or ''}{which}".strip()
    head = f"{event.piece.index + 1}/{event.total}" + (f" {title}" if title else "")
    return f"{head} ({1000 * event.seconds:.0f} ms): {' '.join(event.digest.text.split())}"


def shrunk(event: PassDone) -> str:
    """A pass in one line."""
    return (
        f"pass {event.number}: {event.inputs} summaries, {event.words_in} words, become "
        f"{event.outputs}, {event.words_out} words"
    )


def summarized(summary: Summary) -> str:
    """A summary's figures in one line."""
    words = len(summary.text.split())
    whose = "quoted from" if summary.quoted else "of the model's own, from"
    parts = f"{len(summary.told)} of {len(summary.parts)} parts"
    return f"{words} words {whose} {parts}, in {duration(summary.seconds)}"


def _short(text: str, most: int = 60) -> str:
    one_line = " ".join(text.split())
    return f"“{one_line[: most - 1]}…”" if len(one_line) > most else f"“{one_line}”"
