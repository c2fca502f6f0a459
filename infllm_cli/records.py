"""Lines that are records: of a log, a numbered list, a table with a number or a date in front.

Each says its own, whatever stands around it, though none ends as a sentence does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# A line's first word or two, or that it is indented.
_BEGINNING = re.compile(
    r"^(?:(?P<indent>[^\S\n]+)(?=\S)|(?P<first>\S+)(?:[^\S\n]+(?P<second>\S+))?)", re.M
)
_DIGITS, _LETTERS = re.compile(r"\d+"), re.compile(r"[^\W\d_]+")
_TO_NUMBER = re.compile(r"[^0]*0[^a]{0,9}")  # of a shape, to the letters behind its first number

FAR = 40  # lines: a longer trace parts records


def record_starts(text: str, start: int, end: int) -> list[int]:
    """The first characters, within [start, end), of lines that begin like the one before or behind.

    They begin with a number or a date, and all numbers are alike. Indented lines belong to the
    record above them.
    """
    low, high = _neighbour_before(text, start), _neighbour_behind(text, end)
    found: list[int] = []
    before: tuple[int, str] | None = None
    for at, shape in _beginnings(text, low, high):
        if shape and before is not None and before[1] == shape:
            found += [before[0], at]
        before = (at, shape)
    return sorted({at for at in found if start <= at < end})


def _beginnings(text: str, low: int, high: int) -> Iterator[tuple[int, str]]:
    """Every line that is not indented, and the shape of a number in front of it, if any."""
    for line in _BEGINNING.finditer(text, low, high):
        if line["indent"]:
            continue
        first, second = line["first"], line["second"] or ""
        if any(char.isdecimal() for char in first):
            yield line.start(), _shape(first)
        elif any(char.isdecimal() for char in second[:2]) and not first.islower():
            yield line.start(), _shape(f"{first} {second}")
        else:
            yield line.start(), ""


def _neighbour_before(text: str, at: int) -> int:
    """Where the last line that is not indented begins, of those that begin before `at`."""
    for _ in range(FAR):
        if at <= 0:
            break
        at = text.rfind("\n", 0, at - 1) + 1
        if not text[at : at + 1].isspace():
            break
    return max(at, 0)


def _neighbour_behind(text: str, at: int) -> int:
    """Where the first line that is not indented ends, of those that begin behind `at`."""
    for _ in range(FAR):
        start = text.find("\n", at) + 1
        if not start:
            return len(text)
        at = text.find("\n", start)
        if at < 0:
            return len(text)
        if not text[start].isspace():
            break
    return at


def _shape(word: str) -> str:
    """Of a word with a number, to the letters behind it, all letters and digits alike.

    Of 2026-11-30T08:00 it is 0-0-0.
    """
    found = _TO_NUMBER.match(_LETTERS.sub("a", _DIGITS.sub("0", word)))
    return found.group() if found else ""
