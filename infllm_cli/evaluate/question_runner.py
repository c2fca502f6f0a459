"""Ask questions with known answers in several ways, and count what came out."""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from infllm_cli.capacity import Room
from infllm_cli.document import Document, load_document
from infllm_cli.evaluate.questions import Question
from infllm_cli.evaluate.tables import as_text
from infllm_cli.events import Answer
from infllm_cli.evidence import Passage
from infllm_cli.keeping import Keeper
from infllm_cli.limits import Limits, disk_room, memories_folder
from infllm_cli.models import encoders
from infllm_cli.models.catalog import default_cache_dir
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions, Quoting
from infllm_cli.shelf import Shelf
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.console import Console

EVIDENCE_PASSAGES = 3  # the passage must be among the first this many


class Way(str, enum.Enum):
    """How a question is answered."""

    BOTH = "both"
    MEMORY = "memory"
    PASSAGES = "passages"
    DENSE = "dense"  # the whole document attended, where it fits the model


@dataclass(frozen=True)
class Result:
    """One question answered in one way.

    Attributes:
        answered: whether the model's own words answer the question.
        quoted: whether they or the quote do: what is printed.
        reread: whether the passage stood beside the question as text; None where nothing did.
        evidence: whether the passage is among the first `EVIDENCE_PASSAGES` of the evidence.
        foreign: whether it was said that nothing in the document comes near the question.
    """

    question: Question
    way: Way
    text: str
    quote: str | None
    answered: bool
    quoted: bool
    reread: bool | None
    evidence: bool
    foreign: bool
    seconds: float
    first_token_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for `--json`."""
        return {
            "document": self.question.document.name,
            "kind": self.question.kind,
            "question": self.question.text,
            "answering": self.way.value,
            "answer": self.text,
            "quote": self.quote,
            "answered": self.answered,
            "answered_with_quote": self.quoted,
            "reread": self.reread,
            "evidence": self.evidence,
            "supported": False if self.foreign else None,
            "seconds": round(self.seconds, 3),
            "first_token_seconds": round(self.first_token_seconds, 3),
        }


@dataclass(frozen=True)
class EvalRequest:
    """What the user asked for, as the command line gives it."""

    questions: list[Question]
    ways: list[str]
    model: str | None
    device: str
    dtype: str
    cache_dir: Path | None
    max_tokens: int
    reread_tokens: int | None
    encoder: str
    candidates: int
    quote: str
    as_json: bool
    sizes: dict[str, Any]


def run_eval(request: EvalRequest, console: Console, out: TextIO) -> None:
    """Measure, and print a table or with `--json` every answer.

    Raises:
        InfllmError: see the modules.
    """
    encoders.check_name(request.encoder)
    options = AnswerOptions(
        max_tokens=request.max_tokens,
        reread_tokens=request.reread_tokens,
        encoder=request.encoder,
        candidates=request.candidates,
        quote=Quoting(request.quote),
    )
    console.stage("loading the model")
    reader = Reader.load(
        request.model,
        device=request.device,
        dtype=request.dtype,
        cache_dir=request.cache_dir,
        progress=console.fetching,
        **request.sizes,
    )
    cache_dir = request.cache_dir or default_cache_dir()
    limits = Limits.usual()
    ways = [Way(way) for way in request.ways]
    results = []
    for result in run_questions(
        reader, request.questions, ways, options, console, cache_dir, limits
    ):
        results.append(result)
        verdict = "right" if result.answered else "in the quote" if result.quoted else "wrong"
        if result.question.answer is None:
            verdict = "said to be absent" if result.foreign else "absent, and not said so"
        console.note(
            f"{result.way.value}: {verdict}: {result.question.text} -> {visible(result.text)}"
        )
    if request.as_json:
        told = {"model": reader.loaded.name, "results": [r.as_dict() for r in results]}
        json.dump(told, out, ensure_ascii=False)
        out.write("\n")
    else:
        out.write(as_text(table(results)))
    out.flush()


def run_questions(
    reader: Reader,
    questions: list[Question],
    ways: list[Way],
    options: AnswerOptions,
    console: Console,
    cache_dir: Path,
    limits: Limits,
) -> Iterator[Result]:
    """Read each document once, or take its saved memory; ask its questions in every way.

    Raises:
        InfllmError: a document that cannot be read, a passage that is not in it.
    """
    by_document: dict[Path, list[Question]] = {}
    for question in questions:
        by_document.setdefault(question.document, []).append(question)
    documents = {path: load_document(str(path)) for path in by_document}
    for path, asked in by_document.items():
        for question in asked:
            question.lines(documents[path])  # refuse what cannot be judged before reading
    for path, asked in by_document.items():
        document = documents[path]
        tiered = [way for way in ways if way is not Way.DENSE]
        if tiered:
            disk = disk_room(Shelf(memories_folder(cache_dir)), limits.disk)
            memory = reader.open(document, allow_whole=False, room=Room(limits.host, disk))
            keeper = None
            with contextlib.ExitStack() as stack:
                if tiered != [Way.PASSAGES]:
                    keeper = Keeper(
                        reader,
                        memory,
                        cache_dir,
                        limits,
                        note=console.note,
                        progress=console.fetching,
                    )
                    stack.callback(keeper.close)
                    _read(reader, memory, keeper, console)
                yield from _ask_all(reader, memory, asked, tiered, options, console)
            del memory, keeper  # before the next one: two arenas may be more than there is
        if Way.DENSE in ways:
            longest = reader.reserve_for([question.text for question in asked], options)
            memory = reader.open(document, reserve_tokens=longest)
            if not memory.whole:
                console.note(f"{document.name} does not fit the model as a whole: no dense row.")
                continue
            _read(reader, memory, None, console)
            yield from _ask_all(reader, memory, asked, [Way.DENSE], options, console)


def _read(reader: Reader, memory: Memory, keeper: Keeper | None, console: Console) -> None:
    if memory.complete:
        return
    console.begin_reading(memory.document.name, memory)
    for event in reader.read_steps(memory):
        if keeper is not None:
            keeper.chunk_read()
        console.chunk_read(event)
    if keeper is not None:
        keeper.finish()
    console.end_reading(memory)


def _ask_all(
    reader: Reader,
    memory: Memory,
    questions: list[Question],
    ways: list[Way],
    options: AnswerOptions,
    console: Console,
) -> Iterator[Result]:
    for number, question in enumerate(questions, 1):
        for way in ways:
            console.stage(
                f"{memory.document.name}: question {number} of {len(questions)}, {way.value}"
            )
            answering = Answering.MEMORY if way is Way.DENSE else Answering(way.value)
            answer = reader.ask(memory, question.text, replace(options, answering=answering))
            yield judge(question, way, answer, memory.document)


def judge(question: Question, way: Way, answer: Answer, document: Document) -> Result:
    """Compare an answer with what is known."""
    places = question.lines(document)

    def holds(passages: list[Passage]) -> bool:
        held = {line for p in passages for line in range(p.lines[0], p.lines[1] + 1)}
        return any(held.issuperset(range(first, last + 1)) for first, last in places)

    quote = answer.quote.text if answer.quote is not None else None
    return Result(
        question=question,
        way=way,
        text=answer.text,
        quote=quote,
        answered=question.is_answered_by(answer.text),
        quoted=question.is_answered_by(f"{quote or ''}\n{answer.text}"),
        reread=holds(answer.reread) if answer.reread else None,
        evidence=holds(answer.evidence[:EVIDENCE_PASSAGES]),
        foreign=answer.supported is False,
        seconds=answer.seconds,
        first_token_seconds=answer.first_token_seconds,
    )


def table(results: list[Result]) -> list[list[str]]:
    """Rows of a table, the header first: a group is a document and a kind of question."""
    columns = ("own words", "with quote", "re-read", "evidence", "unsupported", "first token")
    rows = [["document", "kind", "answering", *columns]]
    groups: dict[tuple[str, str, Way], list[Result]] = {}
    for result in results:
        where = (result.question.document.name, result.question.kind)
        for group in (where, ("all", result.question.kind)):
            groups.setdefault((*group, result.way), []).append(result)
    documents = {document for document, _, _ in groups if document != "all"}
    for (document, kind, way), group in sorted(
        groups.items(), key=lambda item: (item[0][0] == "all", item[0][0], item[0][1])
    ):
        if document == "all" and len(documents) == 1:
            continue
        n = len(group)
        reread = [result.reread for result in group if result.reread is not None]
        seconds = sum(result.first_token_seconds for result in group) / n
        counts = ["-"] * 4
        if any(result.question.answer for result in group):
            counts = [
                f"{sum(result.answered for result in group)}/{n}",
                f"{sum(result.quoted for result in group)}/{n}",
                f"{sum(reread)}/{n}" if reread else "-",
                f"{sum(result.evidence for result in group)}/{n}",
            ]
        foreign = f"{sum(result.foreign for result in group)}/{n}"
        rows.append([document, kind, way.value, *counts, foreign, f"{seconds:.1f} s"])
    return rows
