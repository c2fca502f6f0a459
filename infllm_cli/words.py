"""Passages ranked by the words they share with a question: BM25.

Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from infllm_cli.passages import Passages
from infllm_cli.quotable import cut_quotable
from infllm_cli.tokens import Tokens

K1 = 1.2
B = 0.75
# A passage is judged alone, together with one passage on each side of it, and with two: a text
# names who and where once and then goes on with "he" and "there". Of 60 questions on three novels
# the passage with the answer is among the first four for 41 instead of 36 (alone, with a fifth of
# its neighbours' scores), among the first eight or nine for 48 instead of 41; without the words
# that ask for 43 and 48. Of 40 on sources for 23 and 27 instead of 22 and 23, of 24 on the sample
# story for 23 as before. Counts are summed before they saturate: that is what neighbours' scores
# lacked. Weights learned for these and twelve further features of a passage (vectors, distances
# between words, words covered) rank no better.
REACHES = (0, 1, 2)
FEW = 20  # passages
# With these a question begins and hardly ever an answer.
ASKING = frozenset(
    ["who", "whom", "whose", "what", "when", "where", "which", "why", "how", "did", "do", "does"]
)
# Words that weigh less (those of more than a fifth of all passages) say nothing of their own.
COMMON = 1.6
NUMBER_CHARS = 3
_WORD = re.compile(r"\w+")
_INNER = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_ENDINGS = (
    ("'s", ""),
    ("ies", "y"),
    ("ied", "y"),
    ("ing", ""),
    ("ed", ""),
    ("es", ""),
    ("ly", ""),
    ("s", ""),
)
_DOUBLED = "bdgmnprt"  # stopped, running, bigger: the letter that the ending has doubled


def stem(word: str) -> str:
    """A lower-case word without its commonest English ending: crude, but the same for all forms."""
    for ending, instead in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)] + instead
            break
    if len(word) > 3 and word[-1] == word[-2] and word[-1] in _DOUBLED:
        word = word[:-1]
    return word[:-1] if len(word) > 3 and word[-1] == "e" else word


def words_of(text: str) -> list[str]:
    """The stemmed words of a text, without accents; of a compound name its parts as well.

    Who asks of a text types Rostov where it has Rostóv, and "window tokens" where it has
    `window_tokens` or `WindowTokens`.
    """
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in parts if not unicodedata.combining(char))
    found = []
    for word in _WORD.findall(text):
        found.append(stem(word.lower()))
        if "_" in word or not (word.islower() or word[1:].islower()):
            inner = [part for part in _INNER.split(word) if part]
            found += [stem(part.lower()) for part in inner if len(inner) > 1]
    return found


class WordIndex:
    """The words of every passage of a document."""

    def __init__(self, text: str, tokens: Tokens, passages: Passages) -> None:
        postings: dict[str, list[tuple[int, int]]] = {}
        lengths = np.zeros(len(passages))
        for index in range(len(passages)):
            first, last = passages.borders[index], passages.borders[index + 1] - 1
            counts = Counter(words_of(text[tokens.spans[first, 0] : tokens.spans[last, 1]]))
            lengths[index] = counts.total()
            for word, count in counts.items():
                postings.setdefault(word, []).append((index, count))
        self._postings = postings
        self._lengths = lengths
        self._units, self._held_by = len(passages), None
        if len(passages) < FEW:
            texts = [text[a:b] for a, b in cut_quotable(text, 0, len(text))]
            self._units = len(texts)
            self._held_by = Counter(word for unit in texts for word in set(words_of(unit)))

    def weights(self, question: str) -> np.ndarray:
        """How much each word [W] of a question tells: its inverse document frequency.

        Documents are the passages, or where there are `FEW` the sentences: in one passage "the" is
        as rare as a name.
        """
        found = np.array([self._count(word) for word in sorted(set(words_of(question)))])
        return np.log(1 + (self._units - found + 0.5) / (found + 0.5))

    def _count(self, word: str) -> int:
        return len(self._postings.get(word, ())) if self._held_by is None else self._held_by[word]

    def telling(self, question: str) -> np.ndarray:
        """The same [W], 0 for words that most questions share."""
        weights = self.weights(question)
        if self._held_by is not None:  # in a short text these, too, may be rare
            asking = {stem(word) for word in ASKING}
            weights[[word in asking for word in sorted(set(words_of(question)))]] = 0.0
        return np.where(weights < COMMON, 0.0, weights)

    def findable(self, question: str) -> dict[str, float]:
        """What each word of a question tells, of those that the document has."""
        asked = sorted(set(words_of(question)))
        told = zip(asked, self.telling(question), strict=True)
        return {word: float(weight) for word, weight in told if weight and word in self._postings}

    def coverage(self, question: str, passage: int) -> float:
        """What part of the weight of a question's words a passage and its neighbours hold."""
        near = range(passage - 1, passage + 2)
        held = np.array(
            [
                any(index in near for index, _ in self._postings.get(word, ()))
                for word in sorted(set(words_of(question)))
            ],
            dtype=bool,
        )
        weights = self.telling(question)
        return float(weights[held].sum() / max(weights.sum(), 1e-9))

    def holds_numbers(self, question: str, passage: int) -> bool:
        """Whether a passage and its neighbours have all of a question's numbers that the text has.

        Numbers, dates and identifiers of `NUMBER_CHARS` or more: nobody asks for them in other
        words. False where there is none.
        """
        numbers = {
            word
            for word in words_of(question)
            if len(word) >= NUMBER_CHARS
            and any(char.isdecimal() for char in word)
            and word in self._postings
        }
        near = range(passage - 1, passage + 2)
        held = {word for word in numbers if any(at in near for at, _ in self._postings[word])}
        return bool(numbers) and held == numbers

    def judge(
        self, question: str, texts: list[str], reach: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """BM25 scores [n] of texts among each other, and whether they hold each word [n, W].

        A word weighs what it weighs in the document's passages.

        Args:
            reach: of how many neighbours on each side the words count as a text's own.
        """
        asked = sorted(set(words_of(question)))
        counted = [Counter(words_of(text)) for text in texts]
        counts = np.array([[held[word] for word in asked] for held in counted], dtype=float)
        counts = _together(counts.reshape(len(texts), len(asked)), reach)
        lengths = _together(np.array([held.total() for held in counted], dtype=float), reach)
        scores = _saturated(counts, _damping(lengths)[:, None]) @ self.weights(question)
        return scores, counts > 0

    def scores(self, question: str, reaches: Sequence[int] = REACHES) -> np.ndarray:
        """The BM25 score [P] of every passage, summed over `reaches`.

        Args:
            reaches: of how many neighbours on each side the words count as a passage's own; (0,)
                is plain BM25.
        """
        asking = {stem(word) for word in ASKING}
        asked = sorted(set(words_of(question)) - asking)
        asked = [word for word in asked if word in self._postings]
        total = len(self._lengths)
        scores = np.zeros(total)
        for reach in reaches:
            damping = _damping(_together(self._lengths, reach))
            for word in asked:
                counts = np.zeros(total)
                where, held = np.asarray(self._postings[word]).T
                counts[where] = held
                counts = _together(counts, reach)
                found = np.count_nonzero(counts)
                idf = np.log(1 + (total - found + 0.5) / (found + 0.5))
                scores += idf * _saturated(counts, damping)
        return scores


def _together(counts: np.ndarray, reach: int) -> np.ndarray:
    """Counts [n, ...], each with those of so many neighbours on each side."""
    ends = np.cumsum(np.concatenate([np.zeros_like(counts[:1]), counts]), axis=0)
    at = np.arange(len(counts))
    return ends[np.minimum(at + reach + 1, len(counts))] - ends[np.maximum(at - reach, 0)]


def _damping(lengths: np.ndarray) -> np.ndarray:
    """How slowly counts in units of these lengths [n] saturate."""
    return K1 * (1 - B + B * lengths / max(lengths.mean(), 1e-9))


def _saturated(counts: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """What counts of a word tell: the tenth one less than the first."""
    return counts * (K1 + 1) / (counts + damping)
