"""The sentence that is quoted: which, when none, and that it is the document's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_readers import make_reader, read_text

from infllm_cli.ask import quoted
from infllm_cli.events import Quoted
from infllm_cli.evidence import Passage
from infllm_cli.passages import cut_passages
from infllm_cli.quoting import MOST_CHARS, Sentence, best_sentence, sentences_of, surround
from infllm_cli.sampling import Answering, AnswerOptions, Quoting
from infllm_cli.words import WordIndex

STORY = (
    "The ferry was called Patience and was built by two brothers who had quarrelled.\n\n"
    "The lamp had been made by Gideon Marl of Tarnbridge in 1858. It was a plain lamp of tin. "
    "Nobody lit it on Sundays, whatever the weather on the river might be.\n\n"
    "The goose was called Deacon, for it walked like one, and bit like one, too.\n"
) + "There was nothing to be seen upon the water on that day but the grey of it. " * 60


@pytest.fixture(scope="module")
def parts():
    reader = make_reader()
    tokens = reader.prompt.tokenizer.encode(STORY)
    passages = cut_passages(STORY, tokens)
    return tokens, passages, WordIndex(STORY, tokens, passages)


def quote(parts, question: str) -> str | None:
    tokens, passages, words = parts
    sentences = sentences_of(STORY, tokens, passages, list(range(len(passages))))
    found = best_sentence(question, STORY, words, sentences, range(len(passages)))
    return None if found is None else STORY[slice(*found.chars)].strip()


def test_the_sentence_with_the_questions_words_is_quoted(parts) -> None:
    assert quote(parts, "Who made the lamp?").startswith("The lamp had been made by Gideon")
    assert quote(parts, "What was the goose called?").startswith("The goose was called Deacon")


@pytest.mark.parametrize(
    "question",
    [
        "Who is Starbuck?",  # no word of it is there
        "What was it?",  # words that are everywhere say nothing
        "?",
    ],
)
def test_nothing_is_quoted_where_the_words_are_missing(parts, question: str) -> None:
    assert quote(parts, question) is None


def test_sentences_around_are_quoted_too_as_far_as_they_fit(parts) -> None:
    tokens, passages, words = parts
    sentences = sentences_of(STORY, tokens, passages, list(range(len(passages))))

    def around(question: str) -> str:
        sentence = best_sentence(question, STORY, words, sentences, range(len(passages)))
        start, end = surround(question, STORY, words, sentences, sentence.chars)
        assert start <= sentence.chars[0] and sentence.chars[1] <= end
        return STORY[start:end].strip()

    # What stands behind goes first ...
    lamp = around("Who made the lamp that nobody lit on Sundays, a plain one?")
    assert lamp.startswith("The lamp had been made by Gideon") and "bit like one, too." in lamp
    # ... but where what stands before holds further words of the question.
    goose = around("Which goose was called Deacon, and which lamp did nobody light on Sundays?")
    assert "Nobody lit it on Sundays" in goose and "like one, too." in goose
    assert all(len(text) <= MOST_CHARS for text in (lamp, goose))
    # A sentence that has nearly all of the words stays alone.
    alone = around("Who made the lamp of Tarnbridge, Gideon Marl?")
    assert alone == "The lamp had been made by Gideon Marl of Tarnbridge in 1858."


def test_what_is_no_sentence_is_not_put_around_one(parts) -> None:
    *_, words = parts
    first = STORY.index("The lamp had")
    last = STORY.index("It was a plain")
    sentence = Sentence((first, last), (0, 1), 0)
    heading = Sentence((0, STORY.index("\n")), (0, 1), 0)
    assert surround("Who?", STORY, words, [], sentence.chars) == (first, last)
    table = replace(heading, chars=(0, 20))  # ends in the middle of a line
    assert surround("Who?", STORY, words, [table, sentence], sentence.chars) == (first, last)


def test_sentences_of_passages_hold_their_own_tokens(parts) -> None:
    tokens, passages, _ = parts
    chosen = [0, 1, len(passages) - 1]
    for sentence in sentences_of(STORY, tokens, passages, chosen):
        first, last = sentence.tokens
        held = STORY[tokens.spans[first, 0] : tokens.spans[last - 1, 1]]
        assert STORY[slice(*sentence.chars)].strip() in held
        assert sentence.passage in chosen


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("answering", list(Answering))
def test_a_quote_stands_in_the_document_and_comes_first(answering: Answering, whole: bool) -> None:
    reader = make_reader()
    text = STORY
    memory = read_text(reader, text, whole=whole)
    # A random model judges at random: words alone choose.
    options = AnswerOptions(max_tokens=3, answering=answering, quote=Quoting.ALWAYS, candidates=0)
    events = list(reader.ask_steps(memory, "Who made the lamp?", options))
    assert isinstance(events[0], Quoted)
    passage = events[0].passage
    assert events[-1].quote == passage and "Gideon Marl" in passage.text
    assert 0 < events[-1].quote_seconds < events[-1].first_token_seconds
    first, last = passage.lines
    assert passage.text in "\n".join(text.split("\n")[first - 1 : last])
    # What is re-read as text holds it.
    if answering is not Answering.MEMORY and not (whole and answering is Answering.BOTH):
        assert any("Gideon Marl" in reread.text for reread in events[-1].reread)
    silent = reader.ask(memory, "Who made the lamp?", replace(options, quote=Quoting.NEVER))
    assert silent.quote is None and silent.text  # it is no part of what the model says


@pytest.mark.parametrize("answering", list(Answering))
def test_small_models_quote_by_themselves_with_memory_and_passages(answering: Answering) -> None:
    reader = make_reader()
    memory = read_text(reader, STORY)
    options = AnswerOptions(max_tokens=2, answering=answering, candidates=0)
    answer = reader.ask(memory, "Who made the lamp?", options)
    assert (answer.quote is not None) == (answering is Answering.BOTH)
    reader.__dict__["parameters"] = 7_000_000_000
    assert reader.ask(memory, "Who made the lamp?", options).quote is None


def test_a_quote_of_code_keeps_its_lines() -> None:
    code = Passage((3, 4), "if ready:\n    raise Exit(\x1b130)", 0.0, "a.py")
    assert quoted(code) == "a.py, lines 3-4:\n    if ready:\n        raise Exit(␛130)"
    prose = Passage((7, 8), "He said\n  nothing.", 0.0)
    assert quoted(prose) == "\u201cHe said nothing.\u201d (lines 7-8)"


def test_no_quotation_reaches_over_a_heading() -> None:
    text = (
        "The cock on the tower was a salmon of gilded copper.\n\n"
        "CHAPTER VII. A LAMP TO BE MENDED\n\n"
        "It was on the Monday that the lamp went out. Nobody had seen it fail before that night.\n"
    )
    reader = make_reader()
    tokens = reader.prompt.tokenizer.encode(text)
    passages = cut_passages(text, tokens)
    words = WordIndex(text, tokens, passages)
    sentences = sentences_of(text, tokens, passages, list(range(len(passages))))
    for part in ("salmon", "Nobody"):
        at = text.index(part)
        chosen = next(s.chars for s in sentences if s.chars[0] <= at < s.chars[1])
        start, end = surround("Which fish is it?", text, words, sentences, chosen)
        assert "CHAPTER" not in text[start:end] or "CHAPTER" in text[slice(*chosen)]
        assert part in text[start:end]
