"""`infllm eval TASK`: documents made for measuring, and questions whose answers are known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infllm_cli.commands.groups import TaskFlags, grouped
from infllm_cli.commands.shared import open_started
from infllm_cli.interrupts import clean_end
from infllm_cli.options import EXIT_CODES

if TYPE_CHECKING:
    from infllm_cli.evaluate.tasks.base import Task

DocumentFile = Annotated[
    Path | None,
    typer.Option(
        "--document",
        metavar="FILE",
        help="The text that things are hidden in; repeated where it is too short.",
        show_default="the sample story",
        dir_okay=False,
    ),
]


@grouped
def passkey(
    context: typer.Context,
    flags: TaskFlags = TaskFlags(),  # noqa: B008  frozen; `grouped` takes it apart
) -> None:
    """A five-digit key in repeated filler (InfiniteBench)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.tasks import filler

        return [filler.passkey()]

    _run(context, tasks, flags)


@grouped
def number(
    context: typer.Context,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """Ten digits, half of them repeated, in repeated filler (InfiniteBench)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.tasks import filler

        return [filler.number()]

    _run(context, tasks, flags)


@grouped
def kv(
    context: typer.Context,
    prompts: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="NAME",
            help="official: the key behind the object; key-first: before it, too, which needs a "
            "reading for each depth. May be repeated.",
            show_default="official",
        ),
    ] = None,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """The value of a key in a JSON object of UUIDs (Lost in the Middle, InfiniteBench)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.flags import check_names
        from infllm_cli.evaluate.tasks.kv import OFFICIAL, PROMPTS
        from infllm_cli.evaluate.tasks.kv import kv as task

        return [task(name) for name in check_names("--prompt", prompts or [OFFICIAL], PROMPTS)]

    _run(context, tasks, flags)


@grouped
def needle(
    context: typer.Context,
    document: DocumentFile = None,
    wording: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="varied: each needle says something else; magic: the special magic number of a "
            "city, the published wording.",
        ),
    ] = "varied",
    apart: Annotated[
        bool,
        typer.Option(
            "--apart", help="A document for each depth, as published, instead of one for all."
        ),
    ] = False,
    begun: Annotated[
        bool,
        typer.Option(
            "--begun/--unaided",
            help='Whether the model goes on from the beginning of an answer ("The password is"); '
            "as published it does not.",
        ),
    ] = True,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """A sentence hidden in a document, at every depth (Kamradt)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.flags import check_names
        from infllm_cli.evaluate.tasks.haystack import Haystack
        from infllm_cli.evaluate.tasks.needle import WORDINGS
        from infllm_cli.evaluate.tasks.needle import needle as task

        (name,) = check_names("--wording", [wording], WORDINGS)
        return [task(Haystack.load(document), name, apart=apart, begun=begun)]

    _run(context, tasks, flags)


@grouped
def ruler(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="niah_single_1 to _3, niah_multikey_1 to _3, niah_multivalue, niah_multiquery, "
            "vt, cwe, fwe.",
            show_default="all",
        ),
    ] = None,
    document: DocumentFile = None,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """Needles of eight kinds, variables, common and frequent words (RULER)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.flags import check_names
        from infllm_cli.evaluate.tasks.ruler import NAMES
        from infllm_cli.evaluate.tasks.ruler import ruler as family

        return family(check_names("ruler", names or NAMES, NAMES), document)

    _run(context, tasks, flags)


@grouped
def lines(
    context: typer.Context,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """The content of a named line in a record (LongEval)."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.tasks import lines as module

        return [module.lines()]

    _run(context, tasks, flags)


@grouped
def order(
    context: typer.Context,
    document: DocumentFile = None,
    segment_words: Annotated[
        int, typer.Option(metavar="N", help="Words of a passage: 20 or 50.")
    ] = 50,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """Which of two passages came first (SORT); --samples pairs, guessing scores one half."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.flags import check_names
        from infllm_cli.evaluate.tasks import order as module
        from infllm_cli.evaluate.tasks.haystack import Haystack

        sizes_known = [str(words) for words in module.SEGMENT_WORDS]
        check_names("--segment-words", [str(segment_words)], sizes_known)
        return [module.order(Haystack.load(document), segment_words)]

    _run(context, tasks, flags)


@grouped
def oracle(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Option("--task", metavar="NAME", help="passkey, number, kv, needle or lines."),
    ] = "needle",
    document: DocumentFile = None,
    flags: TaskFlags = TaskFlags(),  # noqa: B008
) -> None:
    """The share of exact attention that each lookup captures, by layer; generates nothing."""

    def tasks() -> Sequence[Task]:
        from infllm_cli.evaluate.flags import check_names
        from infllm_cli.evaluate.tasks import filler
        from infllm_cli.evaluate.tasks.haystack import Haystack
        from infllm_cli.evaluate.tasks.kv import kv
        from infllm_cli.evaluate.tasks.lines import lines
        from infllm_cli.evaluate.tasks.needle import needle

        known: dict[str, Callable[[], Task]] = {
            "passkey": filler.passkey,
            "number": filler.number,
            "kv": kv,
            "needle": lambda: needle(Haystack.load(document)),
            "lines": lines,
        }
        check_names("--task", [name], list(known))
        return [known[name]()]

    _run(context, tasks, flags, measures_lookups=True)


def _run(
    context: typer.Context,
    tasks: Callable[[], Sequence[Task]],
    flags: TaskFlags,
    measures_lookups: bool = False,
) -> None:
    """Measure; what a flag says wrongly is told before the model is loaded."""
    console = open_started(context, quiet=flags.quiet)
    with clean_end(console):
        wanted = tasks()
        from infllm_cli.evaluate.measure import measure

        measure(wanted, flags, console, sys.stdout, oracle=measures_lookups)


EXAMPLES = {
    passkey: "infllm eval passkey --lengths 4k,8k --depths 5 -o results.jsonl",
    number: "infllm eval number --lengths 8k,32k --depths 11",
    kv: "infllm eval kv --lengths 4k --prompt official --prompt key-first",
    needle: "infllm eval needle --document novel.txt --lengths 8k,32k,128k --heatmap map.svg",
    ruler: "infllm eval ruler niah_multikey_2 vt --lengths 8k --samples 5",
    lines: "infllm eval lines --lengths 4k,8k --depths 11",
    oracle: "infllm eval oracle --task needle --lengths 8k --policies infllm,infllm-paper",
    order: "infllm eval order --document novel.txt --lengths 32k --samples 40",
}


def add_to(group: typer.Typer) -> None:
    """Add the tasks to `infllm eval`."""
    for command, example in EXAMPLES.items():
        about = f"{command.__doc__}\n\n\b\nExample:\n  {example}\n"
        group.command(command.__name__, help=about, epilog=EXIT_CODES)(command)
