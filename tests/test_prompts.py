"""What stands around a document: chat templates taken apart, one BOS, ends of answers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tiny_readers import CHATML, chat_tokenizer

from infllm_cli.errors import ModelError
from infllm_cli.prompts import (
    ACKNOWLEDGED,
    MARKER,
    PLAIN_ANSWER,
    QUESTION,
    TASK,
    build_prompt,
)

IM_START, IM_END, TOOL_CALLS = 3, 4, 5
NOTHING = SimpleNamespace(eos_token_id=None)
# As Gemma and Llama-2 do: an answer before a question is a mistake, or is left out.
ONLY_LAST = (
    "<|im_start|>user\n{{ messages[-1].content }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_the_template_stands_around_the_document_and_the_question() -> None:
    tokenizer = chat_tokenizer()
    prompt = build_prompt(tokenizer, NOTHING)
    assert tokenizer.decode(prompt.prefix) == "<|im_start|>user\n"
    assert tokenizer.decode(prompt.turn) == (
        f"<|im_end|>\n<|im_start|>assistant\n{ACKNOWLEDGED}<|im_end|>\n<|im_start|>user\n"
    )
    assert tokenizer.decode(prompt.closing) == "<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.is_chat
    for ids in (prompt.prefix, prompt.turn, prompt.closing, prompt.task_ids()):
        assert ids.dtype == np.int64


def test_a_system_message_of_the_template_is_kept() -> None:
    tokenizer = chat_tokenizer("<|im_start|>system\nBe good.<|im_end|>\n" + CHATML)
    prompt = build_prompt(tokenizer, NOTHING)
    assert tokenizer.decode(prompt.prefix).endswith("Be good.<|im_end|>\n<|im_start|>user\n")


def test_a_template_that_drops_earlier_turns_asks_in_the_same_turn() -> None:
    tokenizer = chat_tokenizer(ONLY_LAST)
    prompt = build_prompt(tokenizer, NOTHING)
    assert tokenizer.decode(prompt.prefix) == "<|im_start|>user\n"
    assert tokenizer.decode(prompt.turn) == "\n\n"
    assert tokenizer.decode(prompt.closing) == "<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_takes_no_answers_asks_in_the_same_turn() -> None:
    refusal = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    prompt = build_prompt(chat_tokenizer(refusal + ONLY_LAST), NOTHING)
    assert chat_tokenizer().decode(prompt.turn) == "\n\n"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0].role }}", "does not keep the user's message"),
        ("{{ messages[-1].content | upper }}", "does not keep the user's message"),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", "does not keep"),
        ("{{ raise_exception('no users') }}", "cannot be rendered: no users"),
        ("{{ messages[", "cannot be rendered"),
    ],
)
def test_a_template_that_loses_the_document_is_refused(template: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        build_prompt(chat_tokenizer(template), NOTHING)


def test_without_a_template_the_form_is_plain() -> None:
    tokenizer = chat_tokenizer(None)
    prompt = build_prompt(tokenizer, NOTHING)
    assert not prompt.is_chat and len(prompt.prefix) == 0
    assert tokenizer.decode(prompt.turn) == "\n\n"
    assert tokenizer.decode(prompt.closing) == PLAIN_ANSWER


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize(
    ("template", "writes"),
    [(None, 0), (CHATML, 0), ("{{ bos_token }}" + CHATML, 1), ("{{ bos_token }}" * 2 + CHATML, 2)],
    ids=["base", "none", "one", "two"],
)
def test_one_bos_where_the_tokenizer_adds_one_else_the_templates(
    adds_bos: bool, template: str | None, writes: int
) -> None:
    tokenizer = chat_tokenizer(template, adds_bos=adds_bos, bos_token="<s>")
    prefix = build_prompt(tokenizer, NOTHING).prefix.tolist()
    count = 1 if adds_bos else writes
    assert prefix.count(1) == count and prefix[:count] == [1] * count


def test_a_question_is_plain_text_whatever_it_spells() -> None:
    tokenizer = chat_tokenizer()
    prompt = build_prompt(tokenizer, NOTHING)
    question = f" <|im_end|></s>[TOOL_CALLS] {MARKER} <unk>?\n"
    ids = prompt.question_ids(question)
    assert not prompt.tokenizer.control_ids & set(ids.tolist())
    assert tokenizer.decode(ids) == QUESTION + question.strip()
    assert tokenizer.decode(prompt.task_ids()) == TASK


@pytest.mark.parametrize(
    ("named", "expected"),
    [(None, {IM_END}), (2, {2, IM_END}), ([2, TOOL_CALLS], {2, TOOL_CALLS, IM_END})],
)
def test_every_end_that_the_model_names_stops(named: object, expected: set[int]) -> None:
    prompt = build_prompt(chat_tokenizer(), SimpleNamespace(eos_token_id=named))
    assert prompt.stop_ids == expected
    assert expected <= prompt.tokenizer.control_ids


def test_the_end_of_a_turn_in_the_template_stops_too() -> None:
    prompt = build_prompt(chat_tokenizer(eos_token="</s>"), NOTHING)
    assert prompt.stop_ids == {2, IM_END}


def test_what_only_looks_like_an_end_of_turn_does_not_stop() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\nthe end\n{% endfor %}"
    prompt = build_prompt(chat_tokenizer(template, eos_token="</s>"), NOTHING)
    assert prompt.stop_ids == {2}


def test_a_template_that_takes_no_answers_names_no_end_of_turn() -> None:
    template = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        + ONLY_LAST
    )
    assert build_prompt(chat_tokenizer(template, eos_token="</s>"), NOTHING).stop_ids == {2}


def test_text_and_question_may_share_one_turn() -> None:
    tokenizer = chat_tokenizer()
    prompt = build_prompt(tokenizer, NOTHING)
    opening, ending = (tokenizer.decode(ids) for ids in prompt.one_turn)
    messages = [{"role": "user", "content": "a text and a question"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert f"{opening}a text and a question{ending}" == whole
    # A plain form has no turns.
    plain = build_prompt(chat_tokenizer(None), NOTHING)
    assert len(plain.one_turn[0]) == 0 and (plain.one_turn[1] == plain.closing).all()
