"""Flags of the commands, and the texts of their help. Imports no torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from infllm_cli.memory.knobs import (
    CachePolicy,
    InfiniGates,
    InfiniUpdate,
    Lookup,
    Policy,
    Positions,
    Relevance,
    RepresentativeRule,
    Sharing,
)

EXIT_CODES = """\b
Exit codes: 0 answered, 1 failure while running, 2 usage, 3 document unusable,
4 model unusable, 5 out of memory or disk, 130 interrupted.
"""


class Dtype(str, enum.Enum):
    """Choices of --dtype."""

    AUTO = "auto"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


class StoreChoice(str, enum.Enum):
    """Choices of --store."""

    FULL = "full"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


class AnsweringChoice(str, enum.Enum):
    """Choices of --answering."""

    BOTH = "both"
    MEMORY = "memory"
    PASSAGES = "passages"


class LengthChoice(str, enum.Enum):
    """Choices of `summarize --length`."""

    SHORT = "short"
    MEDIUM = "medium"
    LONG = "long"


class WordingChoice(str, enum.Enum):
    """Choices of `summarize --wording`."""

    AUTO = "auto"
    OWN = "own"
    QUOTED = "quoted"


class QuoteChoice(str, enum.Enum):
    """Choices of --quote."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class FormChoice(str, enum.Enum):
    """Choices of `eval --form`."""

    PUBLISHED = "published"
    ASK = "ask"


class WayChoice(str, enum.Enum):
    """Choices of `eval questions --answering`."""

    BOTH = "both"
    MEMORY = "memory"
    PASSAGES = "passages"
    DENSE = "dense"


File = Annotated[str, typer.Argument(metavar="FILE", help="The document; - is standard input.")]
Files = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="A further file of the same document; may be repeated.",
        show_default=False,
    ),
]


def _model_names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    from infllm_cli.models.catalog import default_cache_dir, installed

    names = [model.name for model in installed(default_cache_dir())]
    return [name for name in names if name.startswith(incomplete)]


ADVANCED = "Advanced: sizes of the memory"
METHOD = "Advanced: policies and knobs of the method"
LIMITS = "Limits and saved memories"
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="INFLLM_MODEL",
        help="A name from `infllm model list`, a hub id, a folder, or a GGUF file.",
        show_default="smollm2-135m",
        autocompletion=_model_names,
    ),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="INFLLM_CACHE_DIR",
        help="Where models and saved memories are kept.",
        show_default="the user's cache folder",
        file_okay=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="INFLLM_QUIET", help="Nothing on standard error."),
]
Device = Annotated[str, typer.Option(envvar="INFLLM_DEVICE", help="auto, cpu, cuda, cuda:1, ...")]
Precision = Annotated[
    Dtype, typer.Option("--dtype", envvar="INFLLM_DTYPE", help="auto: bf16 where it is native.")
]
Encoding = Annotated[str | None, typer.Option(help="Of the document.", show_default="found out")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
JsonLines = Annotated[
    bool, typer.Option("--json", help="The results as lines of JSON on standard output.")
]
Stats = Annotated[
    bool, typer.Option("--stats", envvar="INFLLM_STATS", help="Keep the row of every step.")
]
EvidenceCount = Annotated[
    int,
    typer.Option(
        "--evidence",
        envvar="INFLLM_EVIDENCE",
        metavar="N",
        help="Print the N passages attended most, with lines.",
    ),
]
EvidenceHtml = Annotated[
    Path | None,
    typer.Option(
        "--evidence-html",
        metavar="FILE",
        help="Write a page that shows where each token of the answers looked, with the text.",
        show_default=False,
        dir_okay=False,
    ),
]
HeatmapFile = Annotated[
    Path | None,
    typer.Option(
        "--heatmap",
        metavar="FILE.svg",
        help="Write the same as a picture.",
        show_default=False,
        dir_okay=False,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(envvar="INFLLM_MAX_TOKENS", help="Longest answer, in tokens.")
]
Temperature = Annotated[
    float, typer.Option(envvar="INFLLM_TEMPERATURE", help="0: the likeliest token.")
]
TopP = Annotated[float, typer.Option(envvar="INFLLM_TOP_P", help="Draw from the likeliest tokens.")]
Seed = Annotated[int, typer.Option(envvar="INFLLM_SEED", help="Of the draws.")]
AnsweringOption = Annotated[
    AnsweringChoice | None,
    typer.Option(
        "--answering",
        envvar="INFLLM_ANSWERING",
        help="both: the memory, and the best passages read again; memory: the memory alone; "
        "passages: those with the question's words alone, at once.",
        show_default="both; memory with any --policy but infllm",
    ),
]
Length = Annotated[
    LengthChoice,
    typer.Option("--length", envvar="INFLLM_LENGTH", help="About 60, 150 or 400 words."),
]
WordingOption = Annotated[
    WordingChoice,
    typer.Option(
        "--wording",
        envvar="INFLLM_WORDING",
        help="own: the model's words, as far as the text vouches for them; quoted: the document's "
        "own sentences; auto: quoted for models below a billion parameters.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.infllm",
        help="Write the memory to a file as well, which can be moved and asked.",
        show_default=False,
    ),
]
Window = Annotated[
    int | None,
    typer.Option(envvar="INFLLM_WINDOW", help="Local window, tokens.", rich_help_panel=ADVANCED),
]
Sinks = Annotated[
    int | None,
    typer.Option(envvar="INFLLM_SINKS", help="First tokens kept.", rich_help_panel=ADVANCED),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_BLOCKS", help="Blocks loaded while answering.", rich_help_panel=ADVANCED
    ),
]
ReadBlocks = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_READ_BLOCKS", help="Blocks loaded while reading.", rich_help_panel=ADVANCED
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(envvar="INFLLM_CHUNK", help="Tokens per reading step.", rich_help_panel=ADVANCED),
]
PolicyOption = Annotated[
    Policy | None,
    typer.Option(
        "--policy",
        envvar="INFLLM_POLICY",
        help="What is kept of the document, and what of it is attended.",
        show_default="infllm",
        rich_help_panel=METHOD,
    ),
]
Block = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_BLOCK",
        min=32,
        max=256,
        help="Tokens of a block.",
        show_default="128",
        rich_help_panel=METHOD,
    ),
]
Representatives = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_REPRESENTATIVES",
        min=1,
        max=16,
        help="Keys that stand for a block.",
        show_default="4",
        rich_help_panel=METHOD,
    ),
]
RepresentativeRuleOption = Annotated[
    RepresentativeRule | None,
    typer.Option(
        "--representative-rule",
        envvar="INFLLM_REPRESENTATIVE_RULE",
        help="Which: those that the following tokens look at most, by products or by attention "
        "mass; the mean of all; those that cover the block; every so many-th.",
        show_default="dot; of infllm-paper attention",
        rich_help_panel=METHOD,
    ),
]
RelevanceOption = Annotated[
    Relevance | None,
    typer.Option(
        "--relevance",
        envvar="INFLLM_RELEVANCE",
        help="What blocks are ranked by: the sum or the best of products, or attention mass.",
        show_default="auto: sum for representatives, mass for exact lookup",
        rich_help_panel=METHOD,
    ),
]
SharingOption = Annotated[
    Sharing | None,
    typer.Option(
        "--sharing",
        envvar="INFLLM_SHARING",
        help="Who loads the same blocks.",
        show_default="kv-head; of infllm-paper layer",
        rich_help_panel=METHOD,
    ),
]
PositionsOption = Annotated[
    Positions | None,
    typer.Option(
        "--positions",
        envvar="INFLLM_POSITIONS",
        help="Where sinks and blocks stand: before the window, or all one window away.",
        show_default="consecutive; of infllm-paper same-distance",
        rich_help_panel=METHOD,
    ),
]
ReadLookup = Annotated[
    Lookup | None,
    typer.Option(
        envvar="INFLLM_READ_LOOKUP",
        help="How blocks are found while reading.",
        show_default="representatives",
        rich_help_panel=METHOD,
    ),
]
AnswerLookup = Annotated[
    Lookup | None,
    typer.Option(
        envvar="INFLLM_ANSWER_LOOKUP",
        help="The same while asking and answering.",
        show_default="exact; of infllm-paper representatives",
        rich_help_panel=METHOD,
    ),
]
DeviceCacheOption = Annotated[
    int | None,
    typer.Option(
        "--device-cache",
        envvar="INFLLM_DEVICE_CACHE",
        metavar="BLOCKS",
        help="Blocks per KV head and layer that stay on the device between steps.",
        show_default="0: none",
        rich_help_panel=METHOD,
    ),
]
CachePolicyOption = Annotated[
    CachePolicy | None,
    typer.Option(
        "--device-cache-policy",
        envvar="INFLLM_DEVICE_CACHE_POLICY",
        help="Which of them leaves first.",
        show_default="lru",
        rich_help_panel=METHOD,
    ),
]
InfiniSegment = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_INFINI_SEGMENT",
        help="Tokens of a segment of infini.",
        show_default="2048, or half the trained length",
        rich_help_panel=METHOD,
    ),
]
InfiniUpdateOption = Annotated[
    InfiniUpdate | None,
    typer.Option(
        "--infini-update",
        envvar="INFLLM_INFINI_UPDATE",
        help="How infini writes a segment into its memory.",
        show_default="delta",
        rich_help_panel=METHOD,
    ),
]
InfiniGatesOption = Annotated[
    InfiniGates | None,
    typer.Option(
        "--infini-gates",
        envvar="INFLLM_INFINI_GATES",
        help="How much heads listen to that memory: see `infllm fit-gates`.",
        show_default="fitted; off where nothing has been fitted",
        rich_help_panel=METHOD,
    ),
]
Store = Annotated[
    StoreChoice,
    typer.Option(
        "--store",
        envvar="INFLLM_STORE",
        help="How keys and values are kept. full: as the model makes them; int8, fp8: about half "
        "of 16 bits; int4: about a quarter.",
        rich_help_panel=LIMITS,
    ),
]
RereadTokens = Annotated[
    int,
    typer.Option(
        envvar="INFLLM_REREAD_TOKENS",
        help="Passages read again, tokens.",
        rich_help_panel=ADVANCED,
    ),
]
Candidates = Annotated[
    int,
    typer.Option(
        envvar="INFLLM_CANDIDATES",
        help="Passages that the model judges by how likely they make the question; 0: words alone "
        "choose what is read again.",
        rich_help_panel=ADVANCED,
    ),
]
Quote = Annotated[
    QuoteChoice,
    typer.Option(
        envvar="INFLLM_QUOTE",
        help="Begin the answer with the sentence of the document that fits the question best; "
        "auto: where the model is small (below a billion parameters).",
    ),
]
HostLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        envvar="INFLLM_HOST_LIMIT",
        help="Most host memory for keys and values, as in 16GB; what passes it moves to disk.",
        show_default="half of what is free",
        rich_help_panel=LIMITS,
    ),
]
DiskLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        envvar="INFLLM_DISK_LIMIT",
        help="Most disk for the keys and values of this document.",
        show_default="what is free, less a reserve",
        rich_help_panel=LIMITS,
    ),
]
AllowDrop = Annotated[
    bool,
    typer.Option(
        "--allow-drop",
        help="Give up the least used blocks of a document that RAM and disk do not hold, instead "
        "of refusing it.",
        rich_help_panel=LIMITS,
    ),
]
Save = Annotated[
    bool,
    typer.Option(
        "--save/--no-save",
        envvar="INFLLM_SAVE",
        help="Keep the memory of the document for the next question.",
        rich_help_panel=LIMITS,
    ),
]
MemoryBudget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        envvar="INFLLM_MEMORY_BUDGET",
        help="Most disk for all saved memories; the least recently used go first.",
        rich_help_panel=LIMITS,
    ),
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
