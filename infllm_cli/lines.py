"""The lines of a conversation: typed with editing and history, or from a pipe. Imports no torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PROMPT = "? "
MOST_HISTORY = 1000


def history_path() -> Path:
    """Where earlier questions are remembered, by the platform's rules."""
    import platformdirs

    return platformdirs.user_state_path("infllm") / "history"


def lines(rearm: Callable[[], None]) -> Iterator[str]:
    """Line after line until the input ends.

    Ctrl-C at the prompt gives up the line, and `rearm` is called: the conversation goes on.
    """
    if sys.stdin is None:
        return
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    read = _edited if sys.stdout.isatty() else _plain
    with _history() if read is _edited else contextlib.nullcontext():
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                rearm()
                continue
            if line is None:
                sys.stderr.write("\n")
                return
            yield line


def _edited() -> str | None:
    """With editing, which writes to the terminal that standard output is."""
    try:
        return input(PROMPT)
    except EOFError:
        return None


def _plain() -> str | None:
    """Where standard output goes elsewhere, the prompt must not."""
    sys.stderr.write(PROMPT)
    sys.stderr.flush()
    return sys.stdin.readline() or None


@contextlib.contextmanager
def _history() -> Iterator[None]:
    try:
        import readline
    except ImportError:  # not on every platform
        yield
        return
    path = history_path()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MOST_HISTORY)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
