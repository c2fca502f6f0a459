"""The first line on standard error, before anything slow is imported.

Importing Typer takes as long as all the rest until then, and nobody should wonder whether the
command has been started at all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

# What the live display of a terminal begins with. The cursor stays at the line's beginning, so that
# the display, or an error that comes before it, takes its place; each of them is longer.
ON_TERMINALS = "\u280b starting ...\r"
COMMANDS = {"ask", "read", "summarize", "chat"}
_SILENT = {"--quiet", "--help"}
_SILENT_LETTERS = set("qh")


def say_first_line(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Say that the command starts, where that is sure to be wanted; returns whether a line stays.

    On a terminal none does: the live display says it once more. What cannot be told here without
    reading all flags as Typer does is left to the command.
    """
    if not arguments or arguments[0] not in COMMANDS:
        return False
    if "INFLLM_QUIET" in environment or any(map(_may_silence, arguments)) or _has_config():
        return False
    if sys.stderr.isatty() and environment.get("TERM") != "dumb":
        with contextlib.suppress(UnicodeEncodeError):
            sys.stderr.write(ON_TERMINALS)
            sys.stderr.flush()
        return False
    from infllm_cli.console import open_console

    open_console().stage("starting")
    return True


def _may_silence(argument: str) -> bool:
    if argument.startswith("--"):
        return argument.split("=")[0] in _SILENT
    # Letters can stand together, as in `-qm MODEL`.
    return argument.startswith("-") and bool(_SILENT_LETTERS & set(argument))


def _has_config() -> bool:
    """The file may ask for silence, or hold a mistake that comes first."""
    from infllm_cli.config_file import config_path

    return config_path().exists()
