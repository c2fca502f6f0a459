"""A command on a pseudo-terminal, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pyte
from forked import Child


@dataclass
class Session:
    """What a command wrote to its terminal.

    Attributes:
        pieces: seconds since the start, and bytes, as they came.
    """

    code: int
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def lines(self, columns: int, rows: int) -> list[str]:
        """Every line that stands on the screen or has left it upwards, in order."""
        screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        pyte.ByteStream(screen).feed(self.raw)
        gone = [
            "".join(line[column].data for column in range(columns)).rstrip()
            for line in screen.history.top
        ]
        return gone + [line.rstrip() for line in screen.display]


def on_terminal(
    start: Callable[[int], Child],
    *,
    columns: int = 100,
    rows: int = 30,
    when: Callable[[bytes, Child], None] = lambda seen, child: None,
    typing: Callable[[bytes, Child, Callable[[bytes], object]], None] | None = None,
    timeout: float = 60,
) -> Session:
    """Run a command on a terminal.

    Args:
        start: starts it on a terminal's descriptor.
        when: called with all that was written so far after each piece, to interrupt.
        typing: the same with a function that types.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    began = time.perf_counter()
    child = start(follower)
    os.close(follower)
    session = Session(0)
    try:
        while True:
            left = began + timeout - time.perf_counter()
            if left <= 0 or not select.select([leader], [], [], left)[0]:
                child.kill()
                raise TimeoutError(session.raw)
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            session.pieces.append((time.perf_counter() - began, piece))
            when(session.raw, child)
            if typing is not None:
                typing(session.raw, child, lambda keys: os.write(leader, keys))
    finally:
        os.close(leader)
    session.code = child.wait(timeout)
    return session
