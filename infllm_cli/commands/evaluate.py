"""`infllm eval`: measure answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.commands import eval_summaries, eval_tasks
from infllm_cli.commands.groups import ModelFlags, RecallFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_started
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES, Json, Quiet, Quote, QuoteChoice, WayChoice

ABOUT = "Ask questions whose answers are known, in several ways; a table on standard output."
EXAMPLES = """\b
Examples:
  infllm eval questions samples/questions.json
  infllm eval questions mine.json --answering both --answering passages --json > results.json
"""


@grouped
def questions(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.json",
            help="A list of objects: document (a file beside the list), question, answer (a "
            "regular expression), passage (text the answer follows from), kind.",
        ),
    ],
    answering: Annotated[
        list[WayChoice] | None,
        typer.Option(help="May be repeated.", show_default="all four"),
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="NAME", help="Only these; may be repeated."),
    ] = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 48,
    quote: Quote = QuoteChoice.AUTO,
    recall: RecallFlags = RecallFlags(),  # noqa: B008
    as_json: Json = False,
    quiet: Quiet = False,
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
) -> None:
    """Ask questions whose answers are known, in several ways; print a table."""
    from infllm_cli.evaluate.questions import load_questions

    console = open_started(context, quiet=quiet)
    with clean_end(console):
        loaded = load_questions(file, only=documents)
        from infllm_cli.evaluate.question_runner import EvalRequest, run_eval

        request = EvalRequest(
            questions=loaded,
            ways=[way.value for way in answering or WayChoice],
            model=model.model,
            device=model.device,
            dtype=model.dtype.value,
            cache_dir=model.cache_dir,
            max_tokens=max_tokens,
            reread_tokens=recall.reread_tokens,
            encoder=recall.encoder,
            candidates=recall.candidates,
            quote=quote.value,
            as_json=as_json,
            sizes=sizes.as_dict(),
        )
        run_eval(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Measure answers.", no_args_is_help=True)
    eval_tasks.add_to(group)
    group.command("questions", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(questions)
    eval_summaries.add_to(group)
    app.add_typer(group, name="eval", rich_help_panel=None)
