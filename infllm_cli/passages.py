"""A document cut into passages: a few sentences each, whole ones where the text allows it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infllm_cli.tokens import Tokens

TARGET_TOKENS = 112
LEAST_TOKENS = 64
MOST_TOKENS = 160

# Borders in the order of preference: a blank line, the end of a sentence, the end of a line.
_PARAGRAPH = re.compile(r"\n[^\S\n]*\n\s*")
_SENTENCE = re.compile(r"[.!?][\"'”’)\]]*\s+")
_LINE = re.compile(r"\n")
_PENALTY = {"paragraph": 0, "sentence": 20, "line": 60}  # tokens of distance from the target


@dataclass(frozen=True, eq=False)
class Passages:
    """Passages tile the document's tokens.

    Attributes:
        borders: [P + 1] int64: passage i holds tokens [borders[i], borders[i + 1]).
    """

    borders: np.ndarray

    def __len__(self) -> int:
        return len(self.borders) - 1

    def spread(self, unit_mass: np.ndarray, unit_borders: np.ndarray) -> np.ndarray:
        """Mass [U] of units of tokens, to passages [P]: each passage takes what it overlaps.

        Args:
            unit_borders: [U + 1] token indices; units hold their mass evenly.
        """
        ends = np.concatenate([[0.0], np.cumsum(unit_mass)])
        at = np.interp(self.borders, unit_borders, ends)
        return np.diff(at)


def cut_passages(text: str, tokens: Tokens, cuts: Sequence[int] = ()) -> Passages:
    """Cut a document at the best border near every `TARGET_TOKENS` tokens.

    Args:
        cuts: characters where a border must be: no passage reaches from one file into the next.
    """
    starts = tokens.spans[:, 0]
    total = len(starts)
    cost = np.full(total + 1, np.iinfo(np.int64).max // 2)
    for kind, pattern in (("line", _LINE), ("sentence", _SENTENCE), ("paragraph", _PARAGRAPH)):
        ends = np.fromiter((m.end() for m in pattern.finditer(text)), dtype=np.int64)
        # The first token that starts at or behind the border; tokens may begin with its space.
        cost[np.searchsorted(starts, ends - 1, side="left")] = _PENALTY[kind]
    borders = [0]
    for end in [*np.searchsorted(starts, np.asarray(cuts, np.int64)).tolist(), total]:
        while end - borders[-1] > MOST_TOKENS:
            low = borders[-1] + LEAST_TOKENS
            window = np.arange(low, borders[-1] + MOST_TOKENS + 1)
            away = np.abs(window - (borders[-1] + TARGET_TOKENS))
            best = int(np.argmin(np.minimum(cost[window], 10**6) + away))
            borders.append(int(window[best]))
        if end > borders[-1]:
            borders.append(end)
    return Passages(np.asarray(borders, dtype=np.int64))
