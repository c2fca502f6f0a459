"""Two passages of a document: which of them came first?

The Sequence Order Recall Task (SORT; Pink et al., "Assessing Episodic Memory in LLMs with Sequence
Order Recall Tasks", arXiv 2410.08133): two segments of 20 or 50 words of a book, each beginning
with a sentence, without overlap, are shown in random order as A and B. Half of the answers are A,
and the distances are spread over four bins, as for its longer excerpts: up to 1,000 words, a
quarter, a half and all of the document. Guessing scores one half. One reading serves all pairs.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from random import Random

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.scorers import first_label
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.tasks.haystack import Haystack

INSTRUCTION = (
    "I need you to thoroughly read and comprehend this extract from a book. The passage is as "
    "follows: "
)
QUESTION = (
    "You will be shown two text segments, labeled as A and B. Please recall in which order they "
    "appeared in the book and tell me which one came first. Please read the segments carefully: "
    "Segment A: {a} Segment B: {b}\nWhich of these two parts of the book, A or B, came first in "
    "the book?"
)
PREFILL = "Answer: Segment"
SEGMENT_WORDS = (20, 50)
BINS = 4
MAX_TOKENS = 4
TRIES = 2000
_WORD = re.compile(r"\S+")


def order(haystack: Haystack, segment_words: int = 50) -> Task:
    """The task on a document, which must be as long as is asked for: repeated, nothing is first."""

    def build(fitting: Fitting, cells: Sequence[Cell], seed: int) -> Case:
        length = cells[0].length
        # A segment shown twice as long as a usual one leaves room for any.
        shown = "x " * 2 * segment_words
        room = fitting.room(length, task.max_tokens, [Probe(QUESTION.format(a=shown, b=shown), ())])
        what = f"order of {length:,} tokens"
        chars = haystack.most_chars(fitting, room - fitting.count(INSTRUCTION), what)
        if chars > len(haystack):
            raise UsageError(
                f"--lengths {length:,}: {haystack.name} is shorter, and repeated it has no order; "
                "give a longer --document."
            )
        while True:
            text = haystack.begin(chars)
            pairs = _pairs(
                text,
                haystack.sentence_ends(chars),
                segment_words,
                len(cells),
                task.dice(seed, cells[0]),
                what,
            )
            probes = [_probe(text, *pair) for pair in pairs]
            surplus = fitting.count(INSTRUCTION + text) - fitting.room(
                length, task.max_tokens, probes
            )
            if surplus <= 0:
                return Case(INSTRUCTION + text, tuple(probes))
            chars -= surplus

    task = Task(
        "order", f"{segment_words} words", MAX_TOKENS, first_label, build, joint=True, deep=False,
        all_samples=True, facts=haystack.facts, chance=0.5,
    )  # fmt: skip
    return task


Span = tuple[int, int]


def _pairs(
    text: str, ends: list[int], segment_words: int, count: int, dice: Random, what: str
) -> list[tuple[Span, Span, bool, int]]:
    """Spans of an earlier and a later segment, whether the earlier is A, and the bin."""
    words = [match.span() for match in _WORD.finditer(text)]
    starts = sorted({bisect_left(words, (end, end)) for end in ends})
    starts = [start for start in starts if start + segment_words <= len(words)]
    edges = _edges(len(words), segment_words)
    answers = [index % 2 == 0 for index in range(count)]
    dice.shuffle(answers)
    found: list[tuple[Span, Span, bool, int]] = []
    for index in range(count):
        number = index % BINS
        low, high = max(edges[number], segment_words), edges[number + 1]
        for _ in range(TRIES):
            first = dice.choice(starts)
            later = starts[bisect_left(starts, first + low) : bisect_right(starts, first + high)]
            if later:
                second = dice.choice(later)
                spans = [(words[s][0], words[s + segment_words - 1][1]) for s in (first, second)]
                # What stands twice in a text has no order.
                if all(text.count(text[a:b]) == 1 for a, b in spans):
                    found.append((spans[0], spans[1], answers[index], number))
                    break
        else:
            raise UsageError(f"{what}: the document is too short for segments this far apart.")
    return found


def _edges(words: int, segment_words: int) -> list[int]:
    """Borders of the distances, in words from start to start."""
    near = min(1000, words // 8)
    return [segment_words, near, words // 4, words // 2, words]


def _probe(text: str, first: Span, second: Span, first_is_a: bool, number: int) -> Probe:
    a, b = (first, second) if first_is_a else (second, first)
    shown = {label: " ".join(text[slice(*span)].split()) for label, span in (("a", a), ("b", b))}
    spans = tuple(
        (start + len(INSTRUCTION), end + len(INSTRUCTION)) for start, end in (first, second)
    )
    return Probe(
        QUESTION.format(**shown),
        ("A" if first_is_a else "B",),
        PREFILL,
        spans,
        kind=f"distance {number + 1} of {BINS}",
    )
