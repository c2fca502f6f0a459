"""`infllm ask`: a document, some questions, answers; how the parts work together."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from infllm_cli.document import Document
from infllm_cli.errors import CapacityError, Interrupted, UsageError
from infllm_cli.events import Answer, Looked, TokenOut
from infllm_cli.evidence import Passage
from infllm_cli.keeping import Keeper
from infllm_cli.pictures import Pictures
from infllm_cli.reader import Memory, Reader
from infllm_cli.reading import Source, kept, load_reader, open_memory
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags
    from infllm_cli.console import Console

JSON_SCHEMA = 1


@dataclass(frozen=True)
class AskRequest:
    """What the user asked for; without questions, to read."""

    document: Document
    model: ModelFlags
    limits: LimitFlags
    sizes: SizeFlags
    questions: list[str] = field(default_factory=list)
    options: AnswerOptions = field(default_factory=AnswerOptions)
    evidence: int = 0
    as_json: bool = False
    evidence_html: Path | None = None
    heatmap: Path | None = None


def run_ask(request: AskRequest, console: Console, out: TextIO) -> None:
    """Read, ask, answer; without a question, read and print the key of the saved memory.

    Raises:
        InfllmError: see the modules; nothing is left half-written.
        CapacityError: there is no question, and the memory cannot be saved.
        Interrupted: an answer was stopped; it has been written as far as it went.
    """
    options = request.options
    if request.evidence < 0:
        raise UsageError(f"--evidence is {request.evidence}; it is a number of passages.")
    pictures = Pictures(request.evidence_html, request.heatmap)
    source = Source(request.document, request.model, request.limits, request.sizes)
    reader = load_reader(source, console)
    reserve_tokens = reader.reserve_for(request.questions, options)
    memory = open_memory(source, reader, console, reserve_tokens)
    if options.answering is Answering.PASSAGES:  # those need no memory
        _ask_all(request, reader, memory, None, pictures, console, out)
        return
    with kept(source, reader, memory, console) as keeper:
        if request.questions:
            _ask_all(request, reader, memory, keeper, pictures, console, out)
        else:
            _tell_saved(request, reader, memory, keeper, console, out)


def _tell_saved(
    request: AskRequest,
    reader: Reader,
    memory: Memory,
    keeper: Keeper,
    console: Console,
    out: TextIO,
) -> None:
    saved = keeper.saved_path()
    console.report(reader, memory, [], peak_bytes(reader, memory))
    if request.as_json:
        out.write(json_line(as_json(reader, memory, keeper, [], 0), out))
    elif saved is not None:
        out.write(f"{saved.name}\n")
    out.flush()
    if saved is None:
        raise CapacityError(f"{memory.document.name} has been read, but its memory is not saved.")


def _ask_all(
    request: AskRequest,
    reader: Reader,
    memory: Memory,
    keeper: Keeper | None,
    pictures: Pictures,
    console: Console,
    out: TextIO,
) -> None:
    """Put every question, and report.

    Raises:
        Interrupted: an answer was stopped.
    """
    answers: list[Answer] = []
    interrupted = False
    for number, question in enumerate(request.questions):
        steps = reader.ask_steps(memory, question, request.options)
        steps = pictures.watched(memory, steps)
        answer = ask_one(steps, question, console, out, request.as_json, number)
        answers.append(answer)
        if request.evidence:
            console.evidence(answer, request.evidence)
        if answer.finish == "interrupted":
            interrupted = True
            break
    pictures.write()
    console.report(reader, memory, answers, peak_bytes(reader, memory))
    if request.as_json:
        told = as_json(reader, memory, keeper, answers, request.evidence)
        out.write(json_line(told, out))
        out.flush()
    if interrupted:
        raise Interrupted


def ask_one(
    steps: Iterator[Looked | TokenOut | Answer],
    question: str,
    console: Console,
    out: TextIO,
    silent: bool,
    number: int,
) -> Answer:
    """Stream one answer; a Ctrl-C ends it where it is.

    Args:
        steps: see `Reader.ask_steps`.
        silent: write nothing to `out`.
        number: of answers written before.
    """
    console.begin_answer(question)
    live = console.shows_answer and not silent
    # A terminal obeys control characters, which the document may have taught the model.
    safe = visible if out.isatty() else str
    if number and not silent:
        out.write("\n")
    written = ""
    answer = None
    try:
        for event in steps:
            if isinstance(event, Answer):
                answer = event
            elif isinstance(event, TokenOut):
                # An answer does not begin with white space.
                text = event.text if written else event.text.lstrip()
                written += text
                console.token(text)
                if not (silent or live):
                    out.write(safe(text))
                    out.flush()
            elif isinstance(event, Looked):
                console.looked(event)
    except KeyboardInterrupt:
        steps.close()
        answer = Answer(question, written.strip(), "interrupted", 0, 0.0, 0.0)
    assert answer is not None
    console.end_answer(answer)
    if not silent:
        out.write(safe(written.rstrip("\n")) + "\n" if live else "\n")
        out.flush()
    console.say_why_it_ended(answer)
    return answer


def dtype_name(dtype: torch.dtype) -> str:
    """As in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def json_line(value: object, out: TextIO) -> str:
    """JSON as a line that `out` can encode."""
    readable = (out.encoding or "").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=not readable) + "\n"


def peak_bytes(reader: Reader, memory: Memory) -> int:
    """The most that was held on the model's device.

    On a GPU everything that was allocated there, weights included; on a processor, where device
    and host are one, the tiers that would be on the device.
    """
    if reader.loaded.device.type == "cuda":
        return torch.cuda.max_memory_allocated(reader.loaded.device)
    return memory.device_bytes_peak


def peak_process_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def passage_as_json(passage: Passage, document: Document) -> dict[str, Any]:
    """A passage with its place."""
    return {
        "file": passage.file or document.name,
        "lines": list(passage.lines),
        "text": passage.text,
        "score": round(passage.score, 6),
    }


def answer_as_json(answer: Answer, document: Document, most: int) -> dict[str, Any]:
    """An answer with at most so many passages of evidence."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "finish": answer.finish,
        "tokens": answer.tokens,
        "seconds": round(answer.seconds, 3),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "evidence": [passage_as_json(passage, document) for passage in answer.evidence[:most]],
        "reread": [passage_as_json(passage, document) for passage in answer.reread],
    }


def as_json(
    reader: Reader, memory: Memory, keeper: Keeper | None, answers: list[Answer], evidence: int
) -> dict[str, Any]:
    """The object that `--json` prints."""
    document, loaded = memory.document, reader.loaded
    saved = keeper.saved_path() if keeper is not None else None
    most = evidence or 5
    return {
        "schema": JSON_SCHEMA,
        "document": {
            "name": document.name,
            "bytes": document.size_bytes,
            "encoding": document.encoding,
            "lines": document.lines,
            "tokens": len(memory.tokens),
            "sha256": document.sha256,
            "files": [
                {
                    "name": file.name,
                    "bytes": file.size_bytes,
                    "encoding": file.encoding,
                    "lines": file.lines,
                    "sha256": file.sha256,
                }
                for file in document.parts or [document]
            ],
        },
        "read": {
            "tokens": memory.read_tokens,
            "reused_tokens": memory.reused_tokens,
            "truncated": False,
            "seconds": round(memory.read_seconds, 3),
            "tokens_per_second": round(memory.read_tokens / max(memory.read_seconds, 1e-9), 1),
        },
        "answers": [answer_as_json(answer, document, most) for answer in answers],
        "memory": {
            "whole": memory.whole,
            "blocks": memory.state.blocks,
            "host_bytes": memory.state.host_bytes,
            "disk_bytes": memory.state.mapped_bytes,
            "moved_to_disk": keeper is not None and keeper.moved,
            "saved": None if saved is None else {"key": saved.name, "path": str(saved)},
            "device_bytes_peak": peak_bytes(reader, memory),
            "config": reader.config.as_dict(),
        },
        "model": {
            "name": loaded.name,
            "architecture": loaded.architecture,
            "dtype": dtype_name(loaded.dtype),
            "device": str(loaded.device),
            "trained_length": loaded.trained_length,
        },
    }
