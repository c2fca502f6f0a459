"""A question is not answered by saying it again."""

from __future__ import annotations

import pytest
import torch
from tiny_readers import chat_tokenizer

from infllm_cli.echo import FORBIDDEN, Echo

TOKENIZER = chat_tokenizer()


def first(text: str) -> int:
    return TOKENIZER.encode(text, add_special_tokens=False)[0]


def forbidden(question: str, text: str) -> set[int]:
    size = len(TOKENIZER)
    logits = torch.randn(size)
    before = logits.clone()
    left = Echo(TOKENIZER, question).forbid(logits, text)
    assert torch.equal(logits, before), "a voice's own logits stay"
    changed = set(torch.nonzero(left != before)[:, 0].tolist())
    assert all(left[i] == FORBIDDEN for i in changed)
    return changed


@pytest.mark.parametrize("text", ["", "\n", "It is:", 'The answer is: "', "so \u201c"])
def test_where_an_answer_begins_the_question_does_not(text):
    found = forbidden("Where did he go?", text)
    assert {first("Where"), first(" Where"), first("where"), first(" where")} <= found


@pytest.mark.parametrize("text", ["The place", "He asked,", "where"])
def test_anywhere_else_its_words_may_stand(text):
    assert not forbidden("Where did he go?", text)


def test_of_a_question_that_may_begin_as_its_answer_the_second_word_is_forbidden():
    assert not forbidden("In which town does he live?", "")
    assert {first(" which"), first("which")} <= forbidden("In which town does he live?", "In")
    assert forbidden("In which town?", 'It is: "in ') == forbidden("In which town?", "In")
    assert not forbidden("In which town does he live?", "He lives in")


@pytest.mark.parametrize("question", ["Why", "Name", "?", " Tell\n"])
def test_questions_of_a_word(question):
    for text in ("", "Name", "Tell", "?"):
        forbidden(question, text)
