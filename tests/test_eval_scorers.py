"""The published scorers, on strings whose score is known."""

from __future__ import annotations

import pytest

from infllm_cli.evaluate import scorers


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("71432.", "71432", 1),
        (" is 71432, and not 99999", "71432", 1),
        ("99999, or 71432", "71432", 0),
        ("714 32", "71432", 0),
        ("071432", "71432", 0),
        ("nothing", "71432", 0),
        ("", "71432", 0),
    ],
)
def test_the_first_run_of_digits_counts(text: str, answer: str, score: float) -> None:
    assert scorers.first_integer(text, [answer]) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The <REGISTER_CONTENT> in line torpid-kid is <24169>.", 1),
        ("line 3: 24169", 1),
        ("24169 stands in line 7", 0),
        ("none", 0),
    ],
)
def test_the_last_run_of_digits_counts(text: str, score: float) -> None:
    assert scorers.last_integer(text, ["24169"]) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('"a54e-11"', 1),
        ("The value is: a54e-11.", 1),
        ("{'k': 'a54e-11'}", 1),
        ("xa54e-11", 0),
        ("a54e-1", 0),
        ("A54E-11", 0),
    ],
)
def test_a_value_is_a_whole_word(text: str, score: float) -> None:
    assert scorers.whole_word(text, ["a54e-11"]) == score


@pytest.mark.parametrize(
    ("text", "answers", "score"),
    [
        ("1234567", ["1234567"], 1),
        ("Apple, PEAR", ["apple", "pear", "plum", "fig"], 0.5),
        ("", ["x"], 0),
    ],
)
def test_a_share_of_strings_counts_in_any_case(text: str, answers: list, score: float) -> None:
    assert scorers.share_of_strings(text, answers) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [("A", 1), (" A.", 1), ("Segment A", 1), ("B, not A", 0), ("About A", 1), ("", 0), ("a", 0)],
)
def test_the_first_label_that_stands_alone_counts(text: str, score: float) -> None:
    assert scorers.first_label(text, ["A"]) == score
