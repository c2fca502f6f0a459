"""When does the garbage collector rest?

From the start to the first thing that a command has to show. Torch and transformers make a million
objects that stay to the end, over which it would walk again and again: that takes a fifth of the
imports' time, and one more walk when it is woken.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """Let it rest until `wake`, at the latest to the end of the block."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def wake() -> None:
    """Let it work again; what the imports left over goes now, and not while something is written.

    What is there is not frozen: libraries would take it for leaked at the end, and say so.
    """
    if not gc.isenabled():
        gc.enable()
        gc.collect()
