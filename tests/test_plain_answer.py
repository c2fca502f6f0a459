"""Where an answer ends that knows no end of its own."""

from __future__ import annotations

import pytest

from infllm_cli.plain_answer import PlainAnswer

CASES = [
    (" The goose.\n\nQuestion: Who?\nAnswer: He", " The goose.", True),
    (" The goose.\nQuestion: Who?", " The goose.", True),
    ("\n\n The goose.", "\n\n The goose.", False),  # what comes before it is no end
    (" A list:\n- one\n- two\n \nMore", " A list:\n- one\n- two", True),
    (" It says\nQuests are long.", " It says\nQuests are long.", False),
    (" One\nQuest", " One\nQuest", False),
    (" One \n", " One \n", False),
    (" In code:  \nif x:", " In code:  \nif x:", False),
    ("", "", False),
]


@pytest.mark.parametrize(("text", "wanted", "ended"), CASES)
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_the_answer_ends_at_an_empty_line_or_the_next_question(text, wanted, ended, size):
    answer, given = PlainAnswer(), []
    for start in range(0, len(text), size):
        given.append(answer.push(text[start : start + size]))
        assert wanted.startswith("".join(given)), "nothing is taken back"
    assert answer.ended == ended
    assert "".join(given) + answer.finish() == wanted
    if ended:
        assert answer.push("more") == ""


def test_most_is_given_out_at_once():
    answer = PlainAnswer()
    assert answer.push(" The goose is") == " The goose is"
    assert answer.push("\n") == "" and answer.push("grey") == "\ngrey"
