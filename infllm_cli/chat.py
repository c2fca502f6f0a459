"""`infllm chat`: a document is read, then questions come one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from infllm_cli.ask import ask_one
from infllm_cli.conversation import Conversation, converse
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import rearm
from infllm_cli.reading import Source, kept, load_reader, open_memory
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.told import answer_as_json, json_line, peak_bytes

if TYPE_CHECKING:
    from infllm_cli.console import Console

COMMANDS = {
    "/evidence": "the passages that the last answer rests on (/evidence 3: so many)",
    "/stats": "what the conversation takes",
    "/save": "write the conversation to a file (/save FILE)",
    "/help": "this list",
    "/quit": "end; so does the end of input (Ctrl-D)",
}


@dataclass(frozen=True)
class ChatRequest:
    """What the user asked for."""

    source: Source
    options: AnswerOptions = field(default_factory=AnswerOptions)
    evidence: int = 0
    as_json: bool = False


def run_chat(request: ChatRequest, console: Console, questions: Iterator[str], out: TextIO) -> None:
    """Read, then answer line after line.

    Args:
        questions: lines as they are typed or piped in; a line that begins with "/" is a command.

    Raises:
        InfllmError: see the modules.
    """
    if request.evidence < 0:
        raise UsageError(f"--evidence is {request.evidence}; it is a number of passages.")
    if request.options.answering is Answering.PASSAGES:
        raise UsageError("--answering passages reads no document; chat needs both or memory.")
    source = request.source
    reader = load_reader(source, console)
    reserve_tokens = reader.reserve_for([], request.options)
    memory = open_memory(source, reader, console, reserve_tokens)
    with kept(source, reader, memory, console), converse(reader, memory) as conversation:
        console.close()
        console.note(f"{memory.document.name} has been read. /help lists commands.")
        for line in questions:
            text = line.strip()
            if not text:
                continue
            if text.startswith("/"):
                if not _obey(text, conversation, console):
                    break
                continue
            _answer(request, conversation, text, console, out)
        answers = [turn.answer for turn in conversation.turns]
        console.report(reader, memory, answers, peak_bytes(reader, memory))


def _answer(
    request: ChatRequest, conversation: Conversation, question: str, console: Console, out: TextIO
) -> None:
    steps = conversation.ask_steps(question, request.options)
    number = len(conversation.turns)
    answer = ask_one(steps, question, console, out, request.as_json, number)
    if answer.finish == "interrupted":
        rearm()  # the next Ctrl-C stops the next answer, not the process
        if answer.text:
            conversation.remember(answer)
    if request.evidence:
        console.evidence(answer, request.evidence)
    if request.as_json:
        document = conversation.memory.document
        out.write(json_line(answer_as_json(answer, document, request.evidence or 5), out))
        out.flush()


def _obey(text: str, conversation: Conversation, console: Console) -> bool:
    """Do what a command says; False ends the conversation."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    answer = conversation.turns[-1].answer if conversation.turns else None
    if name in ("/quit", "/exit", "/q"):
        return False
    if name == "/evidence":
        if answer is None:
            console.note("nothing has been asked yet.")
        else:
            most = int(argument) if argument.isdigit() and int(argument) else 3
            console.evidence(answer, most)
    elif name == "/stats":
        console.note(stats(conversation))
    elif name == "/save":
        console.note(_save(argument, conversation))
    elif name == "/help":
        for command, meaning in COMMANDS.items():
            console.note(f"{command:<10} {meaning}")
    else:
        known = ", ".join(COMMANDS)
        console.note(f"{name} is no command; there are {known}. A question cannot begin with /.")
    return True


def stats(conversation: Conversation) -> str:
    """Turns, tokens and where they are, in one line."""
    state = conversation.memory.state
    tokens, near = conversation.tokens, conversation.tokens_in_window
    where = "" if near is None else f", {near:,} of them in the window"
    blocks = f", {state.blocks} blocks per layer" if state.config.policy.has_blocks else ""
    return (
        f"{len(conversation.turns)} turns, {tokens:,} tokens{where}; {state.tokens:,} tokens in "
        f"all{blocks}"
    )


def _save(argument: str, conversation: Conversation) -> str:
    """Write the conversation; what to say about it."""
    if not argument:
        return "give a file: /save conversation.md"
    path = Path(argument).expanduser()
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(conversation.transcript())
    except FileExistsError:
        return f"{path} exists; choose another name."
    except OSError as error:
        return f"{path}: {error.strerror or error}; choose another place."
    return f"the conversation has been written to {path}."
