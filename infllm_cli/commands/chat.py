"""`infllm chat`."""

from __future__ import annotations

import sys

import typer

from infllm_cli.commands.groups import (
    LimitFlags,
    ModelFlags,
    RecallFlags,
    SamplingFlags,
    SizeFlags,
    grouped,
)
from infllm_cli.commands.shared import answer_options, open_document, open_started
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end, rearm
from infllm_cli.options import EXIT_CODES, Encoding, EvidenceCount, File, Files, Json, Quiet, Stats

ABOUT = "Read FILE once and answer questions about it, one after the other."
EXAMPLES = """\b
Examples:
  infllm chat book.txt
  infllm chat report.md -f appendix.md --evidence 2
  infllm chat book.txt < questions.txt > answers.txt
  infllm chat book.txt --json < questions.txt | jq -r .answer

\b
A line is a question; /evidence, /stats, /save FILE, /help and /quit are commands.
Ctrl-C stops an answer, Ctrl-D ends the conversation.
"""


@grouped
def chat(
    context: typer.Context,
    file: File,
    more_files: Files = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    evidence: EvidenceCount = 0,
    stats: Stats = False,
    as_json: Json = False,
    quiet: Quiet = False,
    limits: LimitFlags = LimitFlags(),  # noqa: B008
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
    recall: RecallFlags = RecallFlags(),  # noqa: B008
) -> None:
    """Read FILE once and answer questions about it."""
    files = [file, *(more_files or [])]
    if "-" in files:
        raise UsageError("questions come by standard input here; name the document's file.")
    console = open_started(context, quiet=quiet, keep_rows=stats)
    with clean_end(console):
        document = open_document(console, files, encoding)
        from infllm_cli.chat import ChatRequest, run_chat
        from infllm_cli.lines import lines
        from infllm_cli.reading import Source

        request = ChatRequest(
            source=Source(document, model, limits, sizes),
            options=answer_options(sampling, recall, sizes),
            evidence=evidence,
            as_json=as_json,
        )
        run_chat(request, console, lines(rearm), sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("chat", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(chat)
