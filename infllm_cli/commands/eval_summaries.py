"""`infllm eval summaries`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infllm_cli.commands.groups import LimitFlags, ModelFlags, RecallFlags, SizeFlags, grouped
from infllm_cli.commands.shared import open_document, open_started
from infllm_cli.eval_options import JsonLines, ResultsFile, SummaryWayChoice
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES, Encoding, Quiet

ABOUT = """Summarize each FILE in several ways with the same model; a table on standard output.

Ways: quoted and own (infllm summarize with that --wording), question-memory and question-both (one
question, infllm ask with that --answering), map-reduce (no memory: chunks, and summaries of
summaries, until one is left).

In the table: the parts of the document that a way names as its evidence (map-reduce: all, since
all went in), those that its sentences speak of by their rarer words, 4-grams that are not said
before, and the share of content words that stand in the document. None of them tells whether it
is true: --json has the summaries."""
EXAMPLES = """\b
Examples:
  infllm eval summaries samples/story.txt
  infllm eval summaries book.txt --way quoted --way map-reduce --words 300 -o summaries.jsonl
  infllm eval summaries book.txt --reference mine.txt --limit-seconds 1800
  infllm eval summaries book.txt --json | jq -r '.way, .text'
"""


@grouped
def summaries(
    context: typer.Context,
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="Documents; - is standard input."),
    ],
    ways: Annotated[
        list[SummaryWayChoice] | None,
        typer.Option("--way", help="May be repeated.", show_default="all five"),
    ] = None,
    words: Annotated[int, typer.Option(metavar="N", help="About so many words.")] = 150,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A summary to compare with, of the whole or a paragraph for each part.",
            show_default="none",
        ),
    ] = None,
    map_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of a chunk of map-reduce, at most.",
            show_default="3000, or what the model was trained on allows",
        ),
    ] = None,
    limit_seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="Stop a way after so many seconds on a document, reading left out.",
            show_default="none",
        ),
    ] = None,
    output: ResultsFile = None,
    as_json: JsonLines = False,
    quiet: Quiet = False,
    encoding: Encoding = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    recall: RecallFlags = RecallFlags(),  # noqa: B008
    limits: LimitFlags = LimitFlags(),  # noqa: B008
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
) -> None:
    """Summarize each FILE in several ways."""
    console = open_started(context, quiet=quiet)
    with clean_end(console):
        documents = [open_document(console, [file], encoding) for file in dict.fromkeys(files)]
        known = None if reference is None else open_document(console, [reference], None)
        from infllm_cli.evaluate.summary_runner import SummariesRequest, run_summaries
        from infllm_cli.evaluate.summary_ways import Way
        from infllm_cli.reading import Source

        wanted = [Way(way.value) for way in dict.fromkeys(ways or SummaryWayChoice)]
        reads = any(way.needs_memory for way in wanted)
        request = SummariesRequest(
            sources=[Source(d, model, limits, sizes, kept=reads) for d in documents],
            ways=wanted,
            words=words,
            map_tokens=map_tokens,
            recall=recall,
            reference=known,
            limit_seconds=limit_seconds,
            output=output,
            as_json=as_json,
        )
        run_summaries(request, console, sys.stdout)


def add_to(group: typer.Typer) -> None:
    """Add it to `infllm eval`."""
    group.command("summaries", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(summaries)
