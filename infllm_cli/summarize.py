"""`infllm summarize`: read a document, summarize it, print; how the parts work together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from infllm_cli import collector
from infllm_cli.digests import PassDone, PieceTold, Summary
from infllm_cli.errors import Interrupted, UsageError
from infllm_cli.keeping import Keeper
from infllm_cli.reader import RESERVE_TOKENS, Memory, Reader
from infllm_cli.reading import Source, kept, load_reader, open_memory
from infllm_cli.summarizing import Summarizing
from infllm_cli.summary_options import SummaryOptions
from infllm_cli.telling import distinct_4grams
from infllm_cli.told import as_json, json_line, passage_as_json, peak_bytes
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.console import Console


@dataclass(frozen=True)
class SummarizeRequest:
    """What the user asked for."""

    source: Source
    options: SummaryOptions = field(default_factory=SummaryOptions)
    evidence: int = 0
    as_json: bool = False


def run_summarize(request: SummarizeRequest, console: Console, out: TextIO) -> None:
    """Read, summarize, print.

    Raises:
        InfllmError: see the modules; nothing is left half-written.
        Interrupted: the summary was stopped; nothing has been written.
    """
    if request.evidence < 0:
        raise UsageError(f"--evidence is {request.evidence}; it is a number of passages.")
    source = request.source
    reader = load_reader(source, console)
    memory = open_memory(source, reader, console, RESERVE_TOKENS)
    with kept(source, reader, memory, console) as keeper:
        console.stage("summarizing")
        summary, passes = _summarize(reader, memory, request.options, console)
        console.close()
        if request.as_json:
            told = summary_as_json(reader, memory, keeper, summary, passes, request.evidence)
            out.write(json_line(told, out))
        else:
            safe = visible if out.isatty() else str
            out.write(safe(summary.text) + "\n")
        out.flush()
        console.summary_evidence(summary, request.evidence)
        console.report_summary(reader, memory, summary, peak_bytes(reader, memory))


def _summarize(
    reader: Reader, memory: Memory, options: SummaryOptions, console: Console
) -> tuple[Summary, list[PassDone]]:
    passes: list[PassDone] = []
    summary = None
    steps = Summarizing(reader, memory, options).steps()
    collector.wake()
    try:
        for event in steps:
            if isinstance(event, PieceTold):
                console.piece_told(event)
            elif isinstance(event, PassDone):
                passes.append(event)
                console.pass_done(event)
            else:
                summary = event
    except KeyboardInterrupt:
        steps.close()
        console.close()
        console.note("interrupted; the memory is kept, nothing of the summary is.")
        raise Interrupted from None
    assert summary is not None
    return summary, passes


def summary_as_json(
    reader: Reader,
    memory: Memory,
    keeper: Keeper | None,
    summary: Summary,
    passes: list[PassDone],
    evidence: int,
) -> dict[str, Any]:
    """The object that `--json` prints."""
    document = memory.document
    told = as_json(reader, memory, keeper, [], 0)
    del told["answers"]
    most = evidence or len(summary.evidence)
    told["summary"] = {
        "text": summary.text,
        "words": len(summary.text.split()),
        "wording": "quoted" if summary.quoted else "own",
        "seconds": round(summary.seconds, 3),
        "truncated": False,
        "parts": len(summary.parts),
        "parts_told": len(summary.told),
        "distinct_4grams": round(distinct_4grams(summary.text), 3),
        "evidence": [passage_as_json(passage, document) for passage in summary.evidence[:most]],
        "passes": [
            {
                "inputs": done.inputs,
                "outputs": done.outputs,
                "words_in": done.words_in,
                "words_out": done.words_out,
            }
            for done in passes
        ],
    }
    told["parts"] = [
        {
            "title": part.title,
            "file": part.file or (part.title if part.is_file else document.name),
            "lines": list(part.lines),
            "tokens": sum(piece.last - piece.first for piece in part.pieces),
            "summary": digest.text,
            "wording": "quoted" if digest.quoted else "own",
            "evidence": [passage_as_json(passage, document) for passage in digest.evidence],
        }
        for part, digest in zip(summary.parts, summary.digests, strict=True)
    ]
    return told
