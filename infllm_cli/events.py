"""What happens while a document is read and asked: yielded by the reader, drawn by a console."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from infllm_cli.evidence import Passage
from infllm_cli.memory.step import Phase


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """A chunk of the document went through the model."""

    tokens: int  # of the document, so far
    reused: int  # of these, from a saved memory
    total: int
    seconds: float
    blocks: int
    device_bytes: int
    host_bytes: int
    loaded_blocks: int  # per KV head in this step


@dataclass(frozen=True, slots=True)
class Remark:
    """Something that the user should know, once."""

    text: str


@dataclass(frozen=True, slots=True)
class Encoding:
    """Sentences of the document are being encoded, for a question in other words than theirs."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Looked:
    """A step of asking or answering looked into the memory.

    Attributes:
        share: part of the step's attention mass that lay on the document (the rest: prompt,
            question, answer so far).
        passages: where in the document, most attended first, scores as parts of the same mass.
        mass: [P] of every passage, beyond what any question draws to it.
        layers: by index, share [P] of each layer's mass; empty unless the memory watches layers.
    """

    phase: Phase
    index: int
    token: str
    loaded_blocks: int
    share: float
    passages: list[Passage]
    seconds: float
    mass: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False)
    layers: dict[int, np.ndarray] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Quoted:
    """The sentence of the document that fits the question best; before the first token."""

    passage: Passage


@dataclass(frozen=True, slots=True)
class TokenOut:
    """A piece of the answer's text became certain."""

    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with its evidence.

    Attributes:
        finish: "stop" (the model ended), "length" (`max_tokens`), "repeat" (a loop was stopped),
            "interrupted" or "noted" (nothing was asked).
        seconds: from the question to the last token.
        first_token_seconds: from the question to the first token.
        evidence: passages attended most, best first.
        reread: passages that stood as text beside the question, in document order.
        quote: the sentence of the document that fits the question best, if one was asked for.
        quote_seconds: from the question to the quotation, which comes before the first token.
        supported: False where no sentence of the document comes near the question; None: not known.
    """

    question: str
    text: str
    finish: str
    tokens: int
    seconds: float
    first_token_seconds: float
    evidence: list[Passage] = field(default_factory=list)
    reread: list[Passage] = field(default_factory=list)
    quote: Passage | None = None
    quote_seconds: float | None = None
    supported: bool | None = None


AskEvent = Remark | Encoding | Looked | Quoted | TokenOut | Answer
