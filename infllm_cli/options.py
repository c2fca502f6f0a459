"""Flags of the commands, and the texts of their help. Imports no torch."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

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

    AUTO = "auto"
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
Device = Annotated[
    str,
    typer.Option(
        envvar="INFLLM_DEVICE",
        help="auto, cpu, cuda, cuda:1, gpus (the layers spread over all), ...",
    ),
]
Precision = Annotated[
    Dtype, typer.Option("--dtype", envvar="INFLLM_DTYPE", help="auto: bf16 where it is native.")
]
Encoding = Annotated[str | None, typer.Option(help="Of the document.", show_default="found out")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
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
ScanEvery = Annotated[
    int,
    typer.Option(
        envvar="INFLLM_SCAN_EVERY",
        help="Scan all of a long memory at every so many answer tokens; in between choose among "
        "the blocks that were best. 0: 2 from 24K tokens on where C does it, else 1.",
        rich_help_panel=ADVANCED,
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(envvar="INFLLM_CHUNK", help="Tokens per reading step.", rich_help_panel=ADVANCED),
]
Store = Annotated[
    StoreChoice,
    typer.Option(
        "--store",
        envvar="INFLLM_STORE",
        help="How keys and values are kept. full: as the model makes them; int8, fp8: about half "
        "of 16 bits; int4: about a quarter. auto: int8, or int4 where only that fits the limits.",
        rich_help_panel=LIMITS,
    ),
]
RereadTokens = Annotated[
    int | None,
    typer.Option(
        envvar="INFLLM_REREAD_TOKENS",
        help="Passages read again, tokens.",
        show_default="480; 960 for models from 300M parameters on",
        rich_help_panel=ADVANCED,
    ),
]
Candidates = Annotated[
    int,
    typer.Option(
        envvar="INFLLM_CANDIDATES",
        help="With --encoder off, of a document with up to so many passages: the model judges "
        "each by how likely it makes the question, where its words leave that open.",
        rich_help_panel=ADVANCED,
    ),
]
Encoder = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        envvar="INFLLM_ENCODER",
        help="The sentence encoder that finds what is asked in other words than the text's: its "
        "name, a folder or a hub id in the form of sentence-transformers, or off. Fetched "
        "(84 MB) when a question first needs it.",
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
DeviceLimit = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        envvar="INFLLM_DEVICE_LIMIT",
        help="Most memory of each GPU for copies of stored keys, which an answer scans; where they "
        "do not fit they are scanned in host memory, or streamed.",
        show_default="half of what is free there",
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
