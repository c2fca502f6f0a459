"""What can be counted about a summary: how much of its document it speaks of, and how it is said.

No count tells whether a summary is true. Sentences of the document itself have an advantage in
`spoken` and `vouched`, and what is false in the document's own words is vouched for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from infllm_cli.candidates import sentences_by_piece
from infllm_cli.document import Document
from infllm_cli.evidence import Passage
from infllm_cli.parts import Part
from infllm_cli.sentences import split_sentences
from infllm_cli.telling import Vocabulary, distinct_4grams
from infllm_cli.words import K1, B, stem, words_of

LEAST_SHARED = 2  # rare words that a sentence shares with the part it speaks of
# English words that tell nothing, common in the document or not. In other languages only those
# that the document has in many of its sentences are left out: see `Vocabulary`.
_TELL_NOTHING = """
a about above across after again against all almost along already also although always am among an
and another any are around as at away back be became because become been before behind being below
between both but by came can come could did do does done down during each either else even ever
every few first for from get gets go goes had has have he her here hers herself him himself his how
however if in into is it its itself just last less like made make makes many may me might more most
much must my never no nor not nothing now of off often on once one only onto or other others our
out over own per rather said same say says she should since so some something still such take than
that the their them themselves then there therefore these they this those though through throughout
thus to together too toward towards two under until up upon us very was way we well went were what
when where whether which while who whom whose why will with within without would yet you your
"""
TELL_NOTHING = frozenset(stem(word) for word in _TELL_NOTHING.split())


@dataclass(frozen=True, slots=True)
class Scores:
    """The counts of one summary.

    Attributes:
        words: between white space.
        spoken_parts: indices of the parts that it speaks of.
        spoken: their share of all parts.
        distinct_4grams: share of its 4-grams of words that are not said before; 1 below 4 words.
        vouched: share of its different content words that stand in the document anywhere; None
            where it has none.
        content: share of the reference's content words that it has; None without a reference.
    """

    words: int
    spoken_parts: list[int]
    spoken: float
    distinct_4grams: float
    vouched: float | None
    content: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, shares to three places."""
        rounded = asdict(self).items()
        return {name: round(v, 3) if isinstance(v, float) else v for name, v in rounded}


class Scorer:
    """Scores summaries of one document.

    Args:
        parts: of the document, see `infllm_cli.parts`.
        reference: a summary to compare with, of the whole or a paragraph for each part: all of its
            words count alike. None: there is none.
    """

    def __init__(
        self, document: Document, parts: Sequence[Part], reference: str | None = None
    ) -> None:
        by_piece = sentences_by_piece(document.text, parts)
        self._vocabulary = Vocabulary([s for sentences in by_piece for s in sentences])
        self._words = set(words_of(document.text))
        self._parts = [Counter(words_of(document.text[p.start : p.end])) for p in parts]
        self._held_by = Counter(word for part in self._parts for word in part)
        lengths = [part.total() for part in self._parts]
        mean = max(sum(lengths) / len(lengths), 1e-9)
        self._damping = [K1 * (1 - B + B * length / mean) for length in lengths]
        self.wanted = None if reference is None else self.content_words(reference)

    def content_words(self, text: str) -> set[str]:
        """The stems of a text that tell something: no function words, nothing below 3 letters."""
        return self._vocabulary.focus_words(text) - TELL_NOTHING

    def part_of(self, sentence: str) -> int | None:
        """The part whose words a sentence has: the best by BM25, or None.

        Only rare words count, those that at most half of the parts have, and `LEAST_SHARED` of
        them are needed: names that are everywhere say nothing about where.
        """
        total = len(self._parts)
        rare = [
            word
            for word in sorted(self.content_words(sentence))
            if 0 < self._held_by[word] <= max(1, total // 2)
        ]
        best, found = 0.0, None
        for index, (part, damping) in enumerate(zip(self._parts, self._damping, strict=True)):
            shared = [word for word in rare if word in part]
            score = sum(
                math.log(1 + (total - self._held_by[word] + 0.5) / (self._held_by[word] + 0.5))
                * (part[word] * (K1 + 1) / (part[word] + damping))
                for word in shared
            )
            if len(shared) >= LEAST_SHARED and score > best:
                best, found = score, index
        return found

    def scores(self, summary: str) -> Scores:
        """Count."""
        told = {self.part_of(sentence.text) for sentence in split_sentences(summary)}
        spoken = sorted(index for index in told if index is not None)
        content = self.content_words(summary)
        return Scores(
            words=len(summary.split()),
            spoken_parts=spoken,
            spoken=len(spoken) / len(self._parts),
            distinct_4grams=distinct_4grams(summary),
            vouched=len(content & self._words) / len(content) if content else None,
            content=None if not self.wanted else len(content & self.wanted) / len(self.wanted),
        )


def parts_under(
    document: Document, parts: Sequence[Part], passages: Sequence[Passage]
) -> list[int]:
    """Indices of the parts that passages lie in; one that reaches over a border, in the larger."""
    found = set()
    for passage in passages:
        place = (passage.file, passage.lines)
        start = document.text.find(passage.text)
        while start >= 0 and document.place(start, start + len(passage.text)) != place:
            start = document.text.find(passage.text, start + 1)
        assert start >= 0, "evidence is the document's own text"
        end = start + len(passage.text)
        held = [min(end, part.end) - max(start, part.start) for part in parts]
        if max(held) > 0:
            found.add(held.index(max(held)))
    return sorted(found)
