"""`infllm read`."""

from __future__ import annotations

import sys

import typer

from infllm_cli.commands.groups import KeepFlags, ModelFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_document, open_started
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES, Encoding, File, Files, Json, Output, Quiet

ABOUT = "Read FILE and keep its memory for later questions; prints the memory's key."
EXAMPLES = """\b
Examples:
  infllm read book.txt
  infllm read book.txt -o book.infllm
  infllm read a.md -f b.md -f c.md --model Qwen/Qwen2.5-7B-Instruct
"""


@grouped
def read(
    context: typer.Context,
    file: File,
    more_files: Files = None,
    output: Output = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    as_json: Json = False,
    quiet: Quiet = False,
    keep: KeepFlags = KeepFlags(),  # noqa: B008
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
) -> None:
    """Read FILE and keep its memory."""
    console = open_started(context, quiet=quiet)
    with clean_end(console):
        document = open_document(console, [file, *(more_files or [])], encoding)
        from infllm_cli.ask import AskRequest, run_ask

        request = AskRequest(
            document=document,
            model=model,
            limits=keep.and_save(),
            sizes=sizes,
            as_json=as_json,
            output=output,
        )
        run_ask(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("read", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(read)
