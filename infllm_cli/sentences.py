"""A text cut into sentences that can stand alone, with their places."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infllm_cli.records import record_starts

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
# A full stop that ends no sentence: titles, initials and common abbreviations before it.
_STOP = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）]*")
_SHORTENED = re.compile(
    r"(?:^|[\s(\"'“‘])(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lt|Sgt|Sr|Jr|Messrs|Mme|"
    r"Mlle|Nos|Fig|Vol|pp?|vs|cf|al|e\.g|i\.e|yds?|Inc|Ltd|Co|"
    r"Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec|Mon|Tue|Wed|Thu|Fri|Sat|Sun[d]?)$"
)
_NUMBER = re.compile(r"\W*\d{1,4}\Z")  # of an item in a list: its full stop ends nothing either
_PAIRS = {'"': '"', "“": "”", "«": "»"}
_OPENING = {closing: opening for opening, closing in _PAIRS.items()}
_QUOTES = "\"'“‘«"
_OPENERS = "\"'“‘([{«„*_-"


@dataclass(frozen=True, slots=True)
class Sentence:
    """Characters [start, end) of a text, and what stands there with its line ends gone.

    Attributes:
        spoken: it begins inside quotation marks.
        record: it begins a line of a log or a numbered list: see `records`.
    """

    start: int
    end: int
    text: str
    spoken: bool = False
    record: bool = False

    @property
    def whole(self) -> str:
        """The text, its quotation marks in pairs."""
        text = self.text
        if self.spoken and text[:1] not in _QUOTES:
            # The mark that opened the speech stands before another sentence.
            closing = next((mark for mark in text if mark in _PAIRS.values()), '"')
            text = _OPENING[closing] + text
        for opening, closing in _PAIRS.items():
            open_now = text.count(opening) - (opening != closing) * text.count(closing)
            if open_now > 0 and (opening != closing or open_now % 2):
                text += closing
        return text

    @property
    def words(self) -> int:
        """Words between white space."""
        return len(self.text.split())


def split_sentences(text: str, start: int = 0, end: int | None = None) -> list[Sentence]:
    """The sentences of the characters [start, end).

    None reaches over a blank line, nor from one record of a log or a numbered list into the next.
    """
    end = len(text) if end is None else end
    found: list[Sentence] = []
    low = start
    starts = set(record_starts(text, start, end))
    blanks = [(blank.start(), blank.end()) for blank in _PARAGRAPH.finditer(text, start, end)]
    records = [(at, at) for at in starts]
    for high, after in sorted([*blanks, *records, (end, end)]):
        if high > low:
            found += _paragraph(text, low, high)
        low = max(low, after)
    return [replace(s, record=True) if s.start in starts else s for s in found] if starts else found


def as_text(sentences: Sequence[Sentence]) -> str:
    """Sentences one behind the other, records on lines of their own."""
    text = ""
    for before, sentence in itertools.pairwise([None, *sentences]):
        if before is not None:
            apart = sentence.record or (before.record and sentence.start > before.end + 2)
            text += "\n" if apart else " "
        text += sentence.whole
    return text


def _paragraph(text: str, low: int, high: int) -> list[Sentence]:
    found = []
    begin = low
    for stop in _STOP.finditer(text, low, high):
        if _goes_on(text, begin, stop, high):
            continue
        found.append((begin, stop.end()))
        begin = stop.end()
    if text[begin:high].strip():
        found.append((begin, high))
    return [_sentence(text, low, first, last) for first, last in found if text[first:last].strip()]


def _goes_on(text: str, begin: int, stop: re.Match[str], high: int) -> bool:
    """Whether a sentence does not end at this mark."""
    follows = text[stop.end() : min(high, stop.end() + 40)].lstrip()
    if follows and follows.lstrip(_OPENERS)[:1].islower():
        return True
    mark = stop.group()
    if mark == "." and _NUMBER.match(text, begin, stop.start()):
        return True
    before = text[max(begin, stop.start() - 12) : stop.start()]
    return mark == "." and bool(_SHORTENED.search(before))


def _sentence(text: str, low: int, first: int, last: int) -> Sentence:
    """A sentence of the paragraph that begins at `low`."""
    piece = text[first:last]
    first += len(piece) - len(piece.lstrip())
    last -= len(piece) - len(piece.rstrip())
    before = text[low : first + 1]
    marks = before.count('"') % 2 or before.count("“") > before.count("”")
    spoken = bool(marks) or before.count("«") > before.count("»") or before[-1:] in "'‘"
    return Sentence(first, last, " ".join(text[first:last].split()), spoken)
