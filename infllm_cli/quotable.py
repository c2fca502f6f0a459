"""A text cut into what can be quoted: sentences, or lines where the text is none of prose."""

from __future__ import annotations

import itertools
import re

from infllm_cli.records import record_starts
from infllm_cli.sentences import split_sentences

# A piece shorter than this says little by itself: it goes with what follows it.
LEAST_CHARS = 40
# Minified code and tables have no end of sentence.
MOST_CHARS = 600
# A line of code says little without those around it: so many below and above it, of so many
# characters together.
BELOW, ABOVE = 3, 2
MOST_CODE_CHARS = 400

_PROSE = re.compile(r"[.!?…。！？][\"'”’)\]»」』）*_]*\Z")
_BLANK = re.compile(r"\n[^\S\n]*\n")
# The end of a line that was not wrapped: what follows is indented or a mark, as in code and lists.
_LINE = re.compile(r"\n(?=[^\S\n]+\S|[^\w\s\"'“‘(])")


def cut_quotable(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """First and last (excluded) characters of the pieces of `text[start:end]`.

    They hold all of it but white space.
    """
    found: list[tuple[int, int]] = []
    sentences = split_sentences(text, start, end)
    records = {sentence.start for sentence in sentences if sentence.record}
    for sentence in sentences:
        lines = [match.start() for match in _LINE.finditer(text, sentence.start, sentence.end)]
        for first, last in itertools.pairwise([sentence.start, *lines, sentence.end]):
            if not text[first:last].strip():
                continue
            short = bool(found) and found[-1][1] - found[-1][0] < LEAST_CHARS
            short = short and not records & {first, found[-1][0]}
            if short and not _BLANK.search(text, found[-1][0], first + 1):
                found[-1] = (found[-1][0], last)
            else:
                found.append((first, last))
    return [piece for span in found for piece in _split(text, *span)]


def _split(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """A piece without end, at white space where there is some."""
    pieces = []
    while last - first > MOST_CHARS:
        at = text.rfind(" ", first + LEAST_CHARS, first + MOST_CHARS) + 1 or first + MOST_CHARS
        pieces.append((first, at))
        first = at
    return [*pieces, (first, last)]


def is_prose(text: str) -> bool:
    """Whether a piece ends as sentences do; lines of code, lists and tables do not."""
    return bool(_PROSE.search(text.rstrip()))


def stands_alone(text: str, start: int, end: int) -> bool:
    """Whether a piece says what it says without the lines around it: a sentence or a record."""
    return is_prose(text[start:end]) or start in record_starts(text, start, end)


def widen(text: str, start: int, end: int) -> tuple[int, int]:
    """A piece, and if it cannot stand alone its lines and some around them, to blank lines."""
    if stands_alone(text, start, end):
        return start, end
    low = text.rfind("\n", 0, start) + 1
    high = _line_end(text, end)
    if high - low > MOST_CODE_CHARS:
        return start, end
    for _ in range(BELOW):
        further = _line_end(text, high + 1)
        if not text[high:further].strip() or further - low > MOST_CODE_CHARS:
            break
        high = further
    for _ in range(ABOVE):
        further = text.rfind("\n", 0, max(low - 1, 0)) + 1
        if not text[further:low].strip() or high - further > MOST_CODE_CHARS:
            break
        low = further
    return low, high


def _line_end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found
