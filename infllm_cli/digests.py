"""What comes out while a document is summarized: digests, passes, the summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infllm_cli.evidence import Passage
from infllm_cli.parts import Part, Piece
from infllm_cli.telling import Candidate


@dataclass(frozen=True, slots=True)
class Digest:
    """What some pieces of a document say in short.

    Attributes:
        pieces: indices of those it was made from.
        quoted: whether its words are the document's.
        candidates: the document's sentences that a further pass may choose from.
        evidence: where in the document it comes from.
    """

    text: str
    pieces: tuple[int, ...]
    quoted: bool
    candidates: list[Candidate]
    evidence: list[Passage]

    @property
    def words(self) -> int:
        """Words between white space."""
        return len(self.text.split())


@dataclass(frozen=True, slots=True)
class PieceTold:
    """A piece has been summarized; `total` pieces there are."""

    piece: Piece
    part: Part
    digest: Digest
    total: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PassDone:
    """A pass made fewer digests of many."""

    number: int
    inputs: int
    outputs: int
    words_in: int
    words_out: int


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary with what it was made from.

    Attributes:
        digests: one per part, in document order.
        told: indices of the parts that its evidence lies in.
        seconds: reading left out.
    """

    text: str
    quoted: bool
    parts: list[Part]
    digests: list[Digest]
    evidence: list[Passage]
    told: list[int]
    seconds: float


def groups_of(digests: Sequence[Digest], most_words: int) -> list[list[Digest]]:
    """Neighbours together, about `most_words` words in a group and never one alone but at the end.

    So there are at most half as many groups as digests, however long these are.
    """
    groups: list[list[Digest]] = [[]]
    for digest in digests:
        words = sum(d.words for d in groups[-1])
        if len(groups[-1]) >= 2 and words + digest.words > most_words:
            groups.append([])
        groups[-1].append(digest)
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return groups
