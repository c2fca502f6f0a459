"""Ctrl-C: the first one stops cleanly, the second at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

from infllm_cli.errors import Interrupted

SHOW_CURSOR = "\x1b[?25h"  # a live display hides it


def install() -> None:
    """Let a second Ctrl-C end the process without waiting for what the first one began.

    Where the parent process ignores interrupts (`nohup`, a script's background job), they stay
    ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _first)


def _first(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _second)
    raise KeyboardInterrupt


def _second(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), f"{SHOW_CURSOR}\n".encode())
    os._exit(Interrupted.exit_code)
