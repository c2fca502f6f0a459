"""`infllm ask`: a document, some questions, answers; how the parts work together."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from infllm_cli import collector, memory_file
from infllm_cli.document import Document
from infllm_cli.errors import CapacityError, Interrupted, UsageError
from infllm_cli.events import Answer, AskEvent, Encoding, Looked, Quoted, Remark, TokenOut
from infllm_cli.evidence import Passage
from infllm_cli.keeping import Keeper
from infllm_cli.memory.knobs import Policy
from infllm_cli.pictures import Pictures
from infllm_cli.quotable import is_prose
from infllm_cli.reader import Memory, Reader
from infllm_cli.reading import Source, kept, load_reader, open_memory
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.told import as_json, json_line, peak_bytes
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags
    from infllm_cli.console import Console


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
    evidence_html: Path | None = None
    heatmap: Path | None = None
    memory_files: list[Path] = field(default_factory=list)  # instead of a document
    output: Path | None = None  # where a memory that has been read is written to

    @cached_property
    def pictures(self) -> Pictures:
        """The files that show where the answers looked."""
        return Pictures(self.evidence_html, self.heatmap)


def run_ask(request: AskRequest, console: Console, out: TextIO) -> None:
    """Read, ask, answer; without a question, read and print the key of the saved memory.

    Raises:
        InfllmError: see the modules; nothing is left half-written.
        CapacityError: there is no question, and the memory cannot be saved.
        Interrupted: an answer was stopped; it has been written as far as it went.
    """
    options, output = request.options, request.output
    assert request.document is not None
    check_request(request)
    if output is not None:
        memory_file.check_target(output)
    with_memory = options.answering is not Answering.PASSAGES  # those need none
    source = Source(request.document, request.model, request.limits, request.sizes, with_memory)
    policy = request.sizes.policy or Policy.INFLLM
    if not (request.questions or policy.has_blocks):
        raise UsageError(
            f"--policy {policy.value} keeps nothing that could be asked later; read by "
            "infllm or infllm-paper, or ask at once."
        )
    reader = load_reader(source, console)
    reserve_tokens = reader.reserve_for(request.questions, options)
    memory = open_memory(source, reader, console, reserve_tokens)
    if output is not None:
        memory_file.check_room(output, reader, memory)
    if not source.kept:
        ask_all(request, reader, memory, None, console, out)
        return
    with kept(source, reader, memory, console) as keeper:
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
    request.pictures  # noqa: B018  refuses a folder that is not there before anything is read


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
    pictures = request.pictures
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
    steps: Iterator[AskEvent],
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
    written = said = ""
    quote = answer = None
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
            elif isinstance(event, Encoding):
                console.fetching("comparing sentences", event.done, event.total)
            elif isinstance(event, Remark):
                console.note(event.text)
    except KeyboardInterrupt:
        steps.close()
        answer = Answer(question, said.strip(), "interrupted", 0, 0.0, 0.0, quote=quote)
    assert answer is not None
    collector.wake()
    console.end_answer(answer)
    if not silent:
        out.write(safe(written.rstrip("\n")) + "\n" if live else "\n")
        out.flush()
    console.say_why_it_ended(answer)
    return answer


def quoted(passage: Passage) -> str:
    """A sentence of the document on one line, or lines of code as they are, with their place."""
    first, last = passage.lines
    where = f"line {first}" if first == last else f"lines {first}-{last}"
    file = f"{passage.file}, " if passage.file else ""
    # Whatever reads this: a document's control characters are shown, not sent.
    if is_prose(passage.text) or "\n" not in passage.text:
        return f"\u201c{visible(' '.join(passage.text.split()))}\u201d ({file}{where})"
    lines = textwrap.indent(visible(passage.text), "    ")
    return f"{file}{where}:\n{lines}"
