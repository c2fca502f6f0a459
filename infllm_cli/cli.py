"""The command line: which commands there are, and what holds for all of them.

Each command is a file of `infllm_cli.commands`. No torch is imported here, so that help is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from infllm_cli import __version__
from infllm_cli.commands import (
    ask,
    bench,
    chat,
    evaluate,
    fit_gates,
    memory,
    model,
    plan,
    read,
    summarize,
)
from infllm_cli.config_file import config_path, load_config
from infllm_cli.options import EXIT_CODES

COMMANDS = (ask, summarize, chat, read, plan, model, evaluate, fit_gates, memory, bench)

ABOUT = "Ask questions about documents of any length and summarize them, on bounded memory."
EXAMPLES = """\b
Examples:
  infllm ask book.txt "Who is Ahab?"
  cat notes/*.md | infllm ask - "What was decided about the roof?"
  infllm summarize book.txt --length short
  infllm chat book.txt
  infllm read book.txt
  infllm plan book.txt
  infllm model list
"""
# Figures are to be comparable: what a user prefers otherwise does not count for them.
WITHOUT_CONFIG = {"eval", "bench"}

app = typer.Typer(
    name="infllm",
    help=f"{ABOUT}\n\n{EXAMPLES}",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    command.add_to(app)


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"infllm {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Ask questions about documents of any length, on bounded memory."""
    if not {"-h", "--help"} & set(sys.argv):  # help must come whatever the file holds
        context.default_map = _defaults(context.command, load_config(config_path()))


def _defaults(command: Any, values: dict[str, Any]) -> dict[str, Any]:
    """The values for every command, and every command of a group."""
    groups = getattr(command, "commands", None)
    if groups is None:
        return values
    return {n: _defaults(c, values) for n, c in groups.items() if n not in WITHOUT_CONFIG}
