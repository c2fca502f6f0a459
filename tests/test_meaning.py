"""What is asked in other words than the text's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_encoders import Synonyms
from tiny_readers import make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.document import decode_document
from infllm_cli.encoder import SentenceEncoder
from infllm_cli.errors import ModelError, UsageError
from infllm_cli.events import Encoding, Quoted, Remark
from infllm_cli.meaning import Meanings
from infllm_cli.meaning_files import keep_meanings, recall_meanings
from infllm_cli.models.encoders import DEFAULT_ENCODER
from infllm_cli.recalling import Recalling, foreign_below
from infllm_cli.sampling import Answering, AnswerOptions

FACT = "Old Gideon Marl forged the tall lantern in his shed. "
TEXT = prose(2500) + "\n\n" + FACT + "\n\n" + prose(2500, seed=2)
# Not a word of it stands in the text.
QUESTION = "Whose smith built every beacon?"
OPTIONS = AnswerOptions(max_tokens=2, encoder="synonyms")


def knowing() -> Synonyms:
    return Synonyms("forged built", "lantern beacon", "Gideon smith", "ship boat", "sea water")


@pytest.fixture
def reader():
    reader = make_reader()
    reader._encoders["synonyms"] = knowing()
    return reader


def recall_of(reader, memory, options, question=QUESTION):
    """Events, scores of passages, and the sentence."""
    recalling = Recalling(reader, memory, question, options, is_small=True)
    steps, events = recalling.passages(), []
    while True:
        try:
            events.append(next(steps))
        except StopIteration as end:
            return events, end.value, recalling.sentence(end.value)


def test_a_question_for_a_number_is_not_asked_in_other_words(reader):
    text = prose(2500) + "\n\nReceipt 7d786d24 belongs to Gideon.\n\n" + prose(2500, seed=2)
    memory = read_text(reader, text)
    reader._encoders.clear()  # it is not even loaded
    question = "Whose smith built every beacon, numbered 7d786d24?"
    _, fused, sentence = recall_of(reader, memory, OPTIONS, question)
    assert "7d786d24" in text[slice(*sentence.chars)]
    first, last = memory.passages.borders[int(fused.argmax()) :][:2]
    spans = memory.tokens.spans
    assert spans[first, 0] <= text.index("7d786d24") < spans[last - 1, 1]


def test_vectors_rank_passages_by_their_nearest_sentence_and_their_mean(reader):
    memory = read_text(reader, TEXT)
    encoder = knowing()
    texts = [TEXT[slice(*s.chars)] for s in memory.sentences]
    meanings = Meanings(memory.sentences, encoder.encode(texts).astype(np.float16), "x")
    asked = encoder.encode([QUESTION])[0]
    near = meanings.near(asked)
    scores = meanings.of_passages(asked, near, len(memory.passages))
    assert scores.shape == (len(memory.passages),)
    # The same by a loop.
    vectors = meanings.vectors.astype(np.float32)
    nearest, mean = [], []
    for index in range(len(memory.passages)):
        held = [i for i, s in enumerate(memory.sentences) if s.passage == index]
        nearest.append(max((float(near[i]) for i in held), default=-1.0))
        total = vectors[held].sum(axis=0)
        mean.append(float(total @ asked) / max(float(np.linalg.norm(total)), 1e-9))
    nearest, mean = np.array(nearest), np.array(mean)
    wanted = (nearest - nearest.mean()) / nearest.std() + (mean - mean.mean()) / mean.std()
    assert np.allclose(scores, wanted, atol=2e-3)
    best = memory.sentences[int(near.argmax())]
    assert "Gideon Marl" in TEXT[slice(*best.chars)]


@pytest.mark.parametrize("whole", [False, True])
def test_a_question_in_other_words_finds_and_quotes_its_sentence(reader, whole):
    memory = read_text(reader, TEXT, whole=whole)
    assert not memory.words.scores(QUESTION).any()
    events, fused, sentence = recall_of(reader, memory, OPTIONS)
    assert events and all(isinstance(event, Encoding) for event in events)
    assert "Gideon Marl" in TEXT[slice(*sentence.chars)]
    assert sentence.passage == int(fused.argmax())
    # With no encoder it is not found.
    _, _, other = recall_of(reader, memory, replace(OPTIONS, encoder="off", candidates=0))
    assert other is None
    answers = list(reader.ask_steps(memory, QUESTION, OPTIONS))
    quote = next(event for event in answers if isinstance(event, Quoted))
    assert "Gideon Marl" in quote.passage.text
    if not whole:
        assert any("Gideon Marl" in passage.text for passage in answers[-1].reread)


def test_a_document_is_encoded_once_and_only_when_words_leave_it_open(reader):
    memory = read_text(reader, TEXT)
    encoder = reader._encoders["synonyms"]
    events, fused, _ = recall_of(reader, memory, OPTIONS, "Who was Gideon Marl?")
    assert not events and encoder.encoded == 0 and memory.meanings is None
    assert "Gideon" in passage_text(memory, int(fused.argmax()))
    recall_of(reader, memory, OPTIONS)
    once = encoder.encoded
    assert once == len(memory.sentences) + 1
    assert recall_of(reader, memory, OPTIONS)[0] == []
    assert encoder.encoded == once + 1


def passage_text(memory, index):
    first, last = memory.passages.borders[index : index + 2]
    return TEXT[memory.tokens.spans[first, 0] : memory.tokens.spans[last - 1, 1]]


def test_the_best_passage_by_words_goes_first_all_the_same(reader):
    memory = read_text(reader, TEXT)
    question = "Whose smith built every beacon, it seems, somewhere near Nantucket perhaps?"
    words = memory.words.scores(question)
    assert words.any()
    events, fused, _ = recall_of(reader, memory, OPTIONS, question)
    assert events  # words were not sure
    order = np.argsort(-fused, kind="stable")
    assert order[0] == words.argmax()
    assert "Gideon" in "".join(passage_text(memory, int(index)) for index in order[:2])


def test_behind_each_passage_by_words_come_two_by_meaning(reader):
    memory = read_text(reader, TEXT)
    question = "Whose smith built every beacon, it seems, somewhere near Nantucket perhaps?"
    words = memory.words.scores(question)
    _, fused, _ = recall_of(reader, memory, OPTIONS, question)
    asked = reader._encoders["synonyms"].encode([question])[0]
    near = memory.meanings.near(asked)
    by_meaning = np.argsort(-memory.meanings.of_passages(asked, near, len(words)), kind="stable")
    by_words = [i for i in np.argsort(-words, kind="stable") if words[i]]
    wanted = []
    for turn in range(len(words)):
        wanted += [*by_words[turn : turn + 1], *by_meaning[2 * turn : 2 * turn + 2]]
    wanted = list(dict.fromkeys(int(index) for index in wanted))
    assert len(by_words) > 1 and np.argsort(-fused, kind="stable").tolist() == wanted


@pytest.mark.parametrize("answering", [Answering.MEMORY, Answering.PASSAGES])
def test_the_other_ways_of_answering_stay_what_they_are(reader, answering):
    memory = read_text(reader, TEXT)
    recall_of(reader, memory, replace(OPTIONS, answering=answering))
    assert reader._encoders["synonyms"].encoded == 0


@pytest.mark.parametrize("whole", [False, True])
def test_a_question_about_something_else_is_marked_and_nothing_is_quoted(reader, whole):
    memory = read_text(reader, TEXT, whole=whole)
    # What it asks for is no concept that the encoder finds in any sentence.
    reader._encoders["synonyms"] = Synonyms("forged built", "battery", "lasts")
    events = list(reader.ask_steps(memory, "Battery lasts?", OPTIONS))
    assert events[-1].supported is False and events[-1].quote is None
    assert not any(isinstance(event, Quoted) for event in events)
    reader._encoders["synonyms"] = knowing()
    memory.meanings = None
    assert reader.ask(memory, QUESTION, OPTIONS).supported is None  # never claimed to be true
    assert reader.ask(memory, "Who was Gideon Marl?", OPTIONS).supported is None


def test_a_text_without_a_sentence_is_asked_by_words(reader):
    memory = read_text(reader, "\u200b \u200b")
    assert reader.ask(memory, QUESTION, OPTIONS).finish


# --- kept beside the memory ----------------------------------------------------------------------


def test_vectors_come_back_from_the_memorys_folder(reader, tmp_path):
    memory = read_text(reader, TEXT)
    _, fused, sentence = recall_of(reader, memory, OPTIONS)
    keep_meanings(tmp_path, memory.meanings)
    keep_meanings(tmp_path, memory.meanings)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]
    encoder = reader._encoders["synonyms"] = knowing()
    fresh = read_text(reader, TEXT)
    fresh.folder = tmp_path
    events, again, same = recall_of(reader, fresh, OPTIONS)
    assert not events and encoder.encoded == 1
    assert np.array_equal(fused, again) and sentence == same


@pytest.mark.parametrize("broken", ["empty", "garbage", "other text", "other encoder"])
def test_what_does_not_fit_is_encoded_again(reader, tmp_path, broken):
    memory = read_text(reader, TEXT)
    recall_of(reader, memory, OPTIONS)
    keep_meanings(tmp_path, memory.meanings)
    (path,) = tmp_path.iterdir()
    identity, sentences = "synonyms", memory.sentences
    if broken == "other text":
        sentences = sentences[:-1]
    elif broken == "other encoder":
        identity = "another"
    else:
        path.write_bytes(b"" if broken == "empty" else b"nothing" * 99)
    assert recall_meanings(tmp_path, identity, sentences, Synonyms.width) is None
    assert recall_meanings(None, "synonyms", memory.sentences, Synonyms.width) is None


# --- when there is none --------------------------------------------------------------------------


def test_where_the_usual_encoder_cannot_be_had_it_is_said_once(monkeypatch):
    from infllm_cli.models import encoders

    def unreachable(name, cache_dir, report):
        raise ModelError("cannot download it")

    monkeypatch.setattr(encoders, "resolve_encoder", unreachable)
    reader = make_reader()
    memory = read_text(reader, TEXT)
    options = replace(OPTIONS, encoder=DEFAULT_ENCODER, candidates=0)
    for wanted in (1, 0):
        events = list(reader.ask_steps(memory, QUESTION, options))
        remarks = [event.text for event in events if isinstance(event, Remark)]
        assert len(remarks) == wanted and all("cannot download" in text for text in remarks)
        assert events[-1].text
    with pytest.raises(ModelError):  # one that was asked for by name is no matter of luck
        list(reader.ask_steps(memory, QUESTION, replace(options, encoder="org/encoder")))


def test_a_wrong_name_is_refused_before_anything_is_read(server, tmp_path):
    (tmp_path / "book.txt").write_text(TEXT)
    done = server.run(["ask", tmp_path / "book.txt", QUESTION, "--encoder", "nothing"])
    assert done.returncode == UsageError.exit_code
    assert b"--encoder 'nothing'" in done.stderr and b"reading" not in done.stderr


@pytest.mark.model
def test_the_usual_encoder_finds_other_words_in_the_sample_story_and_knows_what_is_foreign():
    import json
    from pathlib import Path

    from infllm_cli.models import catalog, encoders

    samples = Path(__file__).parents[1] / "samples"
    asked = json.loads((samples / "questions.json").read_text("utf-8"))
    story = [q for q in asked if q["document"] == "story.txt"]
    reader = make_reader()
    folder = encoders.resolve_encoder(
        DEFAULT_ENCODER, catalog.default_cache_dir(), lambda stage, done, total: None
    )
    reader._encoders["real"] = SentenceEncoder(folder, torch.device("cpu"))
    text = (samples / "story.txt").read_text("utf-8")
    # Nothing goes through the model: passages and sentences are enough.
    memory = reader.open(decode_document(text.encode(), "story.txt"), allow_whole=False)
    found, marked = 0, dict.fromkeys(("plain", "paraphrase", "absent", "foreign"), 0)
    for question in story:
        recalling = Recalling(
            reader, memory, question["question"], replace(OPTIONS, encoder="real"), is_small=True
        )
        steps = recalling.passages()
        while True:
            try:
                next(steps)
            except StopIteration as end:
                fused = end.value
                break
        marked[question["kind"]] += recalling.foreign
        if question["kind"] == "paraphrase":
            at = text.index(question["passage"])
            best = np.argsort(-fused, kind="stable")[:4]
            spans = [memory.tokens.spans[memory.passages.borders[i : i + 2] - [0, 1]] for i in best]
            found += any(span[0, 0] <= at < span[1, 1] for span in spans)
    assert found >= 4, "by words it is one"
    assert marked["plain"] == 0 and marked["foreign"] >= 3


def test_the_shorter_a_document_the_farther_is_what_it_answers_by_chance():
    below = [foreign_below(count) for count in (1, 10, 100, 1000, 10_000)]
    assert below == sorted(below)
    assert below[0] == pytest.approx(0.13) and below[1] == pytest.approx(0.209, abs=0.001)
    assert below[-2] == pytest.approx(0.368, abs=0.001) and below[-1] == 0.37
