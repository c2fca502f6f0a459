"""`infllm ask`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from infllm_cli.commands.groups import (
    LimitFlags,
    ModelFlags,
    RecallFlags,
    SamplingFlags,
    SizeFlags,
    grouped,
)
from infllm_cli.commands.shared import answer_options, open_started, open_stdin
from infllm_cli.interrupts import clean_end
from infllm_cli.options import (
    EXIT_CODES,
    Encoding,
    EvidenceCount,
    EvidenceHtml,
    File,
    Files,
    HeatmapFile,
    Json,
    Quiet,
    Stats,
)

ABOUT = "Read FILE once and answer each QUESTION; answers go to standard output."
EXAMPLES = """\b
Examples:
  infllm ask book.txt "Who is the harpooneer who shares a bed with Ishmael?"
  infllm ask contract.txt "Which law governs?" "What is the notice period?"
  cat notes/*.md | infllm ask - "What was decided about the roof?"
  infllm ask report.md "What changed?" -f appendix.md -f notes.txt
  infllm ask book.infllm "Who is Ahab?"      # a memory made by `infllm read -o`
  infllm ask server.log "When did the disk fill up?" --evidence 3
  infllm ask book.txt "Who is Ahab?" --evidence-html ahab.html
  infllm ask book.txt "Who is Ahab?" --json | jq -r '.answers[0].answer'
"""


@grouped
def ask(
    context: typer.Context,
    file: File,
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="One or several, on one read."),
    ] = None,
    more_files: Files = None,
    questions_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Further questions, one per line; - is standard input."),
    ] = None,
    model: ModelFlags = ModelFlags(),  # noqa: B008  frozen; `grouped` takes it apart
    encoding: Encoding = None,
    sampling: SamplingFlags = SamplingFlags(),  # noqa: B008
    evidence: EvidenceCount = 0,
    evidence_html: EvidenceHtml = None,
    heatmap: HeatmapFile = None,
    stats: Stats = False,
    as_json: Json = False,
    quiet: Quiet = False,
    limits: LimitFlags = LimitFlags(),  # noqa: B008
    sizes: SizeFlags = SizeFlags(),  # noqa: B008
    recall: RecallFlags = RecallFlags(),  # noqa: B008
) -> None:
    """Read FILE once and answer each QUESTION; answers go to standard output."""
    from infllm_cli.file_kinds import memory_files
    from infllm_cli.files import load_files
    from infllm_cli.questions import gather_questions

    console = open_started(context, quiet=quiet, keep_rows=stats)
    with clean_end(console):
        files = [file, *(more_files or [])]
        stdin = open_stdin(console, *files, questions_file)
        asked = gather_questions(questions or [], questions_file, files, stdin)
        memories = memory_files(files)
        document = None if memories else load_files(files, stdin, encoding, console.note)
        from infllm_cli.ask import AskRequest, run_ask

        request = AskRequest(
            document=document,
            questions=asked,
            model=model,
            options=answer_options(sampling, recall, sizes),
            limits=limits,
            sizes=sizes,
            evidence=evidence,
            as_json=as_json,
            evidence_html=evidence_html,
            heatmap=heatmap,
            memory_files=memories,
        )
        if memories:
            from infllm_cli.ask_files import run_ask_files

            run_ask_files(request, console, sys.stdout)
        else:
            run_ask(request, console, sys.stdout)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ask", help=f"{ABOUT}\n\n{EXAMPLES}", epilog=EXIT_CODES)(ask)
