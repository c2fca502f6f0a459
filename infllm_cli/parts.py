"""A document divided into parts, each with a title where it has one, and parts into pieces.

A part is what a reader would call one: a file, a chapter, a section. A piece is as much of it as
one summary is made from. Together the pieces tile the document's tokens: nothing is left out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infllm_cli.document import Document
from infllm_cli.headings import find_headings
from infllm_cli.passages import Passages
from infllm_cli.tokens import Tokens

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

# A heading with less than this below it is a line of a table of contents, not a part.
LEAST_CHARS = 200
TARGET_TOKENS = 1536
MOST_TOKENS = 2048
RESERVE_TOKENS = 512  # kept free behind a piece, for what is asked and written about it


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [first, last) of the document, its characters [start, end), and whose part it is."""

    index: int
    part: int
    first: int
    last: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a document.

    Attributes:
        title: one line, or None where the document names no parts.
        lines: first and last, 1-based, both included, as the file counts them.
        file: which one, where the document was joined from several.
        start, end: characters, the heading left out where there is one.
        is_file: the title is a file's name.
    """

    index: int
    title: str | None
    is_file: bool
    file: str | None
    lines: tuple[int, int]
    start: int
    end: int
    pieces: tuple[Piece, ...]


def divide(
    document: Document, tokens: Tokens, passages: Passages, most_tokens: int = MOST_TOKENS
) -> list[Part]:
    """Divide a document at its headings, else evenly; no piece is longer than `most_tokens`.

    Pieces end where passages do, so at paragraphs and sentences where the text allows it.
    """
    total = len(tokens)
    starts = tokens.spans[:, 0]
    sections = _sections(document)
    parts: list[Part] = []
    pieces: list[Piece] = []
    for number, (start, body, end, title, is_file) in enumerate(sections):
        first = int(starts.searchsorted(start)) if number else 0
        last = int(starts.searchsorted(end)) if number + 1 < len(sections) else total
        if last <= first:
            continue
        own = []
        for low, high in _cut(first, last, passages.borders, most_tokens):
            stop = int(starts[high]) if high < total else len(document.text)
            own.append(Piece(len(pieces), len(parts), low, high, int(starts[low]), stop))
            pieces.append(own[-1])
        for group in [own] if title is not None else [[piece] for piece in own]:
            begin = body if title is not None else group[0].start
            finish = group[-1].end
            text = document.text[begin:finish]
            begin += len(text) - len(text.lstrip())
            finish -= len(text) - len(text.rstrip()) if text.strip() else 0
            file, lines = document.place(min(begin, finish - 1), max(finish, begin + 1))
            numbered = tuple(
                Piece(p.index, len(parts), p.first, p.last, p.start, p.end) for p in group
            )
            parts.append(
                Part(len(parts), title or None, is_file, file, lines, begin, finish, numbered)
            )
    held = [piece for part in parts for piece in part.pieces]
    assert held[0].first == 0 and held[-1].last == total
    assert all(a.last == b.first for a, b in itertools.pairwise(held)), "pieces tile"
    return parts


def parts_for(reader: Reader, memory: Memory, most_tokens: int = MOST_TOKENS) -> list[Part]:
    """The parts of a document, read or not yet, in pieces that the model takes as a whole."""
    trained = reader.loaded.trained_length
    room = trained - reserved(trained) - reader.config.sink_tokens - len(reader.prompt.prefix)
    most = max(16, min(most_tokens, room))
    return divide(memory.document, memory.tokens, memory.passages, most)


def reserved(trained_length: int) -> int:
    """Tokens that a piece leaves free."""
    return min(RESERVE_TOKENS, trained_length // 2)


def _sections(document: Document) -> list[tuple[int, int, int, str | None, bool]]:
    """Where each section starts, where its body does, where it ends, and its title."""
    total = len(document.text)
    headings = find_headings(document)
    if not headings:
        return [(0, 0, total, None, False)]
    ends = [h.start for h in headings[1:]] + [total]
    text = document.text
    kept = [
        heading
        for heading, end in zip(headings, ends, strict=True)
        # Of several files even the smallest one is a part.
        if heading.is_file or len(text[heading.body : end].strip()) >= LEAST_CHARS
    ]
    if not kept:
        return [(0, 0, total, None, False)]
    sections: list[tuple[int, int, int, str | None, bool]] = []
    before = text[: kept[0].start].strip()
    if kept[0].start > 0 and len(before) >= LEAST_CHARS:
        sections.append((0, 0, kept[0].start, "", False))
    for heading, end in zip(kept, [h.start for h in kept[1:]] + [total], strict=True):
        sections.append((heading.start, heading.body, end, heading.title, heading.is_file))
    if sections[0][0] > 0:  # a title page belongs to the first part
        sections[0] = (0, *sections[0][1:])
    return sections


def _cut(first: int, last: int, borders: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Spans of about equal size, at passage borders where one is near."""
    count = -(-(last - first) // max(1, min(TARGET_TOKENS, 3 * most // 4)))
    if last - first <= most:
        count = 1
    spans = []
    low = first
    for number in range(1, count + 1):
        high = last
        if number < count:
            ideal = first + (last - first) * number // count
            near = borders[(borders > low) & (borders < last)]
            if len(near):
                at = int(near[np.abs(near - ideal).argmin()])
                high = at if low < at <= low + most and last - at > 0 else ideal
            else:
                high = ideal
        while high - low > most:
            spans.append((low, low + most))
            low += most
        if high > low:
            spans.append((low, high))
            low = high
    return spans
