"""A stretch of text cut into sentences, or lines where the text has none."""

from __future__ import annotations

import itertools
import re

# A piece shorter than this says little by itself: it goes with what follows it.
LEAST_CHARS = 40
# Minified code and tables have no end of sentence.
MOST_CHARS = 600

_TITLES = r"Mr|Mrs|Ms|Dr|St|Prof|Capt|Col|Gen|Lt|Sgt|Rev|Hon|Sen|Mme|Mlle|No|vs|cf|e\.g|i\.e"
# The end of a sentence, unless a title or an initial ends there; a blank line; the end of a line
# that was not wrapped: what follows is indented or a mark, as in code, lists and logs.
_BORDER = re.compile(
    r"[.!?][\"'”’»)\]]*\s+"
    r"|\n[^\S\n]*\n\s*"
    r"|\n(?=[^\S\n]+\S|[^\w\s\"'“‘(])"
)
_ABBREVIATED = re.compile(rf"\b(?:{_TITLES}|[A-Z])\.$")


def cut_sentences(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """First and last (excluded) characters of the sentences in `text[start:end]`.

    They tile the stretch, white space between them aside.
    """
    borders = [start]
    for match in _BORDER.finditer(text, start, end):
        if text[match.start()] == "." and _ABBREVIATED.search(
            text[max(start, match.start() - 8) : match.start() + 1]
        ):
            continue
        borders.append(match.end())
    borders.append(end)
    found: list[tuple[int, int]] = []
    for first, last in itertools.pairwise(borders):
        if not text[first:last].strip():
            continue
        joins = found and "\n\n" not in text[found[-1][0] : first]
        if joins and found[-1][1] - found[-1][0] < LEAST_CHARS:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return [piece for span in found for piece in _split(text, *span)]


def _split(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """A sentence without end, at white space where there is some."""
    pieces = []
    while last - first > MOST_CHARS:
        at = text.rfind(" ", first + LEAST_CHARS, first + MOST_CHARS) + 1 or first + MOST_CHARS
        pieces.append((first, at))
        first = at
    return [*pieces, (first, last)]
