"""The bundled documents, and the questions whose answers they hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

SAMPLES = Path(__file__).parents[1] / "samples"
STORY, REPO = "story.txt", "repo.txt"
# Words of four letters and more that carry no content.
FUNCTION_WORDS = {"does", "from", "have", "many", "much", "that", "this", "what", "which", "with"}
EVERY: list[dict[str, Any]] = json.loads((SAMPLES / "questions.json").read_text("utf-8"))
QUESTIONS = [question for question in EVERY if question["answer"] is not None]


def read(document: str) -> str:
    return (SAMPLES / document).read_bytes().decode("utf-8")


def of(document: str, kind: str | None = None) -> list[dict[str, Any]]:
    return [q for q in QUESTIONS if q["document"] == document and kind in (None, q["kind"])]


def passage_lines(question: dict[str, Any], around: int = 0) -> str:
    """The lines the passage stands in, and `around` more on each side."""
    lines = read(question["document"]).split("\n")
    first = question["line"] - 1
    last = first + question["passage"].count("\n")
    return "\n".join(lines[max(0, first - around) : last + around + 1])


def stems(text: str) -> set[str]:
    words = re.findall(r"[a-z]{4,}", text.lower())
    return {word[:4] for word in words if word not in FUNCTION_WORDS}


each_question = pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q["question"])


def test_story_is_long_and_clean() -> None:
    story = read(STORY)
    assert 40_000 <= len(story) <= 60_000
    assert "\r" not in story
    assert max(len(line) for line in story.split("\n")) <= 78
    paragraphs = [p for p in story.split("\n\n") if p.strip()]
    assert len(set(paragraphs)) == len(paragraphs)
    chapters = re.findall(r"^CHAPTER [IVX]+\. .+$", story, re.MULTILINE)
    assert 8 <= len(chapters) <= 12


def test_repo_dump_has_files() -> None:
    dump = read(REPO)
    assert "\r" not in dump
    paths = re.findall(r"(?:\A|^---\n)(\S+)\n---\n", dump, re.MULTILINE)
    assert len(paths) >= 8
    assert "README.md" in paths


@each_question
def test_passage_starts_at_its_line(question: dict[str, Any]) -> None:
    lines = read(question["document"]).split("\n")
    first_part = question["passage"].split("\n")[0]
    assert first_part in lines[question["line"] - 1]
    assert question["passage"] in passage_lines(question)


@each_question
def test_answer_stands_near_its_passage(question: dict[str, Any]) -> None:
    pattern = re.compile(question["answer"], re.IGNORECASE)
    assert pattern.search(passage_lines(question, around=3))
    assert not pattern.search(question["question"])


def test_questions_are_distinct_and_enough() -> None:
    assert len({q["question"] for q in EVERY}) == len(EVERY)
    unanswered = [q["kind"] for q in EVERY if q["answer"] is None]
    assert sorted(unanswered) == ["absent"] * 5 + ["foreign"] * 5
    assert {q["kind"] for q in QUESTIONS} == {"plain", "paraphrase"}
    assert len(of(STORY)) >= 24
    assert len(of(STORY, "paraphrase")) >= 8
    assert len(of(REPO)) >= 8


def test_story_questions_cover_every_chapter_and_third() -> None:
    lines = read(STORY).split("\n")
    starts = [n for n, line in enumerate(lines, 1) if line.startswith("CHAPTER ")]
    chapters = {sum(start <= q["line"] for start in starts) for q in of(STORY)}
    assert chapters == set(range(1, len(starts) + 1))
    thirds = [3 * (q["line"] - 1) // len(lines) for q in of(STORY, "plain")]
    assert all(thirds.count(third) >= 4 for third in range(3))


@pytest.mark.parametrize(
    "question", [q for q in QUESTIONS if q["kind"] == "paraphrase"], ids=lambda q: q["question"]
)
def test_paraphrase_shares_no_content_word(question: dict[str, Any]) -> None:
    # A capital inside the question marks a proper name, which is allowed.
    words = re.sub(r"(?<=\s)[A-Z]\S*", "", question["question"])
    assert not stems(words) & stems(passage_lines(question))


def test_readme_table_gives_the_right_lines() -> None:
    readme = (SAMPLES / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (.+?) \| (\d+) \|$", readme, re.MULTILINE)
    known = {(q["document"], q["question"], str(q["line"])) for q in QUESTIONS}
    assert len(rows) == 6
    assert set(rows) <= known
