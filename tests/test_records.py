"""Records of logs and numbered lists stand for themselves, and prose holds none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infllm_cli.quotable import cut_quotable, stands_alone, widen
from infllm_cli.quoting import _within_record
from infllm_cli.records import record_starts
from infllm_cli.sentences import as_text, split_sentences

LOG = """2026-11-30 08:00:01 INFO start pid 4711
2026-11-30 08:31:55 ERROR payment 5523 failed: card expired
2026-11-30 08:31:56 ERROR in the ledger
    Traceback (most recent call last):
    File "pay.py", line 12
2026-11-30 08:52:12 INFO user tom logged out
"""
SYSTEM = "Nov 30 08:00:01 host sshd[71]: opened\nNov 30 08:00:02 host sshd[71]: closed\n"
NUMBERED = "1. Milk for the cat\n2. Eggs\n3. A loaf of rye bread. Not the white one.\n"
TABLE = "4711,Marl,lamp maker\n4712,Strake,pilot\n"
STAMPED = "[08:01] karin: where is the lamp\n[08:02] tom: in the tower\n"
ITEMS = "(1) What is power?\n\n(2) What force moves nations?\n"


def lines_of(text: str) -> list[str]:
    return [text[at:].split("\n", 1)[0] for at in record_starts(text, 0, len(text))]


@pytest.mark.parametrize("text", [SYSTEM, NUMBERED, TABLE, STAMPED, ITEMS])
def test_lines_that_begin_with_numbers_alike_are_records(text: str) -> None:
    assert lines_of(text) == [line for line in text.split("\n") if line]


def test_what_is_indented_belongs_to_the_record_above() -> None:
    assert lines_of(LOG) == [line for line in LOG.split("\n") if line.startswith("2026")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4711",
        "It was sold in\n1858 to a smith, and\nonce more in 1861.",
        "1858 was a wet year.\nThe mill stood still.\n1859 was dry.",  # not neighbours
        "in 1858 they came, and\nin 1861 they left,\nin 1902 nobody knew of it.",
        "- one\n- two\n- three",
        "for i in range(3):\n    x1 = f(1)\n    x2 = f(2)\n    x3 = f(3)\n",
    ],
)
def test_prose_lists_and_code_hold_none(text: str) -> None:
    assert lines_of(text) == []


def test_the_sample_story_holds_none() -> None:
    text = (Path(__file__).parents[1] / "samples" / "story.txt").read_text(encoding="utf-8")
    assert lines_of(text) == []


def test_a_record_is_known_wherever_looking_begins() -> None:
    starts = record_starts(LOG, 0, len(LOG))
    for at in starts:
        assert record_starts(LOG, at, at + 5) == [at]
        assert record_starts(LOG, at, len(LOG)) == [other for other in starts if other >= at]


def test_records_are_quoted_alone() -> None:
    start = LOG.index("2026-11-30 08:31:55")
    end = LOG.index("\n", start)
    assert (start, end) in [(a, b) for a, b in cut_quotable(LOG, 0, len(LOG))]
    assert stands_alone(LOG, start, end) and widen(LOG, start, end) == (start, end)
    trace = LOG.index("    Traceback")
    assert not stands_alone(LOG, trace, trace + 20)


def test_short_ones_are_not_joined_and_their_number_ends_no_sentence() -> None:
    pieces = [NUMBERED[a:b] for a, b in cut_quotable(NUMBERED, 0, len(NUMBERED))]
    assert pieces[:2] == ["1. Milk for the cat", "2. Eggs"]
    assert [s.text for s in split_sentences(NUMBERED)][2:] == [
        "3. A loaf of rye bread.",
        "Not the white one.",
    ]


def test_what_stands_around_a_sentence_is_of_its_record() -> None:
    text = "The list was short.\n1. Ask Bert. He has a van.\n2. Book the lift.\n3. Go.\n"
    spans = [(s.start, s.end) for s in split_sentences(text)]
    assert [text[a:b] for a, b in spans][1:3] == ["1. Ask Bert.", "He has a van."]
    whole, first, second, third = (spans[i] for i in (0, 1, 2, 3))
    assert _within_record(text, first[0], [whole], [second, third]) == ([], [second])
    assert _within_record(text, second[0], [first, whole], [third]) == ([first], [])
    assert _within_record(text, whole[0], [], [first, second]) == ([], [])
    prose = "One came. Two went. Three stayed."
    spans = [(s.start, s.end) for s in split_sentences(prose)]
    assert _within_record(prose, 10, spans[:1], spans[2:]) == (spans[:1], spans[2:])


def test_a_summary_has_them_on_lines_of_their_own() -> None:
    text = f"The list was short. It said:\n\n{NUMBERED}\nNobody knew why. It was late."
    sentences = split_sentences(text)
    assert as_text(sentences) == (
        "The list was short. It said:\n1. Milk for the cat\n2. Eggs\n"
        "3. A loaf of rye bread. Not the white one. Nobody knew why. It was late."
    )
    # What stands between is left out: what follows the last record begins a line.
    assert as_text([*sentences[:4], sentences[-1]]).endswith("2. Eggs\nIt was late.")
    assert as_text([]) == "" and as_text(sentences[:2]) == "The list was short. It said:"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="a1A.: \n[", max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_starts_are_lines_within_the_range(text: str, start: int, length: int) -> None:
    start = min(start, len(text))
    end = min(start + length, len(text))
    for at in record_starts(text, start, end):
        assert start <= at < end
        assert at == 0 or text[at - 1] == "\n"
        assert not text[at].isspace()
