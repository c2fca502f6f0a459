"""Context-aware decoding: what the document adds counts for more than what is said without it.

A small model asked "How many guineas?" says "ten" whatever it has read. The question is therefore
asked a second time without the document, and each token is chosen by how much the document raises
it (Shi et al., Trusting Your Evidence, NAACL 2024), among those that are plausible with the
document (the floor of Li et al., Contrastive Decoding, ACL 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase

if TYPE_CHECKING:
    from infllm_cli.reader import Reader

# A token counts as plausible from this part of the likeliest token's probability on.
PLAUSIBLE = 0.05
LOWEST = torch.finfo(torch.float32).min


def contrasted(
    logits: Tensor, without: Tensor, strength: float, held_back: list[int] | None = None
) -> Tensor:
    """Scores [V] of logits [V] with the document against those without it: `(1 + a) p - a q`.

    Implausible tokens get the lowest finite number, so that the scores can be sampled from; so do
    those `held_back`.
    """
    if held_back:
        logits = logits.index_fill(0, torch.tensor(held_back, device=logits.device), LOWEST)
    with_document = torch.log_softmax(logits, dim=-1)
    scores = (1 + strength) * with_document - strength * torch.log_softmax(without, dim=-1)
    floor = with_document.max() + math.log(PLAUSIBLE)
    return scores.masked_fill(with_document < floor, LOWEST)


class Contrast:
    """The model without a document; one for all questions of a reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        trained = reader.loaded.trained_length
        self._state = ModelMemory(
            reader.loaded.layers_for(reader.config.context_tokens),
            reader.config,
            trained_length=trained,
            whole_tokens=trained,
        )
        prompt = reader.prompt
        self._push(np.concatenate([prompt.prefix, prompt.shown]))

    @contextmanager
    def question(self, ids: np.ndarray) -> Iterator[Continuation]:
        """Ask ids [n] (task, question, closing); inside, the answer can be followed."""
        with self._state.question():
            yield Continuation(self._push, self._push(ids))

    def _push(self, ids: np.ndarray) -> Tensor:
        logits = None
        for piece in torch.from_numpy(ids).split(self._reader.config.chunk_tokens):
            _, logits = self._reader.forward(self._state, Phase.READ, piece, want_logits=True)
        assert logits is not None
        return logits


class Continuation:
    """An answer as it would go on without the document.

    Attributes:
        logits: [V] of the next token.
    """

    def __init__(self, push, logits: Tensor) -> None:
        self._push = push
        self.logits = logits

    def follow(self, token: int) -> None:
        """The answer went on with this token."""
        self.logits = self._push(np.asarray([token], dtype=np.int64))
