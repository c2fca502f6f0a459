"""What a library has put around a book: Project Gutenberg's header and licence.

They stand in every book that comes from there and are none of it: a summary would quote them, since
their words are rare in the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from infllm_cli.document import Document

_BEGINS = re.compile(
    r"^\*\*\* ?START OF TH(?:E|IS) PROJECT GUTENBERG EBOOK.*?\*\*\*[^\S\n]*$", re.M | re.S
)
_ENDS = re.compile(
    r"^(?:End of (?:the )?Project Gutenberg(?:'s|’s)? [^*]{0,400}?)?"
    r"\*\*\* ?END OF TH(?:E|IS) PROJECT GUTENBERG EBOOK",
    re.M,
)
HEADER_CHARS = 20_000  # in which the text begins, if there is a header


def around_the_text(document: Document) -> list[tuple[int, int]]:
    """First and last (excluded) characters of headers and licences, of each file, in order."""
    text = document.text
    files = [(part.start, part.end) for part in document.parts] or [(0, len(text))]
    spans = []
    for start, end in files:
        begins = _BEGINS.search(text, start, min(end, start + HEADER_CHARS))
        if begins:
            spans.append((start, begins.end()))
        ends = _ENDS.search(text, begins.end() if begins else start, end)
        if ends:
            spans.append((ends.start(), end))
    return spans


def within(spans: Sequence[tuple[int, int]], char: int) -> bool:
    """Whether a character lies in one of them."""
    return any(start <= char < end for start, end in spans)
