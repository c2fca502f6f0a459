"""A number hidden in sentences that are always the same: PassKey and Number String.

Landmark attention (arXiv 2305.16300) hid a pass key in repeated filler; InfiniteBench (arXiv
2402.13718, Retrieve.PassKey and Retrieve.Number) made it five random digits, or ten of which five
repeat a neighbour, which is harder to copy. Wording, filler and digits are InfiniteBench's; the
answer begins as in its templates for models that complete a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from infllm_cli.evaluate.scorers import first_integer
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
MAX_TOKENS = {"passkey": 16, "number": 24}  # InfiniteBench allows 6 and 12, and no word before


@dataclass(frozen=True)
class Hidden:
    """What is hidden, and how it is asked for."""

    instruction: str
    sentence: str
    question: str
    prefill: str


PASSKEY = Hidden(
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there.\n\n",
    "The pass key is {key}. Remember it. {key} is the pass key.\n",
    "What is the pass key?",
    "The pass key is",
)
NUMBER = Hidden(
    "There is an important info hidden inside a lot of irrelevant text. Find it. I will quiz you "
    "about the important information there.\n\n",
    "The sequence of digits is {key}. Remember it. {key} is the sequence of digits.\n",
    "What is the sequence of digits?",
    "The sequence of digits is",
)


def passkey() -> Task:
    """Five random digits."""
    return _task("passkey", PASSKEY)


def number() -> Task:
    """Ten digits, five of them repeated."""
    return _task("number", NUMBER)


def _task(name: str, hidden: Hidden) -> Task:
    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        (cell,) = cells
        assert cell.depth is not None
        dice = task.dice(seed, cell)
        key = _digits(dice) if name == "passkey" else _repeating_digits(dice)
        probe = Probe(hidden.question, (key,), hidden.prefill)
        sentence = hidden.sentence.format(key=key)

        def head(units: int) -> str:
            return hidden.instruction + FILLER * round(cell.depth * units)

        def make(units: int) -> str:
            return head(units) + sentence + FILLER * (units - round(cell.depth * units))

        room = fitting.room(cell.length, task.max_tokens, [probe])
        units = fitting.most_units(make, room, 1, f"{name} of {cell.length:,} tokens")
        start = len(head(units))
        span = (start, start + len(sentence.rstrip()))
        text = make(units).rstrip()
        return Case(text, (Probe(probe.question, probe.answers, probe.prefill, (span,)),))

    task = Task(name, "", MAX_TOKENS[name], first_integer, build, joint=False)
    return task


def _digits(dice: Random) -> str:
    return "".join(str(dice.randint(0, 9)) for _ in range(5))


def _repeating_digits(dice: Random) -> str:
    """Five digits, and five times one of those so far once more beside itself."""
    digits = list(_digits(dice))
    for length in range(5, 10):
        at = dice.randrange(length)
        digits.insert(at, digits[at])
    return "".join(digits)
