"""Flags of `infllm eval`. Imports no torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.options import AnsweringChoice


class FormChoice(str, enum.Enum):
    """Choices of `eval --form`."""

    PUBLISHED = "published"
    ASK = "ask"


class SummaryWayChoice(str, enum.Enum):
    """Choices of `eval summaries --way`."""

    QUOTED = "quoted"
    OWN = "own"
    QUESTION_MEMORY = "question-memory"
    QUESTION_BOTH = "question-both"
    MAP_REDUCE = "map-reduce"


JsonLines = Annotated[
    bool, typer.Option("--json", help="The results as lines of JSON on standard output.")
]
GRID = "The grid"
Lengths = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Tokens of a whole context, document, question and answer together: 4k,8k,128k,1m "
        "(k is 1,024).",
        rich_help_panel=GRID,
    ),
]
Depths = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="At how many depths the answer stands, evenly from the beginning to the end.",
        rich_help_panel=GRID,
    ),
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Memory policies side by side: infllm, infllm-paper, dense, streaming-llm, "
        "lm-infinite, h2o, infini.",
        show_default="that of --policy: infllm",
        rich_help_panel=GRID,
    ),
]
Vary = Annotated[
    str | None,
    typer.Option(
        metavar="KNOB=LIST",
        help="A size or knob at several values side by side, as in block=32,64,128 or "
        "relevance=sum,max.",
        show_default="none",
        rich_help_panel=GRID,
    ),
]
Samples = Annotated[
    int,
    typer.Option(metavar="N", help="Drawn anew for each cell.", rich_help_panel=GRID),
]
TaskSeed = Annotated[
    int,
    typer.Option(metavar="N", help="Of what is drawn for the tasks.", rich_help_panel=GRID),
]
EvalAnswering = Annotated[
    AnsweringChoice,
    typer.Option(
        help="memory: what the policy holds, alone; both, passages: as of `infllm ask`.",
        rich_help_panel=GRID,
    ),
]
FormOption = Annotated[
    FormChoice,
    typer.Option(
        help="published: document and question in one message, in the benchmark's words alone; "
        "ask: as `infllm ask` puts them.",
        rich_help_panel=GRID,
    ),
]
LimitSeconds = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Stop after so many seconds of measuring.",
        show_default="none",
        rich_help_panel=GRID,
    ),
]
ResultsFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.jsonl",
        help="Write every cell down as a line of JSON; what stands there already is not measured "
        "again.",
        show_default=False,
        dir_okay=False,
        rich_help_panel=GRID,
    ),
]
HeatmapFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--heatmap",
        metavar="FILE",
        help="Draw the results, as .svg or .png by the name; may be repeated.",
        show_default=False,
        dir_okay=False,
        rich_help_panel=GRID,
    ),
]
