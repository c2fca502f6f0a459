"""A record of numbered lines; the content of one line is asked for.

The line retrieval of LongEval (Li et al., "How Long Can Open-Source LLMs Truly Promise on Context
Length?", 2023), in the form its authors ran: lines are named by an adjective and a noun, contents
are numbers up to 50,000. Here no name comes twice and one reading serves all depths.
"""

from __future__ import annotations

from collections.abc import Sequence

from infllm_cli.evaluate.scorers import last_integer
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.tasks.vocabulary import draw_names

INSTRUCTION = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' "
    "and contains a '<REGISTER_CONTENT>' at the end of the line as a numerical value. For each "
    "line index, memorize its corresponding <REGISTER_CONTENT>. At the end of the record, I will "
    "ask you to retrieve the corresponding <REGISTER_CONTENT> of a certain line index. Now the "
    "record start:\n\n"
)
QUESTION = (
    "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line {name}? I need the "
    "number."
)
HIGHEST = 50_000
MAX_TOKENS = 48


def lines() -> Task:
    """The task."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        dice = task.dice(seed, cells[0])
        names, numbers = draw_names(dice), []

        def record(units: int) -> list[tuple[str, int]]:
            while len(numbers) < units:
                numbers.append((next(names), dice.randint(1, HIGHEST)))
            return numbers[:units]

        def make(units: int) -> str:
            return INSTRUCTION + "".join(_line(*one) for one in record(units))

        def probe(cell: Cell, units: int) -> Probe:
            assert cell.depth is not None
            name, content = record(units)[round(cell.depth * (units - 1))]
            line = _line(name, content)
            at = make(units).index(line)
            return Probe(
                QUESTION.format(name=name), (str(content),), spans=((at, at + len(line) - 1),)
            )

        least = max(2, len(cells))
        what = f"lines of {cells[0].length:,} tokens"
        room = fitting.room(cells[0].length, task.max_tokens, [probe(cells[0], least)])
        units = fitting.most_units(make, room, least, what)
        while True:
            probes = [probe(cell, units) for cell in cells]
            room = fitting.room(cells[0].length, task.max_tokens, probes)
            if fitting.count(make(units)) <= room:
                return Case(make(units).rstrip(), tuple(probes))
            units -= 1

    task = Task("lines", "", MAX_TOKENS, last_integer, build, joint=True)
    return task


def _line(name: str, content: int) -> str:
    return f"line {name}: REGISTER_CONTENT is <{content}>\n"
