"""A conversation: what was said before stays, and the memory is as before when it is over."""

from __future__ import annotations

import pytest
from tiny_readers import SMALL, make_reader, memory_contents, read_text, same_contents

from infllm_cli.asking import Asking
from infllm_cli.conversation import converse
from infllm_cli.events import Answer, TokenOut
from infllm_cli.sampling import AnswerOptions
from infllm_cli.statements import only_tells

TEXT = "The goose is called Deacon, and the boat Patience. " * 12
OPTIONS = AnswerOptions(max_tokens=6)


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def ask(conversation, question):
    *_, answer = conversation.ask_steps(question, OPTIONS)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("whole", [True, False])
def test_the_memory_is_as_before_when_it_is_over(reader, whole):
    memory = read_text(reader, TEXT, whole=whole)
    before = memory_contents(memory)
    alone = reader.ask(memory, "Who?", OPTIONS).text
    with converse(reader, memory) as conversation:
        for number in range(6):
            ask(conversation, f"Question {number}: who is the goose?")
        assert len(conversation.turns) == 6
    assert same_contents(before, memory_contents(memory))
    assert reader.ask(memory, "Who?", OPTIONS).text == alone


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_turns_stand_in_the_memory_word_for_word(kind):
    reader = make_reader(kind=kind)
    memory = read_text(reader, TEXT)
    with converse(reader, memory) as conversation:
        start = memory.state.tokens
        first = ask(conversation, "What is it?")
        second = ask(conversation, "And where?")
        assert memory.state.tokens - start == conversation.tokens
        assert conversation.tokens == sum(turn.tokens for turn in conversation.turns)
        assert [turn.answer for turn in conversation.turns] == [first, second]
    prompt = reader.prompt
    said = len(prompt.plain_ids("And where?")) + len(prompt.plain_ids(second.text))
    assert conversation.turns[1].tokens > said + len(prompt.closing)


def test_what_was_said_changes_the_next_answer_and_a_new_conversation_has_forgotten_it(reader):
    memory = read_text(reader, TEXT)
    with converse(reader, memory) as conversation:
        first = ask(conversation, "What is it?")
        again = ask(conversation, "What is it?")
    with converse(reader, memory) as conversation:
        assert ask(conversation, "What is it?").text == first.text
    assert again.text != first.text


def test_a_long_conversation_goes_into_blocks(reader):
    memory = read_text(reader, TEXT)
    with converse(reader, memory) as conversation:
        blocks = memory.state.blocks
        for number in range(8):
            ask(conversation, f"Question {number}: what do you think of the goose and the boat?")
        assert memory.state.blocks > blocks
        assert 0 < conversation.tokens_in_window < conversation.tokens
        # A block waits in the window until it is full.
        assert conversation.tokens_in_window <= SMALL.window_tokens + SMALL.block_tokens


def test_an_answer_that_was_stopped_leaves_nothing_unless_it_is_remembered(reader):
    memory = read_text(reader, TEXT)
    with converse(reader, memory) as conversation:
        start = memory.state.tokens
        steps = conversation.ask_steps("What is it?", OPTIONS)
        while not isinstance(next(steps), TokenOut):
            pass
        steps.close()
        assert memory.state.tokens == start and not conversation.turns
        conversation.remember(Answer("What is it?", "a g", "interrupted", 0, 0.0, 0.0))
        assert memory.state.tokens > start
        ask(conversation, "And then?")


def test_a_transcript_tells_questions_answers_and_lines(reader):
    memory = read_text(reader, TEXT)
    with converse(reader, memory) as conversation:
        answer = ask(conversation, "What is it?")
        told = conversation.transcript()
    assert told.startswith("# text\n\n**What is it?**\n\n")
    assert answer.text in told and "(Evidence: line" in told


def test_what_the_user_told_answers_where_the_document_has_less_of_the_question(
    reader, monkeypatch
):
    memory = read_text(reader, TEXT)
    shown = []
    show = Asking._text_voice

    def watched(asking, text):
        shown.append(text)
        return show(asking, text)

    monkeypatch.setattr(Asking, "_text_voice", watched)
    with converse(reader, memory) as conversation:
        ask(conversation, "My dog is called Rufus.")
        ask(conversation, "What is the goose called?")
        assert conversation.told == ["My dog is called Rufus."]
        shown.clear()
        answer = ask(conversation, "How is my dog called?")
        assert shown == ["My dog is called Rufus."]
        assert answer.quote is None and not answer.reread and answer.supported is None
        # The later of two.
        ask(conversation, "My dog is called Rex now.")
        shown.clear()
        ask(conversation, "How is my dog called?")
        assert shown == ["My dog is called Rex now."]
        shown.clear()
        ask(conversation, "Whose boat is called Patience?")  # all of it stands in the document
        assert not any("Rex" in text for text in shown)
    shown.clear()
    ask_alone = list(reader.ask_steps(memory, "How is my dog called?", OPTIONS))
    assert ask_alone[-1].text and not any("Rex" in text for text in shown)


def test_what_only_tells_is_noted_and_no_model_is_asked(reader, monkeypatch):
    memory = read_text(reader, TEXT)
    monkeypatch.setattr(Asking, "steps", lambda asking: pytest.fail("it was asked"))
    with converse(reader, memory) as conversation:
        start = memory.state.tokens
        first, answer = conversation.ask_steps("I read this on a boat.", OPTIONS)
        assert first.text == answer.text == "Noted." and answer.finish == "noted"
        assert memory.state.tokens > start and conversation.told == ["I read this on a boat."]


@pytest.mark.parametrize(
    "line",
    [
        "My dog is called Rufus.",
        "my deadline is Friday",
        "I'm reading this on a boat.",
        "We have met the captain.",
        "Remember that the bridge is closed.",
        "By the way, the boat is mine.",
    ],
)
def test_what_only_tells(line):
    assert only_tells(line)


@pytest.mark.parametrize(
    "line",
    [
        "My dog is called Rufus, is it?",
        "I want to know who took the boat.",
        "I would like a list of all names",
        "My question is about the goose",
        "Tell me about the goose.",
        "name of the goose",
        "the goose is called",
        "Remember who took the boat",
        "Summarize the second chapter.",
        "Mystery of the goose",
        "If the boat is called Patience",
        "Meine Gans heißt Deacon.",
        "\u6211\u7684\u72d7\u53eb\u4ec0\u4e48\uff1f",
    ],
)
def test_what_may_ask_is_asked(line):
    assert not only_tells(line)
