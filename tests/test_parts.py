"""Headings, parts and pieces: what a document is divided into, and that nothing is left out."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from tiny_tokenizers import backend_of

from infllm_cli.document import decode_document
from infllm_cli.files import join
from infllm_cli.headings import find_headings
from infllm_cli.parts import divide
from infllm_cli.passages import cut_passages
from infllm_cli.tokens import PlainTokenizer

SAMPLES = Path(__file__).parents[1] / "samples"
BODY = "Some words stand here, and some more of them follow. " * 6


def document(text, name="a.txt"):
    return decode_document(text.encode(), name)


def parts_of(doc, most=64):
    tokens = PlainTokenizer(backend_of("byte_level")).encode(doc.text)
    cuts = [part.heading for part in doc.parts]
    parts = divide(doc, tokens, cut_passages(doc.text, tokens, cuts), most)
    pieces = [piece for part in parts for piece in part.pieces]
    assert [piece.index for piece in pieces] == list(range(len(pieces)))
    assert [part.index for part in parts] == list(range(len(parts)))
    assert all(piece.part == part.index for part in parts for piece in part.pieces)
    assert pieces[0].first == 0 and pieces[-1].last == len(tokens)
    assert all(a.last == b.first for a, b in itertools.pairwise(pieces))
    assert all(piece.last - piece.first <= most for piece in pieces)
    return parts


def titles(text):
    return [heading.title for heading in find_headings(document(text))]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("==> src/a.py <==\n", "==> README <==\n"),
        ("---\nsrc/a.py\n---\n", "---\nREADME\n---\n"),
        ("================\nFILE: src/a.py\n================\n", "====\nFile: README\n====\n"),
        ("==== src/a.py ====\n", "===== README =====\n"),
        ("--- File: src/a.py ---\n", "--- File: README ---\n"),
        ("###src/a.py###\n", "### README ###\n"),
        ("## File: src/a.py\n", "## File: README\n"),
        ('<file path="src/a.py">\n', '<file path="README">\n'),
    ],
)
def test_dumps_of_a_repository_are_told_by_their_usual_marks(one, two):
    found = find_headings(document(f"{one}{BODY}\n{two}{BODY}\n"))
    assert [heading.title for heading in found] == ["src/a.py", "README"]
    assert all(heading.is_file for heading in found)


def test_rules_of_a_diff_and_of_a_banner_name_no_file():
    diff = f"--- a/src/a.py\n+++ b/src/a.py\n{BODY}\n--- a/README.md\n+++ b/README.md\n{BODY}\n"
    banner = f"==== Results ====\n{BODY}\n==== Next steps ====\n{BODY}\n"
    assert titles(diff) == titles(banner) == []


def test_chapters_have_their_name_from_the_next_line():
    text = (
        f"CHAPTER I\nThe Loomings\n\n{BODY}\n\nCHAPTER II. THE BED\n\n{BODY}\n\nEpilogue\n\n{BODY}"
    )
    assert titles(text) == ["CHAPTER I The Loomings", "CHAPTER II. THE BED", "Epilogue"]


def test_a_sentence_that_begins_like_a_heading_is_none():
    text = f"Part of it was\nlost at sea.\n\n{BODY}\n\nChapter and verse\nwere quoted {BODY}"
    assert titles(text) == []


def test_markdown_is_divided_at_its_highest_level_that_comes_twice():
    text = f"# Title\n\n{BODY}\n\n## One\n\n{BODY}\n\n```\n## no heading\n```\n\n## Two\n\n{BODY}\n"
    assert titles(text) == ["Title", "One", "Two"]


def test_underlined_headings_count_too():
    assert titles(f"One\n===\n\n{BODY}\n\nTwo\n---\n\n{BODY}") == ["One", "Two"]


def test_the_parts_of_several_files_are_the_files_however_small():
    parts = parts_of(join([document("x\n", "x.md"), document(f"# A\n\n{BODY}\n\n# B\n", "y.md")]))
    assert [(part.title, part.is_file) for part in parts] == [("x.md", True), ("y.md", True)]
    assert [part.lines for part in parts] == [(1, 1), (1, 5)]


def test_a_table_of_contents_makes_no_parts():
    contents = "CHAPTER 1. A\n\nCHAPTER 2. B\n\n"
    text = f"{contents}CHAPTER 1. A\n\n{BODY}\n\nCHAPTER 2. B\n\n{BODY}\n"
    parts = parts_of(document(text), most=128)
    assert [part.title for part in parts] == ["CHAPTER 1. A", "CHAPTER 2. B"]
    assert parts[0].lines == (7, 7)


def test_without_headings_the_document_is_divided_evenly():
    parts = parts_of(document("\n\n".join([BODY] * 12)), most=200)
    assert all(part.title is None for part in parts)
    sizes = np.array([piece.last - piece.first for part in parts for piece in part.pieces])
    assert len(sizes) > 3 and sizes.min() > 0.5 * sizes.max()


@pytest.mark.parametrize("most", [16, 17, 50, 5000])
@pytest.mark.parametrize("text", ["a", "word " * 400, f"# A\n\n{BODY}\n\n# B\n\n{BODY * 9}"])
def test_pieces_tile_whatever_the_size(text, most):
    parts_of(document(text), most)


def test_the_samples_are_divided_as_a_reader_would():
    story = parts_of(document((SAMPLES / "story.txt").read_text()), most=4096)
    assert len(story) == 10 and story[0].title == "CHAPTER I. THE LETTER FROM SALTRICK"
    repo = parts_of(document((SAMPLES / "repo.txt").read_text()), most=4096)
    assert len(repo) == 13 and all(part.is_file for part in repo)
    assert repo[0].title == "README.md" and repo[-1].title == "tests/test_tides.py"
