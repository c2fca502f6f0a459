"""The command line: parse, call, print. Imports no torch at its top, so that help is quick."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from infllm_cli import __version__
from infllm_cli.config_file import config_path, load_config
from infllm_cli.errors import Interrupted

EXAMPLES = """\b
Examples:
  infllm ask book.txt "Who is the harpooneer who shares a bed with Ishmael?"
  infllm ask contract.txt "Which law governs?" "What is the notice period?"
  cat notes/*.md | infllm ask - "What was decided about the roof?"
  infllm ask server.log "When did the disk fill up?" --evidence 3
  infllm ask book.txt "Who is Ahab?" --json | jq -r '.answers[0].answer'
"""
EXIT_CODES = """\b
Exit codes: 0 answered, 1 failure while running, 2 usage, 3 document unusable,
4 model unusable, 5 out of memory or disk, 130 interrupted.
"""

app = typer.Typer(
    name="infllm",
    help="Ask questions about documents of any length, on bounded memory.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="List, fetch and describe models.", no_args_is_help=True)
app.add_typer(model_app, name="model", rich_help_panel=None)


class Dtype(str, enum.Enum):
    """Choices of --dtype."""

    AUTO = "auto"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"


class AnsweringChoice(str, enum.Enum):
    """Choices of --answering."""

    BOTH = "both"
    MEMORY = "memory"


FilesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="A further file of the same document; may be repeated.",
        show_default=False,
    ),
]
ADVANCED = "Advanced: sizes of the memory"
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        envvar="INFLLM_MODEL",
        help="A name from `infllm model list`, a hub id, a folder, or a GGUF file.",
        show_default="smollm2-135m",
    ),
]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        envvar="INFLLM_CACHE_DIR",
        help="Where models are kept.",
        show_default="the user's cache folder",
        file_okay=False,
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", "-q", envvar="INFLLM_QUIET", help="Nothing on standard error."),
]


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"infllm {__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Ask questions about documents of any length, on bounded memory."""
    if not {"-h", "--help"} & set(sys.argv):  # help must come whatever the file holds
        values = load_config(config_path())
        models = dict.fromkeys(("list", "pull", "show"), values)
        context.default_map = {"ask": values, "plan": values, "model": models}


@app.command(epilog=EXAMPLES + "\n" + EXIT_CODES)
def ask(
    file: Annotated[str, typer.Argument(help="The document; - is standard input.")],
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION...", help="One or several, on one read."),
    ] = None,
    more_files: FilesOption = None,
    questions_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Further questions, one per line; - is standard input."),
    ] = None,
    model: ModelOption = None,
    device: Annotated[
        str, typer.Option(envvar="INFLLM_DEVICE", help="auto, cpu, cuda, cuda:1, ...")
    ] = "auto",
    dtype: Annotated[
        Dtype, typer.Option(envvar="INFLLM_DTYPE", help="auto: bf16 where it is native.")
    ] = Dtype.AUTO,
    encoding: Annotated[
        str | None, typer.Option(help="Of the document.", show_default="found out")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(envvar="INFLLM_MAX_TOKENS", help="Longest answer, in tokens.")
    ] = 256,
    temperature: Annotated[
        float, typer.Option(envvar="INFLLM_TEMPERATURE", help="0: the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(envvar="INFLLM_TOP_P", help="Draw from the likeliest tokens.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(envvar="INFLLM_SEED", help="Of the draws.")] = 0,
    answering: Annotated[
        AnsweringChoice,
        typer.Option(
            envvar="INFLLM_ANSWERING",
            help="both: the memory, and the best passages read again; memory: the memory alone.",
        ),
    ] = AnsweringChoice.BOTH,
    evidence: Annotated[
        int,
        typer.Option(
            envvar="INFLLM_EVIDENCE",
            metavar="N",
            help="Print the N passages attended most, with lines.",
        ),
    ] = 0,
    stats: Annotated[
        bool, typer.Option("--stats", envvar="INFLLM_STATS", help="Keep the row of every step.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output.")
    ] = False,
    quiet: QuietOption = False,
    cache_dir: CacheOption = None,
    window: Annotated[
        int | None,
        typer.Option(
            envvar="INFLLM_WINDOW", help="Local window, tokens.", rich_help_panel=ADVANCED
        ),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(envvar="INFLLM_SINKS", help="First tokens kept.", rich_help_panel=ADVANCED),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            envvar="INFLLM_BLOCKS", help="Blocks loaded while answering.", rich_help_panel=ADVANCED
        ),
    ] = None,
    read_blocks: Annotated[
        int | None,
        typer.Option(
            envvar="INFLLM_READ_BLOCKS",
            help="Blocks loaded while reading.",
            rich_help_panel=ADVANCED,
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            envvar="INFLLM_CHUNK", help="Tokens per reading step.", rich_help_panel=ADVANCED
        ),
    ] = None,
    reread_tokens: Annotated[
        int,
        typer.Option(
            envvar="INFLLM_REREAD_TOKENS",
            help="Passages read again, tokens.",
            rich_help_panel=ADVANCED,
        ),
    ] = 480,
) -> None:
    """Read FILE once and answer each QUESTION; answers go to standard output."""
    from infllm_cli.console import open_console
    from infllm_cli.files import load_files
    from infllm_cli.questions import gather_questions

    console = open_console(quiet=quiet, keep_rows=stats)
    with console:
        console.stage("starting")
        files = [file, *(more_files or [])]
        asked = gather_questions(questions or [], questions_file, files, _stdin())
        document = load_files(files, _stdin(), encoding, console.note)
        from infllm_cli.ask import AskRequest, run_ask

        request = AskRequest(
            document=document,
            questions=asked,
            model=model,
            device=device,
            dtype=dtype.value,
            cache_dir=cache_dir,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            answering=answering.value,
            reread_tokens=reread_tokens,
            evidence=evidence,
            as_json=as_json,
            sizes={
                "window_tokens": window,
                "sink_tokens": sinks,
                "answer_blocks": blocks,
                "read_blocks": read_blocks,
                "chunk_tokens": chunk,
            },
        )
        try:
            run_ask(request, console, sys.stdout)
        except KeyboardInterrupt:
            console.close()
            console.note("interrupted.")
            raise Interrupted from None


def _stdin() -> BinaryIO | None:
    """Standard input, which a parent process may have closed."""
    return sys.stdin.buffer if sys.stdin is not None else None


def _cache(cache_dir: Path | None) -> Path:
    from infllm_cli.models.catalog import default_cache_dir

    return cache_dir or default_cache_dir()


@model_app.command("list")
def model_list(cache_dir: CacheOption = None) -> None:
    """The models known by name, and those converted here."""
    from infllm_cli.models.catalog import installed

    for model in installed(_cache(cache_dir)):
        size = model.size_bytes if model.present else model.download_bytes
        state = "here" if model.present else "to fetch"
        sys.stdout.write(f"{model.name}\t{state}\t{size / 1e6:.0f} MB\t{model.description}\n")
    sys.stdout.write("Also: a hub id (org/name), a local folder, a GGUF file.\n")


@model_app.command("pull")
def model_pull(
    model: Annotated[str, typer.Argument(help="Name, hub id or GGUF file.")] = "smollm2-135m",
    cache_dir: CacheOption = None,
    quiet: QuietOption = False,
) -> None:
    """Fetch and convert a model, so that the first question need not wait for it."""
    from infllm_cli.console import open_console
    from infllm_cli.models.catalog import resolve

    console = open_console(quiet=quiet)
    with console:
        folder = resolve(model, _cache(cache_dir), console.fetching)
    sys.stdout.write(f"{folder.path}\n")


@model_app.command("show")
def model_show(
    model: Annotated[str, typer.Argument(help="Name, hub id, folder or GGUF file.")],
    cache_dir: CacheOption = None,
) -> None:
    """What is known of a model; fetches nothing."""
    from infllm_cli.models.catalog import describe

    for key, value in describe(model, _cache(cache_dir)).items():
        if value is not None:
            sys.stdout.write(f"{key}\t{value}\n")
