"""What several commands do before their work begins. Imports no torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, BinaryIO

import typer

if TYPE_CHECKING:
    from infllm_cli.commands.groups import RecallFlags, SamplingFlags, SizeFlags
    from infllm_cli.console import Console
    from infllm_cli.document import Document
    from infllm_cli.sampling import AnswerOptions


def open_started(context: typer.Context, *, quiet: bool, keep_rows: bool = False) -> Console:
    """The console of a command that takes a while; it says that it has started.

    `context.obj` tells that `infllm_cli.first_line` has said so.
    """
    from infllm_cli.console import open_console

    console = open_console(quiet=quiet, keep_rows=keep_rows)
    if not context.obj:
        console.stage("starting")
    return console


def open_stdin(console: Console, *paths: str | None) -> BinaryIO | None:
    """Standard input, which a parent process may have closed; a person is told that it is read."""
    if sys.stdin is None:
        return None
    if "-" in paths and sys.stdin.isatty():
        console.close()
        console.note("type or paste the text, then Ctrl-D on a line of its own.")
    return sys.stdin.buffer


def open_document(console: Console, files: list[str], encoding: str | None) -> Document:
    """One document of all files.

    Raises:
        DocumentError: one that cannot be read.
    """
    from infllm_cli.files import load_files

    return load_files(files, open_stdin(console, *files), encoding, console.note)


def answer_options(sampling: SamplingFlags, recall: RecallFlags, sizes: SizeFlags) -> AnswerOptions:
    """How to answer, as the flags say.

    Whoever chooses another policy wants to see what it answers, not what is read again beside it.

    Raises:
        UsageError: a value out of range.
    """
    from infllm_cli.memory.knobs import Policy
    from infllm_cli.models import encoders
    from infllm_cli.sampling import Answering, AnswerOptions, Quoting

    encoders.check_name(recall.encoder)
    if sampling.answering is not None:
        answering = Answering(sampling.answering.value)
    else:
        own = sizes.policy in (None, Policy.INFLLM)
        answering = Answering.BOTH if own else Answering.MEMORY
    return AnswerOptions(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        answering=answering,
        quote=Quoting(sampling.quote.value),
        reread_tokens=recall.reread_tokens,
        encoder=recall.encoder,
        candidates=recall.candidates,
    )
