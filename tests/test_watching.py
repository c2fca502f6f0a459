"""What a larger model is shown beside the memory, and that its evidence counts all it looks at."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_readers import make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli import model_size, prompts
from infllm_cli.asking import Asking
from infllm_cli.evidence import AttentionRecord
from infllm_cli.memory.step import Phase, Step
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import AnswerOptions
from infllm_cli.voices import Voice, parts
from infllm_cli.watching import Watching

TEXT = prose(4_000)
QUESTION = " ".join(TEXT[300:400].split()[1:-1])
SHORT = AnswerOptions(max_tokens=6)


@pytest.fixture(scope="module")
def reader() -> Reader:
    return make_reader()


@pytest.fixture(scope="module")
def memory(reader: Reader) -> Memory:
    return read_text(reader, TEXT)


def ask(
    reader: Reader, memory: Memory, monkeypatch: pytest.MonkeyPatch, parameters: int, **options
) -> tuple[list[Voice], list[float], object]:
    """The voices of a question, their weights at the first token, and the answer."""
    monkeypatch.setitem(reader.__dict__, "parameters", parameters)
    heard: list[Voice] = []
    weights: list[float] = []
    usual = Asking._answer

    def watched(asking: Asking, voices: list[Voice], *rest: object) -> object:
        heard.extend(voices)
        weights.extend(voice.weight for voice in voices)
        return usual(asking, voices, *rest)

    monkeypatch.setattr(Asking, "_answer", watched)
    answer = reader.ask(memory, QUESTION, AnswerOptions(max_tokens=6, **options))
    return heard, weights, answer


def test_a_larger_model_hears_passages_once_and_the_memory_less(
    reader: Reader, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    voices, weights, answer = ask(reader, memory, monkeypatch, 500_000_000)
    assert weights == [model_size.MEMORY_BESIDE_PASSAGES, 0.0]
    assert [len(voice.record._reread) for voice in voices] == [0, len(answer.reread)]
    assert parts(voices)[0] < 1 and sum(parts(voices)) == pytest.approx(1)


def test_the_smallest_hears_them_behind_the_document(
    reader: Reader, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    voices, weights, answer = ask(reader, memory, monkeypatch, 135_000_000)
    assert weights == [0.0, 0.0] and voices[1].record is None
    assert len(voices[0].record._reread) == len(answer.reread) > 0


def test_a_larger_model_reads_more_of_them_again_unless_told(
    reader: Reader, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(parameters: int, **options: int) -> int:
        answer = ask(reader, memory, monkeypatch, parameters, **options)[2]
        return sum(len(reader.prompt.plain_ids(passage.text)) for passage in answer.reread)

    small, large = tokens(135_000_000), tokens(500_000_000)
    assert 0 < small <= model_size.REREAD_TOKENS < large <= model_size.REREAD_BY_LARGER
    assert tokens(135_000_000, reread_tokens=900) == tokens(500_000_000, reread_tokens=900)
    assert tokens(500_000_000, reread_tokens=0) == 0


def step(masses: list[float]) -> Step:
    return Step(phase=Phase.ANSWER, start=0, length=len(masses), mass=torch.tensor(masses))


def test_each_record_counts_by_its_voice(reader: Reader, memory: Memory) -> None:
    """One voice looks at the document's first passage, the other at its third, read again."""

    def record(first: int | None) -> AttentionRecord:
        return AttentionRecord(memory.document, memory.tokens, memory.passages, first)

    borders = memory.passages.borders
    of_memory, of_text = record(0), record(None)
    third = int(borders[3] - borders[2])
    of_text.reread(5, int(borders[2]), third)
    of_text.calibrate(step([0.0] * (5 + third)))
    voices = [
        SimpleNamespace(record=of_memory, weight=float(np.log(0.25))),
        SimpleNamespace(record=of_text, weight=float(np.log(0.75))),
        SimpleNamespace(record=None, weight=5.0),  # not watched: no part of what is told
    ]
    watching = Watching(voices)
    at_first = [0.0] * len(memory.tokens)
    at_first[0] = 1.0
    at_third = [0.5] * 5 + [0.0] * third
    at_third[5] = 2.5
    looked = watching.answered([step(at_first), step(at_third), step([1.0])], 0, "x")
    assert looked.mass[0] == pytest.approx(0.25) and looked.mass[2] == pytest.approx(0.375)
    assert looked.share == pytest.approx(0.625) and looked.mass.sum() == pytest.approx(0.625)
    best = watching.passages()
    assert [round(passage.score, 3) for passage in best] == [0.375, 0.25]
    assert best[0].text == of_memory.passage(2).text


def test_every_step_of_the_answer_is_told_once(reader: Reader, memory: Memory) -> None:
    told = [e for e in reader.ask_steps(memory, QUESTION, SHORT) if hasattr(e, "loaded_blocks")]
    answers = [looked for looked in told if looked.phase is Phase.ANSWER]
    assert [looked.index for looked in answers] == list(range(len(answers)))
    assert all(looked.seconds >= 0 and 0 <= looked.share <= 1.001 for looked in told)


@pytest.mark.parametrize(("end", "cut"), [(" ", True), (".\n", False), (". ", False)])
def test_neighbours_stand_together_where_a_passage_is_cut_within_a_line(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, end: str, cut: bool
) -> None:
    text = "".join(f"north{i} wind{i} harbour{i} lamp{i} chapel{i}{end}" for i in range(60))
    memory = read_text(reader, text)
    chosen = [1, 2]
    asking = Asking(reader, memory, "Where?", SHORT)
    record = AttentionRecord(memory.document, memory.tokens, memory.passages, None)
    given = reader.loaded.tokenizer.decode(asking._reread(chosen, record, 0))
    assert (prompts.BETWEEN_PASSAGES not in given) == cut
    places = [position for position, _, _ in record._reread]
    gap = places[1] - places[0] - int(np.diff(memory.passages.borders)[1])
    assert gap == (0 if cut else len(reader.prompt.plain_ids(prompts.BETWEEN_PASSAGES)))
