"""`infllm fit-gates`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infllm_cli.commands.groups import ModelFlags, grouped
from infllm_cli.commands.shared import open_started, open_stdin
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end
from infllm_cli.memory.knobs import Policy
from infllm_cli.method_options import (
    InfiniSegment,
    InfiniUpdateOption,
)
from infllm_cli.options import (
    EXIT_CODES,
    Encoding,
    Json,
    Quiet,
)

ABOUT = (
    "Find how much each head of a model gains from the memory of infini, on text; prints the loss "
    "with and without it."
)
EXAMPLES = """\b
Examples:
  infllm fit-gates book.txt
  infllm fit-gates --policy infini a.txt b.txt --most-tokens 100000
  infllm ask other.txt "Who pays?" --policy infini      # uses them
"""


@grouped
def fit_gates(
    context: typer.Context,
    documents: Annotated[list[str], typer.Argument(metavar="DOCUMENT...", help="Text to fit on.")],
    # Not named `policy`: what a user prefers for reading says nothing here.
    fitted_policy: Annotated[
        Policy, typer.Option("--policy", help="infini: no other policy has gates.")
    ] = Policy.INFINI,
    epochs: Annotated[int, typer.Option(help="Times that the text is gone through.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Of Adam, on the gates' logits.")] = 0.2,
    most_tokens: Annotated[
        int, typer.Option(help="Of all documents together; the rest is not looked at.")
    ] = 32_768,
    infini_segment: InfiniSegment = None,
    infini_update: InfiniUpdateOption = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit the gates of Infini-attention."""
    if fitted_policy is not Policy.INFINI:
        raise UsageError(f"--policy {fitted_policy.value} has no gates; only infini has.")
    console = open_started(context, quiet=quiet)
    with clean_end(console):
        from infllm_cli.files import load_files

        stdin = open_stdin(console, *documents)
        loaded = [load_files([name], stdin, encoding, console.note) for name in documents]
        from infllm_cli.fit_gates import FitRequest, run_fit_gates
        from infllm_cli.fitting import FitOptions

        request = FitRequest(
            documents=loaded,
            model=model,
            segment_tokens=infini_segment,
            update=infini_update,
            options=FitOptions(epochs, learning_rate, most_tokens),
            as_json=as_json,
        )
        run_fit_gates(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("fit-gates", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(fit_gates)
