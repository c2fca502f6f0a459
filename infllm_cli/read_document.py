"""A document as the model has read it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infllm_cli.document import Document
from infllm_cli.meaning import Meanings
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.passages import Passages
from infllm_cli.quoting import Sentence, sentences_of
from infllm_cli.recall import Impression
from infllm_cli.tokens import Tokens
from infllm_cli.words import WordIndex

if TYPE_CHECKING:
    from infllm_cli.reader import Reader


@dataclass
class Memory:
    """Tokens, tiers and passages of one document. Asking never changes them.

    Attributes:
        whole: the document fits the trained length and is attended whole, without blocks.
    """

    document: Document
    tokens: Tokens
    prefix_tokens: int
    state: ModelMemory
    passages: Passages
    whole: bool
    read_tokens: int = 0  # by this process
    reused_tokens: int = 0  # from a saved memory
    read_seconds: float = 0.0
    device_bytes_peak: int = 0
    # What any question looks at; found when first needed.
    neutral: Impression | None = None
    # Its sentences as vectors; made when a question first needs them, or found in its folder.
    meanings: Meanings | None = None
    folder: Path | None = None  # of the saved memory that all of it comes from

    @property
    def first_position(self) -> int:
        """Absolute position of the document's first token."""
        return self.prefix_tokens

    @cached_property
    def words(self) -> WordIndex:
        """The words of every passage."""
        return WordIndex(self.document.text, self.tokens, self.passages)

    @cached_property
    def sentences(self) -> list[Sentence]:
        """All that can be quoted, in document order."""
        every = list(range(len(self.passages)))
        return sentences_of(self.document.text, self.tokens, self.passages, every)

    def to_passages(self, per_block: np.ndarray) -> np.ndarray:
        """Scores [N] of stored blocks, to passages [P]; passages outside all blocks get 0."""
        sizes = self.state.config
        borders = sizes.sink_tokens + np.arange(len(per_block) + 1) * sizes.block_tokens
        return self.passages.spread(per_block, borders - self.first_position)

    def note_device_bytes(self) -> int:
        """Bytes that the tiers hold on the device now; the peak is kept."""
        held = self.state.device_bytes
        self.device_bytes_peak = max(self.device_bytes_peak, held)
        return held

    def is_denser(self, reader: Reader) -> bool:
        """Whether room was so scarce that it is stored in fewer bits than the reader's way."""
        return self.state.config.codec is not reader.config.codec

    @property
    def complete(self) -> bool:
        """Whether every token of the document has been read, by this process or before."""
        return self.reused_tokens + self.read_tokens == len(self.tokens.ids)
