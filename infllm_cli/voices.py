"""Contexts in which one question is asked, and how they answer together.

A small model answers best from a few passages alone: whatever else it sees draws it off. But what
no passage holds, only the memory can tell. So both are asked, and each token is drawn from the
mixture of what they say, weighted by how well each has foretold the answer so far (a Bayesian
mixture of experts; for retrieved passages: Lewis et al., Retrieval-Augmented Generation, 2020).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step

if TYPE_CHECKING:
    from infllm_cli.evidence import AttentionRecord
    from infllm_cli.reader import Reader


class Voice:
    """A context and what it says next.

    Attributes:
        start: absolute position of the question's first own token, which stays in the window.
        logits: [V] of the next token, once something has been asked.
        weight: logarithm of this voice's part in the mixture, but for what all have in common.
        record: where it looks, if that is wanted.
    """

    def __init__(
        self, reader: Reader, state: ModelMemory, record: AttentionRecord | None = None
    ) -> None:
        self.reader = reader
        self.state = state
        self.start = state.tokens
        self.logits: Tensor | None = None
        self.weight = 0.0
        self.record = record

    def read(self, ids: np.ndarray) -> list[Step]:
        """Let ids [n] go through the model like a document's, a chunk at a time."""
        return [self._push(Phase.READ, piece) for piece in self._pieces(ids)]

    def skim(self, ids: np.ndarray) -> list[Step]:
        """The same, and the steps tell where they looked: what comes before every question."""
        return [self._push(Phase.SKIM, piece) for piece in self._pieces(ids)]

    def ask(self, ids: np.ndarray) -> list[Step]:
        """The same with exact lookup."""
        return [self._push(Phase.ASK, piece) for piece in self._pieces(ids)]

    def _pieces(self, ids: np.ndarray) -> list[Tensor]:
        if not len(ids):
            return []
        return list(torch.from_numpy(ids).split(self.reader.config.chunk_tokens))

    def _push(self, phase: Phase, ids: Tensor) -> Step:
        wanted = not phase.reads
        step, logits = self.reader.forward(
            self.state, phase, ids, keep_from=self.start, want_logits=wanted
        )
        self.logits = logits if wanted else self.logits
        return step


def fresh_state(reader: Reader) -> ModelMemory:
    """A memory of nothing."""
    trained = reader.loaded.trained_length
    return ModelMemory(
        reader.loaded.layers_for(reader.config.context_tokens),
        reader.config,
        trained_length=trained,
        whole_tokens=trained,
        device=reader.loaded.device_options,
    )


def follow(voices: list[Voice], token: int) -> list[Step]:
    """The answer went on with this token; what each voice looked at."""
    reader = voices[0].reader
    found = reader.forward_together(
        [voice.state for voice in voices], token, [voice.start for voice in voices]
    )
    for voice, (_, logits) in zip(voices, found, strict=True):
        voice.logits = logits
    return [step for step, _ in found]


def mixture(voices: list[Voice]) -> Tensor:
    """Logits [V] of what the voices say together."""
    if len(voices) == 1:
        assert voices[0].logits is not None
        return voices[0].logits
    said = [torch.log_softmax(voice.logits, dim=-1) + voice.weight for voice in voices]
    return torch.stack(said).logsumexp(dim=0)


def parts(voices: list[Voice]) -> list[float]:
    """Each voice's part in the mixture; together 1."""
    return torch.tensor([voice.weight for voice in voices]).softmax(dim=0).tolist()


def weigh(voices: list[Voice], token: int) -> None:
    """Give each voice the part that it deserves for having foretold `token`."""
    if len(voices) == 1:
        return
    for voice in voices:
        assert voice.logits is not None
        voice.weight += float(torch.log_softmax(voice.logits, dim=-1)[token])
    total = float(torch.tensor([voice.weight for voice in voices]).logsumexp(dim=0))
    for voice in voices:
        voice.weight -= total
