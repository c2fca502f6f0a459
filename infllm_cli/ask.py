"""`infllm ask`: a document, some questions, answers; how the parts work together."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from infllm_cli import memory_file, speeds
from infllm_cli.document import Document
from infllm_cli.errors import CapacityError, Interrupted, UsageError
from infllm_cli.events import Answer, Looked, Quoted, TokenOut
from infllm_cli.evidence import Passage
from infllm_cli.keeping import Keeper
from infllm_cli.limits import disk_room, memories_folder
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.shelf import Shelf
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags
    from infllm_cli.console import Console

JSON_SCHEMA = 1
ANY = 2**62  # bytes of disk, where what they do not hold may be dropped


@dataclass(frozen=True)
class AskRequest:
    """What the user asked for; without questions, to read."""

    document: Document | None
    model: ModelFlags
    limits: LimitFlags
    sizes: SizeFlags
    questions: list[str] = field(default_factory=list)
    options: AnswerOptions = field(default_factory=AnswerOptions)
    evidence: int = 0
    as_json: bool = False
    memory_files: list[Path] = field(default_factory=list)  # instead of a document
    output: Path | None = None  # where a memory that has been read is written to


def run_ask(request: AskRequest, console: Console, out: TextIO) -> None:
    """Read, ask, answer; without a question, read and print the key of the saved memory.

    Raises:
        InfllmError: see the modules; nothing is left half-written.
        CapacityError: there is no question, and the memory cannot be saved.
        Interrupted: an answer was stopped; it has been written as far as it went.
    """
    options, sizes = request.options, request.sizes.as_dict()
    document, output = request.document, request.output
    assert document is not None
    check_request(request)
    if output is not None:
        memory_file.check_target(output)
    cache_dir = request.model.cache
    limits = request.limits.parsed()
    for file in document.parts or [document]:
        if file.encoding not in ("utf-8", "ascii"):
            console.note(f"{file.name} is read as {file.encoding}.")
    console.stage("loading the model")
    reader = Reader.load(
        request.model.model,
        device=request.model.device,
        dtype=request.model.dtype.value,
        cache_dir=cache_dir,
        progress=console.fetching,
        **sizes,
    )
    tell_plain_form(reader, console)
    console.stage("tokenizing")
    shelf = Shelf(memories_folder(cache_dir))
    memory = reader.open(
        document,
        reserve_tokens=reader.reserve_for(request.questions, options),
        # Sizes given by hand are meant for the tiers.
        allow_whole=not request.sizes.given,
        host_limit_bytes=limits.host,
        disk_bytes=ANY if limits.allow_drop else disk_room(shelf, limits.disk),
    )
    if output is not None:
        memory_file.check_room(output, reader, memory)
    if options.answering is Answering.PASSAGES:  # those need no memory
        ask_all(request, reader, memory, None, console, out)
        return
    with contextlib.closing(
        Keeper(reader, memory, cache_dir, limits, note=console.note, progress=console.fetching)
    ) as keeper:
        _read(reader, memory, keeper, console)
        _remember_speed(reader, memory, cache_dir)
        if request.questions:
            ask_all(request, reader, memory, keeper, console, out)
        else:
            _tell_saved(request, reader, memory, keeper, console, out)


def check_request(request: AskRequest) -> None:
    """Refuse what the options' own checks do not see.

    Raises:
        UsageError: see there.
    """
    if request.evidence < 0:
        raise UsageError(f"--evidence is {request.evidence}; it is a number of passages.")


def tell_plain_form(reader: Reader, console: Console) -> None:
    """Say that a model is not asked as a chat."""
    if not reader.prompt.is_chat:
        console.note(
            f"{reader.loaded.name} has no chat template: it is asked in a plain form, as "
            "'Question: ... Answer:'."
        )


def _tell_saved(
    request: AskRequest,
    reader: Reader,
    memory: Memory,
    keeper: Keeper,
    console: Console,
    out: TextIO,
) -> None:
    saved = keeper.saved_path()
    written = request.output
    if written is not None:
        console.stage(f"writing {written}")
        memory_file.write(written, reader, memory, request.model.cache, console.fetching)
    console.report(reader, memory, [], peak_bytes(reader, memory))
    if request.as_json:
        out.write(json_line(as_json(reader, memory, keeper, [], 0, written), out))
    elif written is not None:
        out.write(f"{written}\n")
    elif saved is not None:
        out.write(f"{saved.name}\n")
    out.flush()
    if saved is None and written is None:
        raise CapacityError(f"{memory.document.name} has been read, but its memory is not saved.")


def _read(reader: Reader, memory: Memory, keeper: Keeper, console: Console) -> None:
    """Read what no saved memory holds."""
    if memory.complete:
        return
    console.begin_reading(memory.document.name, memory)
    try:
        for event in reader.read_steps(memory):
            keeper.chunk_read()
            console.chunk_read(event)
        keeper.finish()
    except KeyboardInterrupt:
        console.close()
        kept = keeper.stop()
        rest = f"{kept:,} of them are kept: ask again to go on." if kept else "nothing is kept."
        console.note(
            f"interrupted after {memory.reused_tokens + memory.read_tokens:,} of "
            f"{len(memory.tokens):,} tokens; {rest}"
        )
        raise Interrupted from None
    console.end_reading(memory)


def _remember_speed(reader: Reader, memory: Memory, cache_dir: Path) -> None:
    loaded = reader.loaded
    speeds.remember(
        cache_dir,
        loaded.name,
        str(loaded.device),
        dtype_name(loaded.dtype),
        memory.read_tokens,
        memory.read_seconds,
    )


def ask_all(
    request: AskRequest,
    reader: Reader,
    memory: Memory,
    keeper: Keeper | None,
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
        answer = _ask_one(reader, memory, question, request, console, out, number)
        answers.append(answer)
        if request.evidence:
            console.evidence(answer, request.evidence)
        if answer.finish == "interrupted":
            interrupted = True
            break
    console.report(reader, memory, answers, peak_bytes(reader, memory))
    if request.as_json:
        told = as_json(reader, memory, keeper, answers, request.evidence)
        out.write(json_line(told, out))
        out.flush()
    if interrupted:
        raise Interrupted


def _ask_one(
    reader: Reader,
    memory: Memory,
    question: str,
    request: AskRequest,
    console: Console,
    out: TextIO,
    number: int,
) -> Answer:
    """Stream one answer; a Ctrl-C ends it where it is."""
    console.begin_answer(question)
    silent = request.as_json
    live = console.shows_answer and not silent
    # A terminal obeys control characters, which the document may have taught the model.
    safe = visible if out.isatty() else str
    if number and not silent:
        out.write("\n")
    written = said = ""
    quote = answer = None
    steps = reader.ask_steps(memory, question, request.options)
    try:
        for event in steps:
            if isinstance(event, Answer):
                answer = event
            elif isinstance(event, Quoted | TokenOut):
                if isinstance(event, Quoted):
                    quote = event.passage
                    text = quoted(quote) + "\n"
                else:
                    # An answer does not begin with white space.
                    text = event.text if said else event.text.lstrip()
                    said += text
                written += text
                console.token(text)
                if not (silent or live):
                    out.write(safe(text))
                    out.flush()
            elif isinstance(event, Looked):
                console.looked(event)
    except KeyboardInterrupt:
        steps.close()
        answer = Answer(question, said.strip(), "interrupted", 0, 0.0, 0.0, quote=quote)
    assert answer is not None
    console.end_answer(answer)
    if not silent:
        out.write(safe(written.rstrip("\n")) + "\n" if live else "\n")
        out.flush()
    console.say_why_it_ended(answer)
    return answer


def quoted(passage: Passage) -> str:
    """A sentence of the document on one line, with where it stands."""
    first, last = passage.lines
    where = f"line {first}" if first == last else f"lines {first}-{last}"
    file = f"{passage.file}, " if passage.file else ""
    # Whatever reads this: a document's control characters are shown, not sent.
    return f"\u201c{visible(' '.join(passage.text.split()))}\u201d ({file}{where})"


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


def _passage(passage: Passage, document: Document) -> dict[str, Any]:
    return {
        "file": passage.file or document.name,
        "lines": list(passage.lines),
        "text": passage.text,
        "score": round(passage.score, 6),
    }


def as_json(
    reader: Reader,
    memory: Memory,
    keeper: Keeper | None,
    answers: list[Answer],
    evidence: int,
    written: Path | None = None,
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
            "truncated": memory.state.dropped > 0,
            "seconds": round(memory.read_seconds, 3),
            "tokens_per_second": round(memory.read_tokens / max(memory.read_seconds, 1e-9), 1),
        },
        "answers": [
            {
                "question": answer.question,
                "answer": answer.text,
                "quote": None if answer.quote is None else _passage(answer.quote, document),
                "finish": answer.finish,
                "tokens": answer.tokens,
                "seconds": round(answer.seconds, 3),
                "first_token_seconds": round(answer.first_token_seconds, 3),
                "evidence": [_passage(passage, document) for passage in answer.evidence[:most]],
                "reread": [_passage(passage, document) for passage in answer.reread],
            }
            for answer in answers
        ],
        "memory": {
            "whole": memory.whole,
            "blocks": memory.state.blocks,
            "dropped_blocks": memory.state.dropped,
            "host_bytes": memory.state.host_bytes,
            "disk_bytes": memory.state.mapped_bytes,
            "moved_to_disk": keeper is not None and keeper.moved,
            "saved": None if saved is None else {"key": saved.name, "path": str(saved)},
            "file": None if written is None else str(written),
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
