"""A JSON object of random keys and values; the value of one key is asked for.

Lost in the Middle (arXiv 2307.03172) made the task, with 128-bit identifiers for keys and values
and up to 300 pairs; InfiniteBench (arXiv 2402.13718, Retrieve.KV) made it long. Its prompt is the
official one: the key comes after the object, so that many keys can be asked of one reading.
`key-first` is the first paper's query-aware form: the key stands before the object as well, so
the reading itself can look for it, and each key needs a reading of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from infllm_cli.evaluate.scorers import whole_word
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task

OFFICIAL, KEY_FIRST = "official", "key-first"
PROMPTS = (OFFICIAL, KEY_FIRST)
INSTRUCTION = "Extract the value corresponding to the specified key in the JSON object below.\n\n"
MAX_TOKENS = 50


def kv(prompt: str = OFFICIAL) -> Task:
    """The task with one of the two `PROMPTS`."""
    key_first = prompt == KEY_FIRST

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        dice = task.dice(seed, cells[0])
        pairs: list[tuple[str, str]] = []

        def first(units: int) -> list[tuple[str, str]]:
            while len(pairs) < units:
                pairs.append(
                    (_identifier(dice.getrandbits(128)), _identifier(dice.getrandbits(128)))
                )
            return pairs[:units]

        def head(units: int) -> str:
            asked = first(units)[_at(cells[0], units)][0]
            return INSTRUCTION + (f'Key: "{asked}"\n\n' if key_first else "") + "JSON data:\n"

        def make(units: int) -> str:
            return head(units) + "{" + ", ".join(f'"{k}": "{v}"' for k, v in first(units)) + "}"

        def probe(cell: Cell, units: int) -> Probe:
            key, value = first(units)[_at(cell, units)]
            at = make(units).index(f'"{key}": "{value}"')
            return Probe(
                f'Key: "{key}"',
                (value,),
                "Corresponding value:"
                if key_first
                else "The value associated with the specified key is:",
                ((at, at + len(key) + len(value) + 6),),
            )

        least = max(2, len(cells))
        # Identifiers are not all of one length in tokens: some more than the first question's.
        room = fitting.room(cells[0].length, task.max_tokens, [probe(cells[0], least)]) - 8
        units = fitting.most_units(make, room, least, f"kv of {cells[0].length:,} tokens")
        while True:
            probes = [probe(cell, units) for cell in cells]
            room = fitting.room(cells[0].length, task.max_tokens, probes)
            if fitting.count(make(units)) <= room:
                return Case(make(units), tuple(probes))
            units -= 1

    task = Task("kv", prompt, MAX_TOKENS, whole_word, build, joint=not key_first)
    return task


def _at(cell: Cell, units: int) -> int:
    """The index of the pair at a depth."""
    assert cell.depth is not None
    return round(cell.depth * (units - 1))


def _identifier(bits: int) -> str:
    return str(uuid.UUID(int=bits, version=4))
