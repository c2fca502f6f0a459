"""What the grid's flags say. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from infllm_cli.errors import UsageError

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def parse_lengths(text: str) -> list[int]:
    """Lengths in tokens, rising, as in "4k,8k,1m": k is 1,024.

    Raises:
        UsageError: what is no length.
    """
    found = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)([km]?)\s*", part.lower())
        if match is None or int(match[1]) == 0:
            raise UsageError(f"--lengths: {part.strip()!r} is no length; write 4k,8k,131072.")
        found.add(int(match[1]) * _UNITS[match[2]])
    return sorted(found)


def parse_names(flag: str, text: str, known: Sequence[str]) -> list[str]:
    """Names of a list like "a,b", each once.

    Raises:
        UsageError: one that is not known.
    """
    return check_names(flag, [part.strip() for part in text.split(",")], known)


def check_names(flag: str, names: Iterable[str], known: Sequence[str]) -> list[str]:
    """The same names, each once.

    Raises:
        UsageError: one that is not known.
    """
    for name in names:
        if name not in known:
            raise UsageError(f"{flag}: {name!r} is unknown; choose from {', '.join(known)}.")
    return list(dict.fromkeys(names))


def at_least(flag: str, value: float, least: float) -> None:
    """Refuse a number that is too small.

    Raises:
        UsageError: it is.
    """
    if value < least:
        raise UsageError(f"{flag} is {value:g}; it must be at least {least:g}.")
