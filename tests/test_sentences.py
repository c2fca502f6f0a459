"""Sentences: where they end, where they do not, and what stands between quotation marks."""

from __future__ import annotations

import pytest

from infllm_cli.sentences import split_sentences


def texts(text):
    return [sentence.text for sentence in split_sentences(text)]


def test_a_sentence_may_go_over_lines_but_not_over_a_blank_line():
    assert texts("One goes\non here. Two\n\nstops") == ["One goes on here.", "Two", "stops"]


@pytest.mark.parametrize(
    "text",
    [
        "Mr. Crane and Dr. Lill left.",
        "Mr.\nCrane left.",
        "It cost 3.50 pounds.",
        "J. R. Hartley wrote it.",
        "Why? asked the boy.",
        '"Stop!" she cried.',
        "See e.g. the third part.",
    ],
)
def test_what_ends_no_sentence(text):
    assert len(texts(text)) == 1


def test_places_are_those_of_the_text():
    text = "  First one.  Second\none here.\n\nThird."
    for sentence in split_sentences(text):
        assert " ".join(text[sentence.start : sentence.end].split()) == sentence.text
    inner = split_sentences(text, 14, 27)
    assert [s.text for s in inner] == ["Second one he"]
    assert text[inner[0].start :].startswith("Second")


def test_speech_is_told_from_telling_and_its_marks_come_in_pairs():
    text = '"Come in. It is late," said Ann. She shut the door. "Sit down. Be quiet."'
    found = split_sentences(text)
    assert [s.spoken for s in found] == [True, True, False, True, True]
    assert [s.whole for s in found][:3] == [
        '"Come in."',
        '"It is late," said Ann.',
        "She shut the door.",
    ]
    curly = split_sentences("“Come in. It is late,” said Ann.")
    assert [s.whole for s in curly] == ["“Come in.”", "“It is late,” said Ann."]


def test_other_scripts_have_other_stops():
    assert texts("これは本です。面白い！終わり") == ["これは本です。", "面白い！", "終わり"]
