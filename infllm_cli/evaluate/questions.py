"""A file of questions whose answers are known.

A JSON list of objects: `document` (a file beside the list), `question`, `answer` (a regular
expression, any case), `passage` (text of the document that the answer follows from), and
optionally `kind` (a group of its own in the results). Of what the document does not answer,
`answer` is null and there is no passage.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from infllm_cli.document import Document
from infllm_cli.errors import UsageError

PLAIN, ABSENT = "plain", "absent"


@dataclass(frozen=True)
class Question:
    """A question, and how to tell whether it was answered.

    Attributes:
        document: path of the document.
        answer: found in a right answer; None: the document holds none.
        passage: text of the document that the answer follows from.
    """

    document: Path
    text: str
    answer: re.Pattern[str] | None
    passage: str | None
    kind: str

    def is_answered_by(self, text: str) -> bool:
        """Whether an answer is right."""
        return self.answer is not None and self.answer.search(text) is not None

    def lines(self, document: Document) -> list[tuple[int, int]]:
        """The first and last lines of the document, 1-based, of all places of the passage.

        White space is any: who writes a question need not know where the document breaks lines.

        Raises:
            UsageError: it stands nowhere.
        """
        if self.passage is None:
            return []
        words = [re.escape(word) for word in self.passage.split()]
        places = re.finditer(r"\s+".join(words), document.text)
        found = [document.lines_of(*place.span()) for place in places]
        if not found:
            raise UsageError(f"{document.name} does not contain the passage {self.passage!r}.")
        return found


def load_questions(path: Path, only: list[str] | None = None) -> list[Question]:
    """Read a file of questions.

    Args:
        only: names of documents; questions on others are left out.

    Raises:
        UsageError: a file that is not such a list, naming the entry.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.") from error
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} must hold a list of questions.")
    questions = [_question(path, number, entry) for number, entry in enumerate(entries, 1)]
    known = {question.document.name for question in questions}
    for name in only or []:
        if name not in known:
            raise UsageError(
                f"{path} asks nothing about {name!r}, only about {', '.join(sorted(known))}."
            )
    return [question for question in questions if not only or question.document.name in only]


def _question(path: Path, number: int, entry: object) -> Question:
    where = f"{path}, question {number}"
    if not isinstance(entry, dict):
        raise UsageError(f"{where} is no object.")
    absent = "answer" in entry and entry["answer"] is None
    values = {}
    for name in ("document", "question", "answer", "passage")[: 2 if absent else 4]:
        value = entry.get(name)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where}: {name!r} must be a text.")
        values[name] = value
    try:
        answer = None if absent else re.compile(values["answer"], re.IGNORECASE)
    except re.error as error:
        raise UsageError(f"{where}: the answer is no regular expression: {error}.") from error
    kind = entry.get("kind", ABSENT if absent else PLAIN)
    if not isinstance(kind, str):
        raise UsageError(f"{where}: 'kind' must be a text.")
    document = path.parent / values["document"]
    return Question(document, values["question"], answer, values.get("passage"), kind)
