"""`infllm summarize`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_document, open_started
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end
from infllm_cli.options import (
    EXIT_CODES,
    Encoding,
    EvidenceCount,
    File,
    Files,
    Json,
    Length,
    LengthChoice,
    Quiet,
    Stats,
    WordingChoice,
    WordingOption,
)

ABOUT = "Read FILE once and summarize it; the summary goes to standard output."
EXAMPLES = """\b
Examples:
  infllm summarize book.txt
  infllm summarize book.txt --length short
  infllm summarize report.md -f appendix.md --words 300
  infllm summarize contract.txt --focus "what each party owes, and when"
  infllm summarize repo.txt --outline
  git log -p | infllm summarize - --outline --json | jq -r '.parts[].summary'
"""


@grouped
def summarize(
    context: typer.Context,
    file: File,
    more_files: Files = None,
    length: Length = LengthChoice.MEDIUM,
    words: Annotated[
        int | None, typer.Option(help="About so many words, instead of --length.")
    ] = None,
    focus: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What to look for.", show_default=False)
    ] = None,
    outline: Annotated[
        bool, typer.Option("--outline", help="One line for each part, with its lines.")
    ] = False,
    wording: WordingOption = WordingChoice.AUTO,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    evidence: EvidenceCount = 0,
    stats: Stats = False,
    as_json: Json = False,
    quiet: Quiet = False,
    limits: LimitFlags = LimitFlags(),  # noqa: B008
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
) -> None:
    """Read FILE once and summarize it."""
    if outline and words is not None:
        raise UsageError("--outline has one line for each part; --words goes with a summary.")
    console = open_started(context, quiet=quiet, keep_rows=stats)
    with clean_end(console):
        document = open_document(console, [file, *(more_files or [])], encoding)
        from infllm_cli.reading import Source
        from infllm_cli.summarize import SummarizeRequest, run_summarize
        from infllm_cli.summary_options import LENGTHS, SummaryOptions, Wording

        request = SummarizeRequest(
            source=Source(document, model, limits, sizes),
            options=SummaryOptions(
                words=LENGTHS[length.value] if words is None else words,
                focus=focus,
                wording=Wording(wording.value),
                outline=outline,
            ),
            evidence=evidence,
            as_json=as_json,
        )
        run_summarize(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("summarize", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(summarize)
