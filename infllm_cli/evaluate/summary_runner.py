"""Summarize documents in several ways with the same model, and count what came out."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import transformers

import infllm_cli
from infllm_cli import collector
from infllm_cli.document import Document
from infllm_cli.errors import UsageError
from infllm_cli.evaluate.flags import at_least
from infllm_cli.evaluate.grid import Deadline, TimeIsUp
from infllm_cli.evaluate.measure import tell_found
from infllm_cli.evaluate.results import Results, Row, key_of
from infllm_cli.evaluate.summary_scores import Scorer
from infllm_cli.evaluate.summary_ways import Summarizers, Way, Written
from infllm_cli.models import encoders
from infllm_cli.parts import parts_for
from infllm_cli.reading import Source, kept, load_reader, open_memory
from infllm_cli.table_view import write_table
from infllm_cli.told import json_line
from infllm_cli.wording import duration

if TYPE_CHECKING:
    from infllm_cli.commands.groups import RecallFlags
    from infllm_cli.console import Console


@dataclass(frozen=True)
class SummariesRequest:
    """What the user asked for.

    Attributes:
        sources: the documents, one or more, with the same flags.
        reference: a summary to compare with, of the only document.
        limit_seconds: of each way on each document.
    """

    sources: Sequence[Source]
    ways: Sequence[Way]
    words: int
    map_tokens: int | None
    recall: RecallFlags
    reference: Document | None = None
    limit_seconds: float | None = None
    output: Path | None = None
    as_json: bool = False


def run_summaries(request: SummariesRequest, console: Console, out: TextIO) -> None:
    """Summarize and measure; a table on `out`, or with `--json` a line for each summary.

    Raises:
        InfllmError: see the modules; what is in `--output` stays there.
    """
    if request.limit_seconds is not None:
        at_least("--limit-seconds", request.limit_seconds, 0)
    if request.reference is not None and len(request.sources) > 1:
        raise UsageError("--reference is a summary of one document; give one FILE with it.")
    encoders.check_name(request.recall.encoder)
    results = Results(request.output)
    reader = load_reader(request.sources[0], console)
    summarizers = Summarizers(
        reader, request.ways, request.words, request.map_tokens, request.recall, console
    )
    rows: list[Row] = []
    for source in request.sources:
        rows += _Comparison(request, source, summarizers, results, console).rows()
    console.close()
    if request.as_json:
        for row in rows:
            out.write(json_line(row, out))
    else:
        write_table(table(rows), out)
    out.flush()


class _Comparison:
    """All ways on one document."""

    def __init__(
        self,
        request: SummariesRequest,
        source: Source,
        summarizers: Summarizers,
        results: Results,
        console: Console,
    ) -> None:
        self.request, self.source, self.console = request, source, console
        self.summarizers, self.results = summarizers, results
        reader = summarizers.reader
        self.memory = open_memory(source, reader, console, summarizers.reserve_tokens)
        self.parts = parts_for(reader, self.memory)
        reference = request.reference
        text = None if reference is None else reference.text
        self.scorer = Scorer(source.document, self.parts, text)
        if reference is not None and not self.scorer.wanted:
            raise UsageError(f"--reference {reference.name} has no word that tells something.")

    def rows(self) -> list[Row]:
        """A row per way, in the order of the ways; those of `--output` are taken from there."""
        cells = {way: key_of(self._identity(way)) for way in self.request.ways}
        missing = [way for way in cells if self.results.get(cells[way]) is None]
        tell_found(self.results, len(cells) - len(missing), len(cells), self.console)
        rows = {way: self.results.get(cell) for way, cell in cells.items()}
        with contextlib.ExitStack() as stack:
            if any(way.needs_memory for way in missing):
                reader = self.summarizers.reader
                stack.enter_context(kept(self.source, reader, self.memory, self.console))
            collector.wake()
            for way in missing:
                rows[way] = self._measure(way, cells[way])
        return [row for row in rows.values() if row is not None]

    def _measure(self, way: Way, cell: str) -> Row:
        name = self.source.document.name
        self.console.stage(f"{name}, {way.value}: summarizing")
        row = self._head(way, cell)
        began = time.perf_counter()
        deadline = Deadline(self.request.limit_seconds)
        try:
            written = self.summarizers.write(way, self.memory, self.parts, deadline.check)
        except TimeIsUp:
            seconds = time.perf_counter() - began
            row |= _stopped(seconds, self.request.limit_seconds)
            self.console.note(f"{name}, {way.value}: {row['error']}")
        else:
            row |= self._scored(written)
            self.console.note(
                f"{name}, {way.value}: {row['words']} words in {duration(written.seconds)}"
            )
        row |= self._tail(way)
        self.results.add(row)
        return row

    # -- rows ---------------------------------------------------------------------------------

    def _identity(self, way: Way) -> dict[str, Any]:
        reference = self.request.reference
        return {
            "document": self.source.document.sha256,
            "way": way.value,
            "settings": self.summarizers.settings(way, self.memory),
            "reference": None if reference is None else reference.sha256,
            "infllm": infllm_cli.__version__,
        }

    def _head(self, way: Way, cell: str) -> Row:
        document = self.source.document
        return {
            "cell": cell,
            "document": document.name,
            "sha256": document.sha256,
            "document_tokens": len(self.memory.tokens),
            "parts": len(self.parts),
            "way": way.value,
        }

    def _scored(self, written: Written) -> Row:
        return {
            "stopped": False,
            "text": written.text,
            "evidence_parts": list(written.evidence),
            "evidence": round(len(written.evidence) / len(self.parts), 3),
            **self.scorer.scores(written.text).as_dict(),
            "seconds": round(written.seconds, 3),
            **written.facts,
        }

    def _tail(self, way: Way) -> Row:
        reference = self.request.reference
        read: Row = {"read_seconds": None, "read_tokens": None, "reused_tokens": None}
        if way.needs_memory:
            read = {
                "read_seconds": round(self.memory.read_seconds, 3),
                "read_tokens": self.memory.read_tokens,
                "reused_tokens": self.memory.reused_tokens,
            }
        return {
            **read,
            "limit_seconds": self.request.limit_seconds,
            "reference": None if reference is None else reference.name,
            "settings": self.summarizers.settings(way, self.memory),
            "versions": {
                "infllm": infllm_cli.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }


def _stopped(seconds: float, limit: float | None) -> Row:
    """What a row tells of a way that took too long; `error` lets the next command try again."""
    measures = ("text", "evidence_parts", "evidence", "words", "spoken_parts", "spoken")
    measures += ("distinct_4grams", "vouched", "content")
    return {
        "stopped": True,
        "error": f"stopped after {duration(seconds)} (--limit-seconds {limit:g}).",
        **dict.fromkeys(measures),
        "seconds": round(seconds, 3),
    }


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Rows of a table, the header first."""
    counts = ["words", "evidence in", "speaks of", "distinct 4-grams", "vouched"]
    with_content = any(row["reference"] is not None for row in rows)
    counts += ["content"] if with_content else []
    found = [["document", "way", *counts, "seconds", "reading"]]
    for row in rows:
        seconds, reading = f"{row['seconds']:.1f}", _reading(row)
        if row["stopped"]:
            cells = ["stopped", *["-"] * (len(counts) - 1)]
            found.append([row["document"], row["way"], *cells, f"> {seconds}", reading])
            continue
        cells = [
            str(row["words"]),
            f"{len(row['evidence_parts'])} of {row['parts']} parts",
            f"{len(row['spoken_parts'])} of {row['parts']} parts",
            _share(row["distinct_4grams"]),
            _share(row["vouched"]),
        ]
        cells += [_share(row["content"])] if with_content else []
        found.append([row["document"], _way(row), *cells, seconds, reading])
    return found


def _way(row: Row) -> str:
    """A way, and what came of it where the text vouched for nothing that the model wrote."""
    fell_back = row["way"] == Way.OWN.value and row["wording"] != row["way"]
    return f"{row['way']} ({row['wording']} instead)" if fell_back else row["way"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _reading(row: Row) -> str:
    """Seconds of reading into the memory, before and for all ways that need it."""
    if row["read_seconds"] is None:
        return "-"
    return "saved" if not row["read_tokens"] else f"{row['read_seconds']:.1f}"
