"""Which sentences of a text tell most of it.

A sentence tells much that holds the text's own words and names: words that come again and again,
and not in every sentence (Luhn, The Automatic Creation of Literature Abstracts, 1958). Once a
sentence is chosen, what it says counts for less, so that the next one tells something else
(SumBasic: Nenkova and Vanderwende, 2005). What the model attends when it is asked what matters is
a second voice, see `summarizing`.

Tried on the sample story with a summary of each chapter written by hand: share of its content words
that the chosen sentences hold, 65 words a chapter. Chance 0.10, the first sentences 0.13, words
and names 0.19, with the model's attention 0.22; it added in 12 to 14 of 16 settings tried. That
of a draft that the model writes (0.23) is not worth its time, and how much the following text
looked at a sentence while it was read (0.19) adds nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from infllm_cli.sentences import Sentence
from infllm_cli.words import words_of

NAME_WEIGHT = 2.5
# A word in more than this part of all sentences is a function word, in whatever language.
COMMON = 0.03
LEAST_WORDS, MOST_WORDS = 8, 40
FEWEST_WORDS = 4  # shorter ones fill space and tell nothing
SAID_ONCE = 0.2  # what a word weighs that is in one sentence only
SAID_AGAIN = 0.3  # what is left of a word's weight once it has been said
# Sentences that cannot be understood alone: speech, questions, and what points back.
_POINTS_BACK = re.compile(
    r"(?:he|she|it|they|this|that|these|those|but|and|so|then|there|his|her|its|their|now|only|yet|"
    r"nor|or|not|such|here|him|them|thus|hence|however)\b",
    re.IGNORECASE,
)
# Capitalized within a sentence; what follows a quotation mark begins one.
_NAMES = re.compile(r"(?<=\s)[^\W\d_a-z][^\W\d_A-Z]+(?: [^\W\d_a-z][^\W\d_A-Z]+){0,2}")
_NO_NAMES = re.compile(
    r"(?:(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|January|February|March|April|June|July|August|"
    r"(?:Septem|Octo|Novem|Decem)ber|Mr|Mrs|Miss|Sir|Dr)$"
)
_NAME = re.compile(r"(?<=\s)([^\W\d_a-z][^\W\d_A-Z]+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sentence that may stand in a summary.

    Attributes:
        group: of sentences that should not all be chosen: the piece or the part they come from.
        factor: how much the rest speaks for it (the model's attention, a focus), about 1.
    """

    sentence: Sentence
    group: int
    factor: float = 1.0


class Vocabulary:
    """What the words of a document weigh.

    Args:
        sentences: all of the document.
    """

    def __init__(self, sentences: Sequence[Sentence]) -> None:
        frequency: Counter[str] = Counter()
        names: Counter[str] = Counter()
        self._spread: Counter[str] = Counter()
        self._total = len(sentences)
        for sentence in sentences:
            words = words_of(sentence.text)
            frequency.update(words)
            self._spread.update(set(words))
            names.update(word for name in _NAME.findall(sentence.text) for word in words_of(name))
        self.names = {word for word, count in names.items() if 2 * count >= frequency[word]}

    def weights(
        self, sentences: Iterable[Sentence], wanted: Collection[str] = ()
    ) -> dict[str, float]:
        """What each word weighs in a stretch of the document, given by its sentences.

        Args:
            wanted: words that weigh most, see `focus_words`.
        """
        frequency = Counter(word for s in sentences for word in words_of(s.text))
        weights = {word: math.log1p(n) * self._weight(word) for word, n in frequency.items()}
        most = max(weights.values(), default=0.0) + 1
        for word in weights:
            if any(_alike(word, other) for other in wanted):
                weights[word] = most
        return weights

    def focus_words(self, focus: str | None) -> set[str]:
        """The words of a focus that tell something in this document."""
        words = {word for word in words_of(focus or "") if len(word) > 2}
        return {word for word in words if word in self.names or not self._is_common(word)}

    def _is_common(self, word: str) -> bool:
        # In a short text what it is about is in many of its sentences.
        most = max(3, COMMON * self._total, min(self._total / 4, 12))
        return self._spread[word] > most

    def _weight(self, word: str) -> float:
        spread = self._spread[word]
        if len(word) < 3 or word.isdigit():
            return 0.0
        rarity = math.log(1 + self._total / spread) * (1 if spread > 1 else SAID_ONCE)
        if word in self.names:
            return NAME_WEIGHT * rarity
        return 0.0 if self._is_common(word) else rarity


def readable_alone(sentence: Sentence) -> float:
    """How well a sentence can be understood without its neighbours: 1, or less."""
    text, value = sentence.text, 1.0
    if sentence.spoken:
        value *= 0.5
    if _POINTS_BACK.match(text):
        value *= 0.75
    if text.rstrip("\"'”’)]")[-1:] not in ".!。！…":
        value *= 0.5
    if sentence.words < LEAST_WORDS:
        value *= sentence.words / LEAST_WORDS
    if sentence.words > MOST_WORDS:
        value *= 0.6
    return value


def choose(
    candidates: Sequence[Candidate],
    weights: dict[str, float],
    most_words: int,
    *,
    again: float = 0.6,
    least: int = 1,
) -> list[Candidate]:
    """The sentences that together tell most in about `most_words` words, in document order.

    Args:
        weights: see `Vocabulary`.
        again: what a further sentence of the same group counts for.
        least: choose so many, however long they are.
    """
    left = dict(weights)
    rest = list(candidates)
    terms = [set(words_of(c.sentence.text)) for c in rest]
    fixed = [c.factor * readable_alone(c.sentence) / (c.sentence.words + 8) for c in rest]
    groups: Counter[int] = Counter()
    chosen: list[int] = []
    open_ = set(range(len(rest)))
    words = 0
    while open_ and (words < most_words or len(chosen) < least):

        def value(index: int) -> tuple[float, int]:
            told = sum(left.get(term, 0.0) for term in terms[index])
            return (told + 0.01) * fixed[index] * again ** groups[rest[index].group], -index

        best = max(open_, key=value)
        open_.discard(best)
        length = rest[best].sentence.words
        if chosen and length < FEWEST_WORDS:
            continue
        if len(chosen) >= least and words + length > 1.15 * most_words:
            continue
        chosen.append(best)
        words += length
        groups[rest[best].group] += 1
        for term in terms[best]:
            if term in left:
                left[term] *= SAID_AGAIN
    return sorted((rest[index] for index in chosen), key=lambda c: c.sentence.start)


def most_named(sentences: Iterable[Sentence], names: set[str], most: int) -> list[str]:
    """The names that come most often, each in the fullest form that is usual, as in "Ann Lee".

    Args:
        names: stemmed words that are names, see `Vocabulary`.
    """
    runs: Counter[str] = Counter()
    single: Counter[str] = Counter()
    for sentence in sentences:
        for run in _NAMES.findall(sentence.text):
            words = [w for w in run.split() if all(part in names for part in words_of(w))]
            words = [word for word in words if len(word) > 2 and not _NO_NAMES.match(word)]
            if words:
                runs[" ".join(words)] += 1
                single.update(words)
    found: list[str] = []
    for word, count in single.most_common():
        if len(found) == most or count < 3:
            break
        if any(word in name.split() for name in found):
            continue
        full = {run: n for run, n in runs.items() if word in run.split()}
        longer = {run: n for run, n in full.items() if " " in run and n >= 2}
        if len(longer) > 1 and not any(run.startswith(word) for run in longer):
            continue  # a family: its members come by their own names
        full = longer or full
        found.append(max(full, key=lambda run: (full[run], run)))
    return found


def overlap(text: str, wanted: Collection[str]) -> float:
    """Share [0, 1] of the wanted words, see `Vocabulary.focus_words`, that a text holds."""
    held = set(words_of(text))
    # The stems are crude: "glove" and "glov" are the same.
    found = [any(_alike(word, other) for other in held) for word in wanted]
    return sum(found) / len(found) if found else 0.0


def _alike(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    return short == long or (
        len(short) > 3 and len(long) - len(short) < 2 and long.startswith(short)
    )


def distinct_4grams(text: str) -> float:
    """Share of a text's 4-grams of words that are not said before: 1 where nothing repeats."""
    words = text.lower().split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0
