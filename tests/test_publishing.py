"""A library's header and licence are told from the book between them."""

from __future__ import annotations

import pytest

from infllm_cli.document import decode_document
from infllm_cli.publishing import around_the_text, within

HEADER = "Project Gutenberg's The Goose, by A. Quill\n\nThis eBook is for the use of anyone.\n\n"
START = "*** START OF THIS PROJECT GUTENBERG EBOOK THE GOOSE ***"
BOOK = "\n\n\nThe goose is called Deacon.\n\n*** a line of stars ***\n\nShe bites.\n\n\n"
END = "*** END OF THIS PROJECT GUTENBERG EBOOK THE GOOSE ***\n\nLicence.\n"


def outside(text: str) -> list[str]:
    document = decode_document(text.encode(), "goose.txt")
    return [document.text[slice(*span)] for span in around_the_text(document)]


@pytest.mark.parametrize("line", ["", "End of the Project Gutenberg EBook of The Goose\n\n"])
def test_header_and_licence_stand_outside(line):
    assert outside(HEADER + START + BOOK + line + END) == [HEADER + START, line + END]


def test_newer_markers_and_lines_that_end_otherwise():
    begins = "*** START OF THE PROJECT GUTENBERG EBOOK, THE GOOSE\r\nAND THE BOAT ***\r\n"
    ends = "*** END OF THE PROJECT GUTENBERG EBOOK 12 ***\r\nLicence.\r\n"
    first, last = outside(begins + BOOK + ends)
    assert "BOAT" in first and "goose" not in first and last.startswith("*** END OF THE")


@pytest.mark.parametrize("text", [BOOK, "They read *** START OF nothing ***\n" + BOOK])
def test_of_other_texts_nothing_stands_outside(text):
    assert outside(text) == []


def test_a_marker_far_inside_is_no_header():
    assert outside("x\n" * 15_000 + START + "\n") == []


def test_within_is_exclusive_at_the_end():
    assert within([(2, 4)], 3) and not within([(2, 4)], 4) and not within([], 0)
