"""Questions with known answers: their file, the verdicts, the table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_readers import make_reader
from tiny_tokenizers import prose

from infllm_cli.console import Console
from infllm_cli.document import decode_document
from infllm_cli.errors import UsageError
from infllm_cli.evaluate.question_runner import Way, judge, run_questions, table
from infllm_cli.evaluate.questions import Question, load_questions
from infllm_cli.evaluate.tables import as_text
from infllm_cli.events import Answer
from infllm_cli.evidence import Passage
from infllm_cli.limits import parse_limits
from infllm_cli.sampling import AnswerOptions

ENTRY = {"document": "a.txt", "question": "Who?", "answer": "ahab", "passage": "Captain Ahab"}


def written(folder: Path, entries: Any, text: str = "one\nCaptain Ahab\nthree\n") -> Path:
    (folder / "a.txt").write_text(text)
    path = folder / "questions.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return path


def test_a_question_lies_beside_its_document(tmp_path: Path) -> None:
    question = load_questions(written(tmp_path, [ENTRY]))[0]
    assert question.document == tmp_path / "a.txt"
    assert question.kind == "plain"
    assert question.is_answered_by("It was AHAB.") and not question.is_answered_by("Starbuck")


def test_what_a_document_does_not_answer_has_no_answer_and_no_passage(tmp_path: Path) -> None:
    absent = {"document": "a.txt", "question": "Whose cat?", "answer": None}
    question = load_questions(written(tmp_path, [absent]))[0]
    assert (question.answer, question.passage, question.kind) == (None, None, "absent")
    assert not question.is_answered_by("anything")
    document = decode_document(b"one\ntwo\n", "a.txt")
    assert question.lines(document) == []
    told = Answer("Whose cat?", "Mine.", "stop", 1, 1.0, 0.5, supported=False)
    silent = replace(told, supported=None)
    results = [judge(question, Way.BOTH, answer, document) for answer in (told, silent)]
    assert [r.as_dict()["supported"] for r in results] == [False, None]
    rows = table(results)
    row = dict(zip(rows[0], rows[1], strict=True))
    assert (row["kind"], row["unsupported"], row["own words"]) == ("absent", "1/2", "-")


def test_only_the_documents_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, [ENTRY, {**ENTRY, "document": "b.txt"}])
    assert [q.document.name for q in load_questions(path, ["b.txt"])] == ["b.txt"]
    with pytest.raises(UsageError, match=r"'c\.txt', only about a\.txt, b\.txt"):
        load_questions(path, ["c.txt"])


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ("{", "is not JSON"),
        ([], "a list of questions"),
        ({"question": "Who?"}, "a list of questions"),
        ([3], "question 1 is no object"),
        ([ENTRY, {**ENTRY, "passage": " "}], "question 2: 'passage'"),
        ([{**ENTRY, "answer": "("}], "no regular expression"),
        ([{**ENTRY, "kind": 3}], "'kind'"),
    ],
)
def test_a_file_that_is_no_list_of_questions_is_refused(
    tmp_path: Path, entries: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load_questions(written(tmp_path, entries))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json"):
        load_questions(tmp_path / "none.json")


def test_a_passage_that_is_not_in_the_document_is_refused(tmp_path: Path) -> None:
    question = load_questions(written(tmp_path, [ENTRY]))[0]
    with pytest.raises(UsageError, match="Captain Ahab"):
        question.lines(decode_document(b"nothing of the kind", "a.txt"))


def test_a_passage_is_found_across_the_breaks_of_lines(tmp_path: Path) -> None:
    question = load_questions(written(tmp_path, [{**ENTRY, "passage": "Captain  Ahab was"}]))[0]
    document = decode_document(
        b"Of Captain Ahab\nno word.\n\nCaptain\r\n   Ahab\nwas old.", "a.txt"
    )
    assert question.lines(document) == [(4, 6)]


def question_of(tmp_path: Path, **changes: str) -> Question:
    return load_questions(written(tmp_path, [{**ENTRY, **changes}]))[0]


def test_a_verdict_goes_by_pattern_and_lines(tmp_path: Path) -> None:
    question = question_of(tmp_path)
    document = decode_document((tmp_path / "a.txt").read_bytes(), "a.txt")
    right, wrong = Passage((2, 2), "Captain Ahab", 0.5), Passage((3, 4), "three", 0.9)
    answer = Answer("Who?", "Ahab.", "stop", 2, 1.0, 0.5, [wrong, right], [wrong])
    result = judge(question, Way.BOTH, answer, document)
    assert (result.answered, result.reread, result.evidence) == (True, False, True)
    far = [wrong, wrong, wrong, right]
    answer = Answer("Who?", "Starbuck.", "stop", 2, 1.0, 0.5, far, [])
    result = judge(question, Way.MEMORY, answer, document)
    assert (result.answered, result.reread, result.evidence) == (False, None, False)
    # What a quote says is not the model's own.
    answer = replace(answer, quote=Passage((2, 2), "Captain Ahab stood there.", 0.0))
    result = judge(question, Way.BOTH, answer, document)
    assert (result.answered, result.quoted) == (False, True)
    assert result.as_dict()["quote"] == "Captain Ahab stood there."


def test_every_question_is_asked_in_every_way_that_fits(tmp_path: Path) -> None:
    text = prose(3000)
    passage = text.splitlines()[0][:40]
    plain = {**ENTRY, "passage": passage, "question": f"Where is {passage.split()[0]}?"}
    entries = [plain, {**plain, "kind": "hard"}]
    questions = load_questions(written(tmp_path, entries, text))
    results = list(
        run_questions(
            make_reader(),
            questions,
            list(Way),
            AnswerOptions(max_tokens=3),
            Console(),
            tmp_path / "cache",
            parse_limits(None, None, "1GB", False),
        )
    )
    assert [(r.question.kind, r.way) for r in results] == [
        *[(k, w) for k in ("plain", "hard") for w in (Way.BOTH, Way.MEMORY, Way.PASSAGES)],
        ("plain", Way.DENSE),
        ("hard", Way.DENSE),
    ]
    assert all((r.reread is None) == (r.way in (Way.MEMORY, Way.DENSE)) for r in results)
    rows = table(results)
    assert [row[:3] for row in rows[1:]] == [
        ["a.txt", kind, way.value] for kind in ("hard", "plain") for way in Way
    ]
    lines = as_text(rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[1].startswith("|--")


def test_passages_alone_need_no_reading(tmp_path: Path) -> None:
    text = prose(3000)
    path = written(tmp_path, [{**ENTRY, "passage": text.splitlines()[0][:40]}], text)

    class NoReading(Console):
        def begin_reading(self, name: str, memory: object) -> None:
            raise AssertionError("nothing is to be read")

    found = list(
        run_questions(
            make_reader(),
            load_questions(path),
            [Way.PASSAGES],
            AnswerOptions(max_tokens=3),
            NoReading(),
            tmp_path / "cache",
            parse_limits(None, None, "1GB", False),
        )
    )
    assert len(found) == 1
