"""RULER's other tasks without a reader's knowledge (Hsieh et al., arXiv 2404.06654): variable
tracking, common words, frequent words.

Nothing of these can be looked up: a chain of assignments has to be followed, and words have to be
counted over the whole document. As in RULER, the first two begin with a small solved example.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from random import Random

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.scorers import share_of_strings
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.tasks.filler import FILLER
from infllm_cli.evaluate.tasks.vocabulary import words

# -- variable tracking ------------------------------------------------------------------------

VT_INSTRUCTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
)
VT_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
VT_PREFILL = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables "
    "are assgined the value {value}, they are:"  # as RULER spells it
)
HOPS = 4
VT_EXAMPLE_UNITS = 8  # lines of filler in the solved example
VT_MAX_TOKENS = 30


def variable_tracking() -> Task:
    """One chain of five variables: each but the first is assigned the one before it."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        (cell,) = cells
        dice = task.dice(seed, cell)
        names, value, chain = _chain(dice, letters=5)
        question = VT_QUESTION.format(value=value)
        prefill = VT_PREFILL.format(count=HOPS + 1, value=value)
        probe = Probe(question, tuple(names), prefill)
        example = _vt_example(task.dice(seed, cell, "example"), value)
        room = fitting.room(cell.length, task.max_tokens, [probe])
        places = sorted(dice.random() for _ in chain)
        head = example + VT_INSTRUCTION

        def make(units: int) -> str:
            return head + _among_filler(units, chain, places)

        units = fitting.most_units(make, room, 1, f"ruler vt of {cell.length:,} tokens")
        text = make(units)
        starts = [text.index(line, len(head)) for line in chain]
        spans = tuple((start, start + len(line)) for start, line in zip(starts, chain, strict=True))
        return Case(text, (Probe(question, probe.answers, prefill, spans),))

    task = Task("ruler", "vt", VT_MAX_TOKENS, share_of_strings, build, joint=False, deep=False)
    return task


def _chain(dice: Random, letters: int, unlike: str = "") -> tuple[list[str], str, list[str]]:
    """Names, the value, and the lines that assign them."""
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(dice.choices(string.ascii_uppercase, k=letters))
        if not any(name in other for other in names):
            names.append(name)
    value = ""
    while not value or value == unlike:
        value = str(dice.randrange(10_000, 100_000))
    steps = [f"VAR {b} = VAR {a}" for a, b in itertools.pairwise(names)]
    return names, value, [f"VAR {names[0]} = {value}", *steps]


def _among_filler(units: int, chain: list[str], places: list[float]) -> str:
    parts = [FILLER.rstrip()] * units
    for added, (place, line) in enumerate(zip(places, chain, strict=True)):
        parts.insert(int(place * (units + 1)) + added, line)
    return "\n".join(parts)


def _vt_example(dice: Random, unlike: str) -> str:
    names, value, chain = _chain(dice, letters=3, unlike=unlike)
    places = sorted(dice.random() for _ in chain)
    text = _among_filler(VT_EXAMPLE_UNITS, chain, places)
    question = VT_QUESTION.format(value=value)
    prefill = VT_PREFILL.format(count=HOPS + 1, value=value)
    return f"{VT_INSTRUCTION}{text}\n{question} {prefill} {' '.join(names)}\n\n"


# -- common words -----------------------------------------------------------------------------

CWE_INSTRUCTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
CWE_PREFILL = "Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
CWE_MAX_TOKENS = 120
SHORT = 4096  # below it RULER repeats less


def common_words() -> Task:
    """Ten words stand thirty times each in a numbered list, all others three times."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        (cell,) = cells
        dice = task.dice(seed, cell)
        drawn = list(words())
        dice.shuffle(drawn)
        often, seldom = (6, 1) if cell.length < SHORT else (30, 3)
        example = _cwe_example(task.dice(seed, cell, "example"), short=cell.length < SHORT)
        probe = Probe(CWE_QUESTION, tuple(drawn[:COMMON]), CWE_PREFILL)
        order = dice.random()

        def make(units: int) -> str:
            return example + CWE_INSTRUCTION + _listed(drawn, units, often, seldom, Random(order))

        room = fitting.room(cell.length, task.max_tokens, [probe])
        every = len(drawn) - COMMON
        if fitting.count(make(every)) <= room:
            raise UsageError(
                f"--lengths {cell.length:,}: ruler cwe has {len(drawn):,} different words, which "
                "do not fill so long a list."
            )
        units = fitting.most_units(make, room, 1, f"ruler cwe of {cell.length:,} tokens", every)
        return Case(make(units), (probe,))

    task = Task("ruler", "cwe", CWE_MAX_TOKENS, share_of_strings, build, joint=False, deep=False)
    return task


def _listed(drawn: list[str], units: int, often: int, seldom: int, dice: Random) -> str:
    listed = drawn[:COMMON] * often + drawn[COMMON : COMMON + units] * seldom
    dice.shuffle(listed)
    return " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))


def _cwe_example(dice: Random, *, short: bool) -> str:
    drawn = list(words())
    dice.shuffle(drawn)
    units, often, seldom = (10, 3, 1) if short else (30, 10, 3)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(drawn[:COMMON], 1))
    listed = _listed(drawn, units, often, seldom, dice)
    return f"{CWE_INSTRUCTION}{listed}\n{CWE_QUESTION} {CWE_PREFILL} {answer}\n"


# -- frequent words ---------------------------------------------------------------------------

FWE_INSTRUCTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. "
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three "
    "most frequently appeared words in the above coded text?"
)
FWE_PREFILL = (
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)
ALPHA = 2.0
ZETA = math.pi**2 / 6  # of ALPHA
CODED_LETTERS = 6
TOKENS_PER_WORD_KIND = 50  # a vocabulary of the length divided by this
FWE_MAX_TOKENS = 50


def frequent_words() -> Task:
    """Coded words with the frequencies of a zeta distribution; the most frequent one is dots."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        (cell,) = cells
        dice = task.dice(seed, cell)
        kinds = max(8, cell.length // TOKENS_PER_WORD_KIND)
        coded: dict[str, None] = {"...": None}
        while len(coded) < kinds:
            coded["".join(dice.choices(string.ascii_lowercase, k=CODED_LETTERS))] = None
        vocabulary = list(coded)
        probe = Probe(FWE_QUESTION, tuple(vocabulary[1:4]), FWE_PREFILL)
        order = dice.random()

        def make(units: int) -> str:
            counts = [int(units * rank**-ALPHA / ZETA) for rank in range(1, kinds + 1)]
            listed = [w for w, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
            Random(order).shuffle(listed)
            return FWE_INSTRUCTION + " ".join(listed)

        room = fitting.room(cell.length, task.max_tokens, [probe])
        # Fewer, and the third and the fourth most frequent word would be as many.
        least = 64
        units = fitting.most_units(make, room, least, f"ruler fwe of {cell.length:,} tokens")
        return Case(make(units), (probe,))

    task = Task("ruler", "fwe", FWE_MAX_TOKENS, share_of_strings, build, joint=False, deep=False)
    return task
