"""The sentences of a document that may stand in its summary."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Sequence
from dataclasses import replace

from infllm_cli.parts import Part, Piece
from infllm_cli.remarks import definitions, is_code, remarks
from infllm_cli.sentences import Sentence, split_sentences

_MOST_CHARS = 160
_MARKS = re.compile(r"^(?:[-*+>]|\d+[.)])\s+|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}")
_TABLE = re.compile(r"^\s*\|.*\|\s*$|^\s*[-=+|:*_~#\s]+$")
_INDENTED = re.compile(r"^(?: {4}|\t)")


def sentences_by_piece(text: str, parts: Sequence[Part]) -> list[list[Sentence]]:
    """The sentences of every piece, never none: where there is no prose, its first line stands.

    A sentence belongs to the piece in which it begins; it may reach into the next one.
    """
    found: list[list[Sentence]] = []
    for _, group in itertools.groupby(parts, key=lambda part: part.title or part.file or ""):
        pieces = [piece for part in group for piece in part.pieces]
        part = parts[pieces[0].part]
        file = part.title if part.is_file else part.file
        sentences = sentences_of(text, part.start, pieces[-1].end, file)
        starts = [sentence.start for sentence in sentences]
        for piece in pieces:
            low, high = (bisect.bisect_left(starts, at) for at in (piece.start, piece.end))
            found.append(sentences[low:high] or [_first_line(text, piece)])
    return found


def sentences_of(text: str, start: int, end: int, file: str | None) -> list[Sentence]:
    """Sentences of the characters [start, end).

    Args:
        file: the name of the file that they are of, if of one: code speaks in comments.
    """
    if is_code(file):
        found = remarks(text, start, end)
        named = definitions(text, start, end)
        if named is not None:
            bisect.insort(found, named, key=lambda sentence: sentence.start)
        return found
    prose = [s for s in split_sentences(text, start, end) if _is_prose(text, s)]
    return [plain for sentence in prose if (plain := _plain(sentence)).text]


def _is_prose(text: str, sentence: Sentence) -> bool:
    """No heading, table, listing or drawing."""
    lines = text[sentence.start : sentence.end].split("\n")
    begin = text.rfind("\n", 0, sentence.start) + 1
    if sentence.text.startswith(("#", "|", "```", "~~~")) or sentence.text.isupper():
        return False
    if any(_TABLE.match(line) for line in lines):
        return False
    # Indented text is a listing, unless it is written like a sentence.
    if _INDENTED.match(text[begin : sentence.start] or " "):
        return sentence.text[0].isupper() and sentence.text[-1] in ".!?"
    return any(letter.isalpha() for letter in sentence.text)


def _plain(sentence: Sentence) -> Sentence:
    """Without the marks of Markdown, which mean nothing in another place."""
    return replace(sentence, text=_MARKS.sub("", sentence.text).strip())


def _first_line(text: str, piece: Piece) -> Sentence:
    for match in re.finditer(r"[^\n]*\S[^\n]*", text[piece.start : piece.end]):
        line = " ".join(match[0].split())
        short = line if len(line) <= _MOST_CHARS else f"{line[: _MOST_CHARS - 1]}…"
        return Sentence(piece.start + match.start(), piece.start + match.end(), short)
    return Sentence(piece.start, piece.end, "")
