"""A text to hide things in: the document that the user gives, or the sample story."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import infllm_cli
from infllm_cli.document import Document, load_document
from infllm_cli.errors import UsageError
from infllm_cli.evaluate.tasks.base import Fitting
from infllm_cli.sentences import split_sentences

SAMPLE = "story.txt"


def sample_path() -> Path:
    """The sample story: in a wheel inside the package, in a checkout beside it."""
    package = Path(infllm_cli.__file__).parent
    inside = package / "samples" / SAMPLE
    return inside if inside.is_file() else package.parent / "samples" / SAMPLE


class Haystack:
    """The beginning of a text, as long as a task wants it; one that is too short is repeated.

    Attributes:
        name: of the document.
        sha256: of its bytes.
    """

    def __init__(self, document: Document, *, one_line: bool = False) -> None:
        self.name = document.name
        self.sha256 = document.sha256
        text = document.text.strip()
        # RULER turns all white space into single spaces; the needle test keeps the text.
        self._text = re.sub(r"\s+", " ", text) if one_line else text
        self._between = " " if one_line else "\n\n"
        self._ends = [sentence.end for sentence in split_sentences(self._text)]

    @classmethod
    def load(cls, path: Path | None, *, one_line: bool = False) -> Haystack:
        """Of a file; by default the sample story.

        Raises:
            DocumentError: it cannot be read as text.
        """
        return cls(load_document(str(path or sample_path())), one_line=one_line)

    @property
    def facts(self) -> dict[str, str]:
        """What decides the text, for the record of results."""
        return {"haystack": Path(self.name).name, "haystack_sha256": self.sha256}

    def __len__(self) -> int:
        return len(self._text)

    def begin(self, chars: int) -> str:
        """The first characters; past the end the text begins again."""
        period = len(self._text) + len(self._between)
        times = -(-chars // period)
        return self._between.join([self._text] * times)[:chars].rstrip()

    def sentence_ends(self, chars: int) -> list[int]:
        """Characters of `begin(chars)` just behind a sentence, 0 and the end included."""
        period = len(self._text) + len(self._between)
        ends = [0]
        for start in range(0, chars, period):
            ends += [start + end for end in self._ends if start + end < chars]
        end = len(self.begin(chars))
        if ends[-1] < end:
            ends.append(end)
        return ends

    def most_chars(self, fitting: Fitting, room: int, what: str) -> int:
        """How many characters take at most `room` tokens.

        Raises:
            UsageError: there is room for none.
        """
        if room < 1:
            raise UsageError(f"--lengths: {what} leaves no room for the document.")
        chars = 8 * room  # more than a token has, on average
        while (cut := fitting.cut(self.begin(chars), room)) >= len(self.begin(chars)):
            chars *= 2
        while fitting.count(self.begin(cut)) > room:  # cut elsewhere, tokens can differ
            cut -= 1
        return cut


def insert(
    text: str, ends: Sequence[int], pieces: Sequence[tuple[float, str]], between: str
) -> tuple[str, list[tuple[int, int]]]:
    """Put pieces behind sentences of a text.

    Args:
        ends: characters behind sentences, see `Haystack.sentence_ends`.
        pieces: depth 0 to 1 of each, in rising order, and what is put there: behind the last
            sentence that ends at or before that share of the characters.
        between: what stands before and behind a piece.

    Returns:
        The text, and the characters [start, end) of each piece in it.
    """
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = size = 0
    for depth, piece in pieces:
        end = ends[bisect_right(ends, round(depth * len(text))) - 1]
        stretch = text[at:end]
        parts.append(stretch)
        size += len(stretch)
        at = end
        lead = between if size else ""
        parts += [lead, piece]
        spans.append((size + len(lead), size + len(lead) + len(piece)))
        size += len(lead) + len(piece)
        if at < len(text) and not text[at].isspace():
            parts.append(between)
            size += len(between)
    parts.append(text[at:])
    return "".join(parts), spans
