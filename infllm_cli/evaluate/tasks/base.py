"""What every task is made of: documents of a given length, and questions with known answers.

A task is planned before anything is built: a plan names the cells of its grid that one document
serves, so that what has been measured before need not be built again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.scorers import Scorer

if TYPE_CHECKING:
    from infllm_cli.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of a task: one question of one sample.

    Attributes:
        depth: where in the document the answer is to stand, 0 to 1; None where the task has no say.
    """

    length: int
    sample: int
    depth: float | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """A question about a document, and its answers.

    Attributes:
        prefill: what the answer begins with; the model goes on from there.
        spans: characters [start, end) of the document that hold the answers.
        kind: a group of its own in the results.
    """

    question: str
    answers: tuple[str, ...]
    prefill: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A document and one probe for each cell that it serves."""

    text: str
    probes: tuple[Probe, ...]


class Fitting:
    """Makes documents of a given length in tokens.

    A length counts everything: the prompt around the document, the question, and the tokens that an
    answer may take, as in RULER. What is asked for is never passed; how much is missing at most
    (the slack) depends on the units a document is made of.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._prompt.plain_ids(text))

    def room(self, length: int, max_tokens: int, probes: Sequence[Probe]) -> int:
        """Tokens that are left for the document beside the longest of some probes."""
        longest = max(self._prompt.around_tokens(p.question, p.prefill) for p in probes)
        return length - longest - max_tokens

    def most_units(
        self,
        make: Callable[[int], str],
        room: int,
        least: int,
        what: str,
        too_many: int | None = None,
    ) -> int:
        """The highest number of units whose text takes at most `room` tokens.

        Args:
            make: text of so many units; must grow with the number.
            least: units that the task needs.
            too_many: a number that does not fit, where one is known.

        Raises:
            UsageError: `least` units do not fit; `what` names them.
        """
        low_tokens = self.count(make(least))
        if low_tokens > room:
            raise UsageError(
                f"--lengths: {what} needs at least {low_tokens - room:,} tokens more than that."
            )
        # Units are about equally long: a few counts close in on the number.
        low, tokens, high = least, low_tokens, too_many
        some = 2 * least + 8 if too_many is None else min(2 * least + 8, too_many)
        per_unit = max((self.count(make(some)) - low_tokens) / (some - least), 1e-3)
        while high is None or high - low > 1:
            guess = low + max(1, int((room - tokens) / per_unit))
            if high is not None:
                guess = min(guess, high - 1)
            counted = self.count(make(guess))
            if counted <= room:
                low, tokens = guess, counted
            else:
                high = guess
            per_unit = max((counted - low_tokens) / (guess - least), 1e-3)
        return low

    def cut(self, text: str, tokens: int) -> int:
        """How many characters of a text its first `tokens` tokens take."""
        spans = self._prompt.tokenizer.encode(text).spans
        return len(text) if len(spans) <= tokens else int(spans[tokens, 0])


@dataclass(frozen=True)
class Task:
    """A task of the evaluation.

    Attributes:
        name: as on the command line; `variant` tells forms of it apart, may be empty.
        max_tokens: longest answer.
        joint: whether one document serves all depths of a sample.
        deep: whether the answer's depth can be chosen at all.
        facts: what else decides the documents, for the record of results.
        build: makes the document for some cells, which one plan has put together.
        chance: what guessing scores.
    """

    name: str
    variant: str
    max_tokens: int
    score: Scorer
    build: Callable[[Fitting, Sequence[Cell], int], Case]
    joint: bool
    deep: bool = True
    all_samples: bool = False  # one document serves all samples, too
    facts: dict[str, Any] = field(default_factory=dict)
    chance: float = 0.0

    @property
    def title(self) -> str:
        """Name and variant."""
        return f"{self.name} {self.variant}".strip()

    def plan(
        self, lengths: Sequence[int], depths: Sequence[float], samples: int
    ) -> list[tuple[Cell, ...]]:
        """The cells of the grid, those together that one document serves."""
        plans: list[tuple[Cell, ...]] = []
        for length in lengths:
            at = list(depths) if self.deep else [None]
            cells = [Cell(length, s, d) for s in range(samples) for d in at]
            if self.all_samples:
                plans.append(tuple(cells))
            elif self.joint:
                plans += [tuple(c for c in cells if c.sample == s) for s in range(samples)]
            else:
                plans += [(cell,) for cell in cells]
        return plans

    def dice(self, seed: int, cell: Cell, *more: object) -> random.Random:
        """Random numbers of a cell: the same for the same seed, on any machine.

        Cells that share a document share the dice, unless `more` tells them apart.
        """
        facts = [seed, self.name, self.variant, cell.length]
        if not self.all_samples:
            facts.append(cell.sample)
        if not self.joint:
            facts.append(cell.depth)
        return random.Random("/".join(str(fact) for fact in [*facts, *more]))


def evenly(count: int) -> list[float]:
    """Depths from 0 to 1 in equal steps; a single one is the middle."""
    return [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
