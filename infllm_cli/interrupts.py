"""Ctrl-C: the first one stops cleanly, the second at once. And a reader of our output that left."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from infllm_cli.errors import Interrupted, OutputClosed

if TYPE_CHECKING:
    from infllm_cli.console import Console

LATER_SECONDS = 0.01
SHOW_CURSOR = "\x1b[?25h"  # a live display hides it


@contextlib.contextmanager
def two_stages() -> Iterator[None]:
    """Let a second Ctrl-C end the process without waiting for what the first one began.

    Where the parent process ignores interrupts (`nohup`, a script's background job), they stay
    ignored.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        # After a first Ctrl-C the process is about to end: a second one still ends it at once.
        if signal.getsignal(signal.SIGINT) is _first:
            signal.signal(signal.SIGINT, before)


def rearm() -> None:
    """After a Ctrl-C that ended nothing but an answer: the next one is a first one again."""
    if signal.getsignal(signal.SIGINT) is _second:
        signal.signal(signal.SIGINT, _first)


def _first(number: int, frame: FrameType | None) -> None:
    if _is_finalizing(frame):
        # Python swallows what is raised there: it comes again when that is over.
        again = threading.Timer(LATER_SECONDS, signal.raise_signal, [number])
        again.daemon = True
        again.start()
        return
    signal.signal(signal.SIGINT, _second)
    raise KeyboardInterrupt


def _is_finalizing(frame: FrameType | None) -> bool:
    """Whether an object's end is what was interrupted."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _second(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), f"{SHOW_CURSOR}\n".encode())
    os._exit(Interrupted.exit_code)


@contextlib.contextmanager
def clean_end(console: Console) -> Iterator[None]:
    """Run a command with its console: whatever ends it, the display is taken away first.

    Raises:
        Interrupted: instead of KeyboardInterrupt.
        OutputClosed: instead of BrokenPipeError.
    """
    try:
        with console:
            yield
    except KeyboardInterrupt:
        console.note("interrupted.")
        raise Interrupted from None
    except BrokenPipeError:
        raise OutputClosed from None
