"""`infllm plan`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infllm_cli.commands.groups import ModelFlags, RoomFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_document
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES, Encoding, Files, Json, Quiet

ABOUT = "What reading FILE would take: tokens, memory by policy, time. Loads no weights."
EXAMPLES = """\b
Examples:
  infllm plan book.txt
  infllm plan server.log --model Qwen/Qwen2.5-7B-Instruct
  infllm plan --layers 80 --kv-heads 8 --head-dim 128
  infllm plan --layers 32 --kv-heads 8 --head-dim 128 --tokens 1000000 --json
"""


@grouped
def plan(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The document; - is standard input.")
    ] = None,
    more_files: Files = None,
    layers: Annotated[
        int | None, typer.Option(help="Of a model that is not here: its layers, ...")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(help="... its key-value heads, ...")] = None,
    head_dim: Annotated[int | None, typer.Option(help="... and their size.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of a document that is not here.", show_default="a table")
    ] = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    as_json: Json = False,
    quiet: Quiet = False,
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
    limits: RoomFlags = RoomFlags(),  # noqa: B008
) -> None:
    """Tell what reading a document would take."""
    from infllm_cli.console import open_console

    figures = (layers, kv_heads, head_dim)
    by_figures = any(figure is not None for figure in figures)
    if (file is not None) == by_figures:
        raise UsageError("give a FILE, or --layers, --kv-heads and --head-dim of a model.")
    if file is not None and tokens is not None:
        raise UsageError("--tokens goes with --layers; the tokens of a FILE are counted.")
    console = open_console(quiet=quiet)
    with clean_end(console):
        console.stage("counting")
        document = None
        if file is not None:
            document = open_document(console, [file, *(more_files or [])], encoding)
        from infllm_cli import plan as planning

        if document is not None:
            plans = [
                planning.plan_document(
                    document,
                    model=model.model,
                    cache_dir=model.cache_dir,
                    device=model.device,
                    dtype=model.dtype.value,
                    sizes=sizes.as_dict(),
                    limits=limits.parsed(),
                    denser=sizes.may_be_denser,
                    progress=console.fetching,
                )
            ]
        else:
            plans = [
                planning.plan_shape(
                    *figures, tokens=count, dtype=model.dtype.value, sizes=sizes.as_dict()
                )
                for count in ([tokens] if tokens is not None else planning.TABLE_TOKENS)
            ]
    sys.stdout.write(planning.render(plans, as_json=as_json))


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(plan)
