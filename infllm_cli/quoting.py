"""The sentence of the document that fits a question best, to be quoted beside the answer.

A small model that is given the right passage still answers half of the questions wrongly; the
right sentence is found more often than that, and it cannot be misremembered.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infllm_cli.passages import Passages
from infllm_cli.quotable import cut_quotable, is_prose
from infllm_cli.records import record_starts
from infllm_cli.tokens import Tokens
from infllm_cli.words import WordIndex, words_of

# Passages whose sentences are looked at, the best first.
PASSAGES = 12
# A sentence and its neighbours must hold this part of what the question's words weigh together.
LEAST_COVERAGE = 0.3
# Of a quotation with the sentences around it: about three lines, as of a search engine's result.
MOST_CHARS = 300
# A sentence with so much of what the question's words weigh is quoted alone: of the same 48
# questions it holds the answer as often as with others around it.
ENOUGH = 0.7
# Of what the model is shown of it, alone, to answer from.
SHOWN_CHARS = 500
_CAPITALS = re.compile(r"^[^a-z\n]*[A-Z]{3}[^a-z\n]*$", re.M)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of the document.

    Attributes:
        chars: its first and last (excluded) character.
        tokens: the same in tokens of the document.
        passage: the passage it begins in.
    """

    chars: tuple[int, int]
    tokens: tuple[int, int]
    passage: int


def sentences_of(
    text: str, tokens: Tokens, passages: Passages, chosen: list[int]
) -> list[Sentence]:
    """The sentences of some passages, in document order; passages that touch count as one."""
    runs: list[tuple[int, int]] = []
    for index in sorted(chosen):
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    found = []
    starts, ends = tokens.spans[:, 0], tokens.spans[:, 1]
    for first, last in runs:
        low, high = passages.borders[first], passages.borders[last]
        for begin, end in cut_quotable(text, int(starts[low]), int(ends[high - 1])):
            a = int(np.searchsorted(ends, begin, side="right"))
            b = int(np.searchsorted(starts, end, side="left"))
            where = int(np.searchsorted(passages.borders, a, side="right")) - 1
            found.append(Sentence((begin, end), (a, max(b, a + 1)), where))
    return found


def best_sentence(
    question: str,
    text: str,
    words: WordIndex,
    sentences: list[Sentence],
    passages: Sequence[int],
    least: float = LEAST_COVERAGE,
) -> Sentence | None:
    """The sentence that fits a question best, or None where none has enough of its words: `least`.

    Of 60 questions on three novels the quotation then holds the answer to 29, of 40 on sources to
    7 and of 24 on the sample story to 21; by which words the sentence alone holds, besides, and
    with half of its neighbours' scores instead of their words: 25, 10 and 21. How likely the model
    holds the question behind each sentence is no help, nor are vectors of sentences: 28, 11 and 20.

    Args:
        sentences: in document order.
        passages: where it must stand; the others are what stands around them.
    """
    allowed = np.isin([sentence.passage for sentence in sentences], passages)
    if not allowed.any():
        return None
    texts = [text[slice(*sentence.chars)] for sentence in sentences]
    own, _ = words.judge(question, texts)
    around, near = words.judge(question, texts, reach=1)
    weights = words.telling(question)
    coverage = near @ weights / max(weights.sum(), 1e-9)
    # Which words are there counts beside how rare they are.
    scores = sum(standard(found[allowed]) for found in (own, around, coverage))
    scores[coverage[allowed] < least] = -np.inf
    best = int(np.argmax(scores))
    return sentences[np.flatnonzero(allowed)[best]] if np.isfinite(scores[best]) else None


def surround(
    question: str,
    text: str,
    words: WordIndex,
    sentences: list[Sentence],
    chars: tuple[int, int],
    most: int = MOST_CHARS,
    enough: float = ENOUGH,
) -> tuple[int, int]:
    """A sentence's first and last (excluded) character, and of those around it as many as fit.

    What is asked often stands one sentence beside the one with the question's words ("And the
    ring?" I asked). The one behind goes first, unless only the one before brings further words of
    the question. Of 48 questions on the sample story and a novel the quotation then holds the
    answer to 33 instead of 25.

    Args:
        sentences: those around, in document order.
        most: characters of all together.
        enough: part of the question's words that the document has, by weight, with which a sentence
            stays alone.
    """
    weights = words.findable(question)
    start, end = chars
    own = sum(weights.get(word, 0.0) for word in set(words_of(text[start:end])))
    if own >= enough * sum(weights.values()) > 0:
        return start, end
    before = _up_to_heading(text, [s.chars for s in reversed(sentences) if s.chars[1] <= start])
    behind = _up_to_heading(text, [s.chars for s in sentences if s.chars[0] >= end])
    before, behind = _within_record(text, start, before, behind)
    before.reverse()  # the nearest of both is the last one
    behind.reverse()
    while True:
        held = set(words_of(text[start:end]))

        def gain(piece: tuple[int, int], held: set[str] = held) -> float:
            return sum(weights.get(w, 0.0) for w in set(words_of(text[slice(*piece)])) - held)

        forward = behind[-1] if behind and behind[-1][1] - start <= most else None
        back = before[-1] if before and end - before[-1][0] <= most else None
        if forward and (not back or gain(forward) >= gain(back)):
            end = behind.pop()[1]
        elif back and gain(back) > 0:
            start = before.pop()[0]
        elif forward:
            end = behind.pop()[1]
        else:
            return start, end


def _up_to_heading(text: str, pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of pieces, the nearest first, the prose as far as no line in capitals is among them."""
    within = itertools.takewhile(lambda piece: not _CAPITALS.search(text[slice(*piece)]), pieces)
    return [piece for piece in within if is_prose(text[slice(*piece)])]


def _within_record(
    text: str, start: int, before: list[tuple[int, int]], behind: list[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Of pieces before and behind what begins at `start`, the nearest first, those of its record.

    All of them where there is none.
    """
    pieces = [*before, (start, start + 1), *behind]
    low, high = min(first for first, _ in pieces), max(first for first, _ in pieces)
    records = set(record_starts(text, low, high + 1))
    behind = list(itertools.takewhile(lambda piece: piece[0] not in records, behind))
    if start in records:
        return [], behind
    for number, (first, _) in enumerate(before):
        if first in records:
            return before[: number + 1], behind
    return before, behind


def standard(scores: np.ndarray) -> np.ndarray:
    """Scores with mean 0 and deviation 1."""
    return (scores - scores.mean()) / max(float(scores.std()), 1e-9)
