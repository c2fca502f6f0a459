"""A sentence hidden in a document, at every depth: the needle in a haystack.

Kamradt's test (2023) puts one sentence behind a sentence of a text, at depths and lengths of a
grid. `magic` has the wording that the test has been run with since (Dhinakaran, 2024; Gemini 1.5,
arXiv 2403.05530): the special magic number of a city. One wording favours what matches it, so
`varied` says something else at each depth.

The needles of all depths stand in one document and are asked for one by one, which takes one
reading instead of one per depth; each is a distraction from the others, which the published test
does not have. `apart` is the published way: a document for each depth.

The answer is begun for the model in the question's words, as RULER does: small ones otherwise go on
with the text, even where they attend all of it. `begun` False leaves that out, as published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.scorers import share_of_strings
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.tasks.haystack import Haystack, insert

VARIED, MAGIC = "varied", "magic"
WORDINGS = (VARIED, MAGIC)
MAX_TOKENS = 32

# Needle, question, beginning of the answer, digits of the key. The place makes each its own.
TEMPLATES = (
    ("The safe behind the stairs of the {place} house opens with the combination {key}.",
     "Which combination opens the safe behind the stairs of the {place} house?",
     "The combination that opens the safe behind the stairs of the {place} house is", 5),
    ("On the back of the {place} clock somebody had scratched the serial number {key}.",
     "Which serial number was scratched on the back of the {place} clock?",
     "The serial number scratched on the back of the {place} clock is", 6),
    ("The telephone of the {place} bakery is {key}.",
     "What is the telephone number of the {place} bakery?",
     "The telephone number of the {place} bakery is", 7),
    ("Exactly {key} barrels of salt were unloaded at the {place} pier that winter.",
     "How many barrels of salt were unloaded at the {place} pier?",
     "The number of barrels of salt unloaded at the {place} pier is", 4),
    ("Locker {key} at the {place} station has held a violin ever since.",
     "Which locker at the {place} station holds a violin?",
     "The locker at the {place} station that holds a violin is number", 4),
    ("The engineer wrote down that the {place} bridge weighs {key} tons.",
     "How many tons does the {place} bridge weigh?",
     "The weight of the {place} bridge in tons is", 5),
    ("Letters for the {place} lighthouse go to postbox {key}.",
     "To which postbox do letters for the {place} lighthouse go?",
     "Letters for the {place} lighthouse go to postbox", 5),
    ("In the {place} library the atlas of the winds has the shelf mark {key}.",
     "Which shelf mark has the atlas of the winds in the {place} library?",
     "The shelf mark of the atlas of the winds in the {place} library is", 6),
    ("The winning ticket of the {place} lottery had the number {key}.",
     "Which number had the winning ticket of the {place} lottery?",
     "The winning ticket of the {place} lottery had the number", 6),
    ("The patent for the {place} umbrella was granted under number {key}.",
     "Under which number was the patent for the {place} umbrella granted?",
     "The patent for the {place} umbrella was granted under number", 7),
    ("From the {place} tower to the sea one counts {key} steps.",
     "How many steps does one count from the {place} tower to the sea?",
     "The number of steps from the {place} tower to the sea is", 4),
    ("The password of the {place} observatory has been {key} for years.",
     "What has been the password of the {place} observatory for years?",
     "The password of the {place} observatory has been", 6),
)  # fmt: skip
MAGIC_TEMPLATE = (
    "The special magic {place} number is: {key}.",
    "What is the special magic {place} number?",
    "The special magic {place} number is",
    7,
)
PLACES = (
    "Chicago", "Yangon", "Antananarivo", "Colombo", "Almaty", "Sydney", "Seattle", "Dakar",
    "Lisbon", "Tbilisi", "Montevideo", "Oslo", "Hanoi", "Kigali", "Quito", "Riga", "Havana",
    "Nairobi", "Vienna", "Jakarta", "Bergen", "Cusco", "Galway", "Lagos", "Mostar", "Nagoya",
    "Porto", "Reims", "Samarkand", "Turin", "Utrecht", "Valparaiso", "Windhoek", "Yerevan",
)  # fmt: skip


def needle(
    haystack: Haystack, wording: str = VARIED, *, apart: bool = False, begun: bool = True
) -> Task:
    """The task on a document."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        ordered = sorted(cells, key=lambda cell: cell.depth)
        needles = _draw(task.dice(seed, cells[0]), len(cells), wording)
        probes = [Probe(n.question, (n.key,), n.beginning if begun else "") for n in needles]
        pieces = [(cell.depth, n.text) for cell, n in zip(ordered, needles, strict=True)]
        room = fitting.room(cells[0].length, task.max_tokens, probes)
        what = f"{len(cells)} needles in {cells[0].length:,} tokens"
        inside = sum(fitting.count(f" {text}") for _, text in pieces)
        chars = haystack.most_chars(fitting, room - inside, what)
        while True:
            text, spans = insert(haystack.begin(chars), haystack.sentence_ends(chars), pieces, " ")
            surplus = fitting.count(text) - room
            if surplus <= 0:
                break
            chars -= surplus  # a token is at least a character
        made = {
            cell: replace(probe, spans=(span,))
            for cell, probe, span in zip(ordered, probes, spans, strict=True)
        }
        return Case(text, tuple(made[cell] for cell in cells))

    variant = " ".join([wording, *["apart"] * apart, *["unaided"] * (not begun)])
    task = Task(
        "needle", variant, MAX_TOKENS, share_of_strings, build, joint=not apart,
        facts=haystack.facts,
    )  # fmt: skip
    return task


@dataclass(frozen=True)
class Needle:
    """What is hidden, and how it is asked for."""

    text: str
    question: str
    beginning: str
    key: str


def _draw(dice: Random, count: int, wording: str) -> list[Needle]:
    """So many needles; no place, and no key, comes twice."""
    if count > len(PLACES):
        raise UsageError(f"--depths {count}: there are needles for {len(PLACES)} depths at most.")
    places = dice.sample(PLACES, count)
    if wording == MAGIC:
        templates = [MAGIC_TEMPLATE] * count
    else:
        templates = dice.sample(TEMPLATES, len(TEMPLATES)) * (count // len(TEMPLATES) + 1)
    found: list[Needle] = []
    for place, (*texts, digits) in zip(places, templates, strict=False):
        key = ""
        while not key or any(key in n.key or n.key in key for n in found):
            key = str(dice.randrange(10 ** (digits - 1), 10**digits))
        text, question, beginning = (text.format(place=place, key=key) for text in texts)
        found.append(Needle(text, question, beginning, key))
    return found
