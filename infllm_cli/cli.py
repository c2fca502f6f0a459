"""The command line: parse, call, print. Imports no torch at its top, so that help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from infllm_cli import __version__
from infllm_cli.config_file import config_path, load_config
from infllm_cli.errors import UsageError
from infllm_cli.interrupts import clean_end
from infllm_cli.options import (
    EVAL_EXAMPLES,
    EXAMPLES,
    EXIT_CODES,
    PLAN_EXAMPLES,
    READ_EXAMPLES,
    ROOT_EXAMPLES,
    AnsweringChoice,
    Blocks,
    Cache,
    Candidates,
    Chunk,
    ContrastOption,
    Device,
    DiskLimit,
    Dtype,
    Encoding,
    Files,
    HostLimit,
    Json,
    MemoryBudget,
    Model,
    Precision,
    Quiet,
    ReadBlocks,
    RereadTokens,
    Save,
    Sinks,
    WayChoice,
    Window,
)

if TYPE_CHECKING:
    from infllm_cli.console import Console

ABOUT = "Ask questions about documents of any length, on bounded memory."
ASK = "Read FILE once and answer each QUESTION; answers go to standard output."
EVAL = "Ask questions whose answers are known, in several ways; a table on standard output."
READ = "Read FILE and keep its memory for later questions; prints the memory's key."
PLAN = "What reading FILE would take: tokens, memory by policy, time. Loads no weights."

app = typer.Typer(
    name="infllm",
    help=f"{ABOUT}\n\n{ROOT_EXAMPLES}",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model_app = typer.Typer(help="List, fetch and describe models.", no_args_is_help=True)
memory_app = typer.Typer(help="List, describe and remove saved memories.", no_args_is_help=True)
app.add_typer(model_app, name="model", rich_help_panel=None)
eval_app = typer.Typer(help="Measure answers.", no_args_is_help=True)
app.add_typer(eval_app, name="eval", rich_help_panel=None)
app.add_typer(memory_app, name="memory", rich_help_panel=None)


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
        memories = dict.fromkeys(("list", "show", "rm", "path"), values)
        context.default_map = {
            "ask": values,
            "read": values,
            "plan": values,
            "model": models,
            "memory": memories,
        }


@app.command(help=f"{ASK}\n\n{EXAMPLES}", epilog=EXIT_CODES)
def ask(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The document; - is standard input.")],
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="One or several, on one read."),
    ] = None,
    more_files: Files = None,
    questions_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Further questions, one per line; - is standard input."),
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Precision = Dtype.AUTO,
    encoding: Encoding = None,
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
            help="both: the memory, and the best passages read again; memory: the memory alone; "
            "passages: those with the question's words alone, at once.",
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
    as_json: Json = False,
    quiet: Quiet = False,
    cache_dir: Cache = None,
    host_limit: HostLimit = None,
    disk_limit: DiskLimit = None,
    save: Save = True,
    memory_budget: MemoryBudget = "20GB",
    window: Window = None,
    sinks: Sinks = None,
    blocks: Blocks = None,
    read_blocks: ReadBlocks = None,
    chunk: Chunk = None,
    reread_tokens: RereadTokens = 360,
    candidates: Candidates = 128,
    contrast: ContrastOption = 0.0,
) -> None:
    """Read FILE once and answer each QUESTION; answers go to standard output."""
    from infllm_cli.console import open_console
    from infllm_cli.files import load_files
    from infllm_cli.questions import gather_questions

    console = open_console(quiet=quiet, keep_rows=stats)
    with clean_end(console):
        console.stage("starting")
        files = [file, *(more_files or [])]
        stdin = _stdin(console, *files, questions_file)
        asked = gather_questions(questions or [], questions_file, files, stdin)
        document = load_files(files, stdin, encoding, console.note)
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
            candidates=candidates,
            contrast=contrast,
            evidence=evidence,
            as_json=as_json,
            host_limit=host_limit,
            disk_limit=disk_limit,
            memory_budget=memory_budget,
            save=save,
            sizes=_sizes(window, sinks, blocks, read_blocks, chunk),
        )
        run_ask(request, console, sys.stdout)


@app.command(help=f"{READ}\n\n{READ_EXAMPLES}", epilog=EXIT_CODES)
def read(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The document; - is standard input.")],
    more_files: Files = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Precision = Dtype.AUTO,
    encoding: Encoding = None,
    as_json: Json = False,
    quiet: Quiet = False,
    cache_dir: Cache = None,
    host_limit: HostLimit = None,
    disk_limit: DiskLimit = None,
    memory_budget: MemoryBudget = "20GB",
    window: Window = None,
    sinks: Sinks = None,
    blocks: Blocks = None,
    read_blocks: ReadBlocks = None,
    chunk: Chunk = None,
) -> None:
    """Read FILE and keep its memory."""
    from infllm_cli.console import open_console
    from infllm_cli.files import load_files

    console = open_console(quiet=quiet)
    with clean_end(console):
        console.stage("starting")
        files = [file, *(more_files or [])]
        document = load_files(files, _stdin(console, *files), encoding, console.note)
        from infllm_cli.ask import AskRequest, run_ask
        from infllm_cli.sampling import AnswerOptions

        options = AnswerOptions()
        request = AskRequest(
            document=document,
            questions=[],
            model=model,
            device=device,
            dtype=dtype.value,
            cache_dir=cache_dir,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            answering=options.answering.value,
            reread_tokens=options.reread_tokens,
            candidates=options.candidates,
            contrast=options.contrast,
            evidence=0,
            as_json=as_json,
            host_limit=host_limit,
            disk_limit=disk_limit,
            memory_budget=memory_budget,
            save=True,
            sizes=_sizes(window, sinks, blocks, read_blocks, chunk),
        )
        run_ask(request, console, sys.stdout)


@app.command(help=f"{PLAN}\n\n{PLAN_EXAMPLES}", epilog=EXIT_CODES)
def plan(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE", help="The document; - is standard input.")
    ] = None,
    more_files: Files = None,
    layers: Annotated[
        int | None, typer.Option(help="Of a model that is not here: its layers, ...")
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(help="... its key-value heads, ...")] = None,
    head_dim: Annotated[int | None, typer.Option(help="... and their size.")] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Of a document that is not here.", show_default="a table")
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Precision = Dtype.AUTO,
    encoding: Encoding = None,
    as_json: Json = False,
    quiet: Quiet = False,
    cache_dir: Cache = None,
    window: Window = None,
    sinks: Sinks = None,
    blocks: Blocks = None,
    read_blocks: ReadBlocks = None,
    chunk: Chunk = None,
    host_limit: HostLimit = None,
    disk_limit: DiskLimit = None,
    save: Save = True,
    memory_budget: MemoryBudget = "20GB",
) -> None:
    """Tell what reading a document would take."""
    from infllm_cli.console import open_console
    from infllm_cli.files import load_files

    figures = (layers, kv_heads, head_dim)
    by_figures = any(figure is not None for figure in figures)
    if (file is not None) == by_figures:
        raise UsageError("give a FILE, or --layers, --kv-heads and --head-dim of a model.")
    if file is not None and tokens is not None:
        raise UsageError("--tokens goes with --layers; the tokens of a FILE are counted.")
    sizes = _sizes(window, sinks, blocks, read_blocks, chunk)
    console = open_console(quiet=quiet)
    with clean_end(console):
        console.stage("counting")
        document = None
        if file is not None:
            files = [file, *(more_files or [])]
            document = load_files(files, _stdin(console, *files), encoding, console.note)
        from infllm_cli import plan as planning
        from infllm_cli.limits import parse_limits

        if document is not None:
            plans = [
                planning.plan_document(
                    document,
                    model=model,
                    cache_dir=cache_dir,
                    device=device,
                    dtype=dtype.value,
                    sizes=sizes,
                    limits=parse_limits(host_limit, disk_limit, memory_budget, save),
                    progress=console.fetching,
                )
            ]
        else:
            plans = [
                planning.plan_shape(*figures, tokens=count, dtype=dtype.value, sizes=sizes)
                for count in ([tokens] if tokens is not None else planning.TABLE_TOKENS)
            ]
    sys.stdout.write(planning.render(plans, as_json=as_json))


def _sizes(
    window: int | None,
    sinks: int | None,
    blocks: int | None,
    read_blocks: int | None,
    chunk: int | None,
) -> dict[str, int | None]:
    return {
        "window_tokens": window,
        "sink_tokens": sinks,
        "answer_blocks": blocks,
        "read_blocks": read_blocks,
        "chunk_tokens": chunk,
    }


def _stdin(console: Console, *paths: str | None) -> BinaryIO | None:
    """Standard input, which a parent process may have closed; a person is told that it is read."""
    if sys.stdin is None:
        return None
    if "-" in paths and sys.stdin.isatty():
        console.close()
        console.note("type or paste the text, then Ctrl-D on a line of its own.")
    return sys.stdin.buffer


def _cache(cache_dir: Path | None) -> Path:
    from infllm_cli.models.catalog import default_cache_dir

    return cache_dir or default_cache_dir()


@eval_app.command("questions", help=f"{EVAL}\n\n{EVAL_EXAMPLES}", epilog=EXIT_CODES)
def eval_questions(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.json",
            help="A list of objects: document (a file beside the list), question, answer (a "
            "regular expression), passage (text the answer follows from), kind.",
        ),
    ],
    answering: Annotated[
        list[WayChoice] | None,
        typer.Option(help="May be repeated.", show_default="all four"),
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option("--document", metavar="NAME", help="Only these; may be repeated."),
    ] = None,
    model: Model = None,
    device: Device = "auto",
    dtype: Precision = Dtype.AUTO,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 48,
    reread_tokens: RereadTokens = 360,
    candidates: Candidates = 128,
    contrast: ContrastOption = 0.0,
    as_json: Json = False,
    quiet: Quiet = False,
    cache_dir: Cache = None,
    window: Window = None,
    sinks: Sinks = None,
    blocks: Blocks = None,
    read_blocks: ReadBlocks = None,
    chunk: Chunk = None,
) -> None:
    """Ask questions whose answers are known, in several ways; print a table."""
    from infllm_cli.console import open_console
    from infllm_cli.evaluate.questions import load_questions

    console = open_console(quiet=quiet)
    with clean_end(console):
        console.stage("starting")
        questions = load_questions(file, only=documents)
        from infllm_cli.evaluate.runner import EvalRequest, run_eval

        request = EvalRequest(
            questions=questions,
            ways=[way.value for way in answering or WayChoice],
            model=model,
            device=device,
            dtype=dtype.value,
            cache_dir=cache_dir,
            max_tokens=max_tokens,
            reread_tokens=reread_tokens,
            candidates=candidates,
            contrast=contrast,
            as_json=as_json,
            sizes=_sizes(window, sinks, blocks, read_blocks, chunk),
        )
        run_eval(request, console, sys.stdout)


@model_app.command("list")
def model_list(cache_dir: Cache = None) -> None:
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
    cache_dir: Cache = None,
    quiet: Quiet = False,
) -> None:
    """Fetch and convert a model, so that the first question need not wait for it."""
    from infllm_cli.console import open_console
    from infllm_cli.models.catalog import resolve

    console = open_console(quiet=quiet)
    with clean_end(console):
        folder = resolve(model, _cache(cache_dir), console.fetching)
    sys.stdout.write(f"{folder.path}\n")


@model_app.command("show")
def model_show(
    model: Annotated[str, typer.Argument(help="Name, hub id, folder or GGUF file.")],
    cache_dir: Cache = None,
) -> None:
    """What is known of a model; fetches nothing."""
    from infllm_cli.models.catalog import describe

    for key, value in describe(model, _cache(cache_dir)).items():
        if value is not None:
            sys.stdout.write(f"{key}\t{value}\n")


Key = Annotated[str, typer.Argument(metavar="KEY", help="The beginning of a key suffices.")]


@memory_app.command("list")
def memory_list(cache_dir: Cache = None) -> None:
    """The saved memories, the last used first."""
    from infllm_cli import memories

    sys.stdout.write(memories.listing(_cache(cache_dir)))


@memory_app.command("show")
def memory_show(key: Key, cache_dir: Cache = None) -> None:
    """What is known of a saved memory; checks its files."""
    from infllm_cli import memories

    sys.stdout.write(memories.description(_cache(cache_dir), key))


@memory_app.command("rm")
def memory_rm(
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY...")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    cache_dir: Cache = None,
) -> None:
    """Remove saved memories."""
    from infllm_cli import memories

    memories.remove(_cache(cache_dir), keys or [], every=every)


@memory_app.command("path")
def memory_path(
    key: Annotated[str | None, typer.Argument(metavar="KEY")] = None, cache_dir: Cache = None
) -> None:
    """The folder of a saved memory, or of all."""
    from infllm_cli import memories

    sys.stdout.write(f"{memories.path(_cache(cache_dir), key)}\n")
