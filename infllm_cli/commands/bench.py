"""`infllm bench`: measure speed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.commands.groups import ModelFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_document, open_started
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES, Candidates, Encoding, Json, Quiet

ABOUT = "How fast it reads and answers here, against the bare model and a dense cache."
EXAMPLES = """\b
Examples:
  infllm bench
  infllm bench --lengths 8k,32k,128k --limit-seconds 200
  infllm bench book.txt --lengths 8k --profile --picture speed.svg
  infllm bench --lengths 4k --json > speed.json
"""


@grouped
def bench(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A text, repeated if it is too short.",
            show_default="made-up sentences, always the same",
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="TOKENS,...", help="Where to measure, as in 2k,8k.")
    ] = "2k,8k",
    limit_seconds: Annotated[
        float, typer.Option(help="Most time for reading with the dense cache; 0 leaves it out.")
    ] = 60.0,
    steps: Annotated[int, typer.Option(help="Answer tokens that are timed.", min=1)] = 16,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also tell where the time goes.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.svg", help="Write the curves.", show_default=False, dir_okay=False
        ),
    ] = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    candidates: Candidates = 128,
    as_json: Json = False,
    quiet: Quiet = False,
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
) -> None:
    """Measure reading and answering at several lengths."""
    console = open_started(context, quiet=quiet)
    with clean_end(console):
        if limit_seconds < 0:
            raise UsageError(f"--limit-seconds is {limit_seconds}; it is a time.")
        document = open_document(console, [file], encoding) if file is not None else None
        from infllm_cli.bench.run import BenchRequest, parse_lengths, run_bench

        request = BenchRequest(
            lengths=parse_lengths(lengths),
            limit_seconds=limit_seconds,
            steps=steps,
            candidates=candidates,
            profile=profile,
            model=model.model,
            device=model.device,
            dtype=model.dtype.value,
            cache_dir=model.cache_dir,
            sizes=sizes.as_dict(),
            document=document,
            picture=picture,
            as_json=as_json,
        )
        run_bench(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(bench)
