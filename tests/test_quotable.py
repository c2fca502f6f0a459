"""What can be quoted: where it ends, and that nothing between is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infllm_cli.quotable import (
    LEAST_CHARS,
    MOST_CHARS,
    MOST_CODE_CHARS,
    cut_quotable,
    is_prose,
    widen,
)


def pieces(text: str) -> list[str]:
    return [text[a:b].strip() for a, b in cut_quotable(text, 0, len(text))]


LONG = "The lamp had been made by the old smith of Tarnbridge"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{LONG}. {LONG} again.", [f"{LONG}.", f"{LONG} again."]),
        (f'"{LONG}!" {LONG}?', [f'"{LONG}!"', f"{LONG}?"]),
        # Lines are wrapped in prose, and a blank line ends a heading.
        (
            f"CHAPTER IV\n\n{LONG}\nin 1858. {LONG}.",
            ["CHAPTER IV", f"{LONG}\nin 1858.", f"{LONG}."],
        ),
        # A title or an initial ends no sentence.
        (f"{LONG} for Mr. Strake and J. Lill of St. Anne.", None),
        # A short one goes with what follows.
        (f"Yes. {LONG}.", None),
        # Lines of code and lists stand for themselves.
        (
            "def lamp_maker_of_the_story(town, year, smith):\n"
            "    return 'Gideon Marl of ' + str(town).upper()",
            [
                "def lamp_maker_of_the_story(town, year, smith):",
                "return 'Gideon Marl of ' + str(town).upper()",
            ],
        ),
        (f"{LONG}:\n- {LONG}\n- {LONG}", [f"{LONG}:", f"- {LONG}", f"- {LONG}"]),
        ("", []),
        (" \n\n ", []),
    ],
)
def test_where_sentences_end(text: str, expected: list[str] | None) -> None:
    assert pieces(text) == ([text] if expected is None else expected)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab. !?\n\"'-(M r", max_size=400), st.integers(0, 50))
def test_sentences_hold_every_word_once_and_in_order(text: str, start: int) -> None:
    spans = cut_quotable(text, min(start, len(text)), len(text))
    assert all(a < b for a, b in spans)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    together = "".join(text[a:b] for a, b in spans)
    assert "".join(together.split()) == "".join(text[min(start, len(text)) :].split())


def test_text_without_an_end_is_cut_all_the_same() -> None:
    for text in ("x" * 5000, "word " * 1000):
        spans = cut_quotable(text, 0, len(text))
        assert all(b - a <= MOST_CHARS for a, b in spans)
        assert all(b - a > LEAST_CHARS for a, b in spans[:-1])
        assert "".join(text[a:b] for a, b in spans) == text.strip()


CODE = """import os

def run(arguments):
    try:
        return main(arguments)
    except KeyboardInterrupt as error:
        raise Exit(130) from error
    finally:
        close()
        tidy()

def other():
    pass
"""


def widened(text: str, piece: str) -> str:
    start = text.index(piece)
    low, high = widen(text, start, start + len(piece))
    return text[low:high]


def test_a_line_of_code_is_shown_with_those_around_it() -> None:
    lines = CODE.split("\n")
    assert widened(CODE, "except KeyboardInterrupt as error:") == "\n".join(lines[3:9])
    # Never over a blank line, nor past the ends.
    assert widened(CODE, "import os") == "import os"
    assert widened(CODE, "def other():") == "def other():\n    pass"
    assert widened("value", "value") == "value"


def test_a_sentence_stays_alone() -> None:
    text = f"{LONG}.\n{LONG} again!\n{LONG}?"
    assert widened(text, f"{LONG} again!") == f"{LONG} again!"
    assert is_prose(f'"{LONG}."') and is_prose("はい。") and not is_prose("x = f(1)")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab =.\n ", max_size=900), st.integers(0, 900), st.integers(1, 600))
def test_what_is_widened_holds_the_piece(text: str, start: int, length: int) -> None:
    start = min(start, len(text))
    end = min(start + length, len(text))
    low, high = widen(text, start, end)
    assert 0 <= low <= start <= end <= high <= len(text)
    assert high - low <= max(MOST_CODE_CHARS, end - start)
