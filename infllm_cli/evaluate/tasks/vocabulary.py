"""English words for tasks that need many: those that RULER draws from (package `wonderwords`)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import resources
from random import Random

from infllm_cli.errors import UsageError

WANTED = 'pip install "infllm-cli[eval]"'


@functools.cache
def nouns() -> tuple[str, ...]:
    """Sorted."""
    return _words("nounlist.txt")


@functools.cache
def adjectives() -> tuple[str, ...]:
    """Sorted."""
    return _words("adjectivelist.txt")


@functools.cache
def words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*nouns(), *adjectives(), *_words("verblist.txt")}))


def draw_names(dice: Random) -> Iterator[str]:
    """Names like "frozen-compass", never one twice."""
    seen: set[str] = set()
    while True:
        name = f"{dice.choice(adjectives())}-{dice.choice(nouns())}"
        if name not in seen:
            seen.add(name)
            yield name


def _words(file: str) -> tuple[str, ...]:
    """The lines of a list that are one word in small letters: others would be hard to score."""
    try:
        folder = resources.files("wonderwords.assets")
    except ModuleNotFoundError:
        raise UsageError(
            f"this task draws from the word lists of the package wonderwords: {WANTED}."
        ) from None
    listed = (folder / file).read_text(encoding="utf-8").split("\n")
    return tuple(
        sorted({w for w in map(str.strip, listed) if w.isascii() and w.isalpha() and w.islower()})
    )
