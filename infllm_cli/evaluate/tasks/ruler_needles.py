"""RULER's eight needle tasks (Hsieh et al., arXiv 2404.06654).

One needle form; what differs is the haystack (repeated filler, a text, or other needles), the kind
of keys and values (words, 7-digit numbers, UUIDs), and how many needles there are, share a key, or
are asked for at once. Where RULER uses Paul Graham's essays, here the user's document or the sample
stands. Needles come behind sentences, at depths drawn from forty.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from infllm_cli.evaluate.scorers import share_of_strings
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.tasks.filler import FILLER
from infllm_cli.evaluate.tasks.haystack import Haystack, insert
from infllm_cli.evaluate.tasks.vocabulary import adjectives, nouns

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
INSTRUCTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I "
    "will quiz you about the {kind} afterwards.\n"
)
QUESTION = "What are all the special magic {kind} for {query} mentioned in the provided text?"
PREFILL = "The special magic {kind} for {query} mentioned in the provided text are"
MAX_TOKENS = 128
DEPTHS = 40  # from 0 to 1


@dataclass(frozen=True)
class Shape:
    """One of the eight tasks.

    Attributes:
        haystack: "repeat", "text" or "needles".
        keys, values: "words", "numbers" or "uuids".
        count: keys that have needles.
        per_key: needles of each key.
        asked: keys in the question.
    """

    haystack: str
    keys: str = "words"
    values: str = "numbers"
    count: int = 1
    per_key: int = 1
    asked: int = 1


SHAPES = {
    "niah_single_1": Shape("repeat"),
    "niah_single_2": Shape("text"),
    "niah_single_3": Shape("text", values="uuids"),
    "niah_multikey_1": Shape("text", count=4),
    "niah_multikey_2": Shape("needles"),
    "niah_multikey_3": Shape("needles", keys="uuids", values="uuids"),
    "niah_multivalue": Shape("text", per_key=4),
    "niah_multiquery": Shape("text", count=4, asked=4),
}


def niah(name: str, haystack: Haystack) -> Task:
    """One of `SHAPES`."""
    shape = SHAPES[name]

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        (cell,) = cells
        dice = task.dice(seed, cell)
        drawn: set[str] = set()
        keys = [_draw(dice, shape.keys, drawn) for _ in range(shape.count)]
        values = {k: [_draw(dice, shape.values, drawn) for _ in range(shape.per_key)] for k in keys}
        needles = [
            NEEDLE.format(kind=shape.values, key=key, value=value)
            for key in keys
            for value in values[key]
        ]
        dice.shuffle(needles)
        asked = dice.sample(keys, shape.asked)
        answers = tuple(value for key in asked for value in values[key])
        instruction, question, prefill = _wording(shape, asked)
        probe = Probe(question, answers, prefill)
        room = fitting.room(cell.length, task.max_tokens, [probe])
        room -= fitting.count(instruction)
        what = f"{name} of {cell.length:,} tokens"
        if shape.haystack == "text":
            text, spans = _in_text(fitting, haystack, needles, room, what, dice)
        else:
            text, spans = _in_lines(fitting, shape, needles, room, what, dice, drawn)
        start = len(instruction)
        spans = tuple(
            (start + a, start + b) for a, b in spans if any(value in text[a:b] for value in answers)
        )
        return Case(instruction + text, (Probe(question, answers, prefill, spans),))

    facts = haystack.facts if shape.haystack == "text" else {}
    task = Task(
        "ruler", name, MAX_TOKENS, share_of_strings, build, joint=False, deep=False, facts=facts
    )
    return task


def _wording(shape: Shape, asked: list[str]) -> tuple[str, str, str]:
    """Instruction, question and beginning of the answer; of a single value in the singular."""
    query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
    kind = shape.values
    instruction, question, prefill = INSTRUCTION, QUESTION, PREFILL
    if shape.asked * shape.per_key == 1:
        kind = kind[:-1]
        instruction = instruction.replace("Some", "A").replace("are hidden", "is hidden")
        question = question.replace("are all", "is")
        prefill = prefill.removesuffix("are") + "is"
    return (
        instruction.format(kind=kind),
        question.format(kind=kind, query=query),
        prefill.format(kind=kind, query=query),
    )


def _in_text(
    fitting: Fitting,
    haystack: Haystack,
    needles: list[str],
    room: int,
    what: str,
    dice: Random,
) -> tuple[str, list[tuple[int, int]]]:
    depths = sorted(dice.sample(range(DEPTHS), len(needles)))
    pieces = [(at / (DEPTHS - 1), text) for at, text in zip(depths, needles, strict=True)]
    inside = sum(fitting.count(f" {text}") for text in needles)
    chars = haystack.most_chars(fitting, room - inside, what)
    while True:
        text, spans = insert(haystack.begin(chars), haystack.sentence_ends(chars), pieces, " ")
        surplus = fitting.count(text) - room
        if surplus <= 0:
            return text, spans
        chars -= surplus


def _in_lines(
    fitting: Fitting,
    shape: Shape,
    needles: list[str],
    room: int,
    what: str,
    dice: Random,
    drawn: set[str],
) -> tuple[str, list[tuple[int, int]]]:
    """A line of the haystack is the filler, or another needle."""
    hay: list[str] = []
    places = [dice.random() for _ in needles]

    def make_lines(units: int) -> list[str]:
        while len(hay) < units:
            if shape.haystack == "repeat":
                hay.append(FILLER.rstrip())
            else:
                key, value = (_draw(dice, kind, drawn) for kind in (shape.keys, shape.values))
                hay.append(NEEDLE.format(kind=shape.values, key=key, value=value))
        found = hay[:units]
        for place, text in zip(places, needles, strict=True):
            found.insert(int(place * (len(found) + 1)), text)
        return found

    units = fitting.most_units(lambda n: "\n".join(make_lines(n)), room, 1, what)
    lines = make_lines(units)
    spans, at = [], 0
    for line in lines:
        if line in needles:
            spans.append((at, at + len(line)))
        at += len(line) + 1
    return "\n".join(lines), spans


def _draw(dice: Random, kind: str, drawn: set[str]) -> str:
    """A key or value that has not been drawn before."""
    while True:
        if kind == "words":
            found = f"{dice.choice(adjectives())}-{dice.choice(nouns())}"
        elif kind == "numbers":
            found = str(dice.randrange(10**6, 10**7))
        else:
            found = str(uuid.UUID(int=dice.getrandbits(128), version=4))
        if found not in drawn:
            drawn.add(found)
            return found
