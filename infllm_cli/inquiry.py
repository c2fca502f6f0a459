"""What does the model attend in one piece of a document when it is asked what matters there?

The memory is restricted to the piece's own blocks and the sinks (`memory.excerpt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from infllm_cli.drafts import push
from infllm_cli.likelihood import can_judge
from infllm_cli.memory.excerpt import excerpt
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.parts import Piece

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

WHAT_MATTERS = "What is the most important thing that happens?"


@dataclass(frozen=True, slots=True)
class Asked:
    """A piece that has been asked.

    Attributes:
        state: the memory of the piece alone, the question in it.
        offset: where in it the piece's first token stands.
        mass: [n] per token of the piece, beyond what any request draws.
        logits: of what would follow a request for a summary; None where there was none.
    """

    state: ModelMemory
    offset: int
    mass: np.ndarray
    logits: Tensor | None


class Inquiry:
    """Asks the pieces of a memory, one by one.

    Args:
        layers: geometry with rotations for the trained length.
        focus: what to ask about.
        request: for a summary, where the model is to write one; None: it is only asked.
        reserve: tokens that will be added to a piece.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        layers: Sequence[LayerGeometry],
        *,
        focus: str | None,
        request: str | None,
        reserve: int,
    ) -> None:
        self.reader, self.memory = reader, memory
        self.focus, self.request = focus, request
        self._layers = layers
        self._reserve = reserve

    def ask(self, piece: Piece) -> Asked:
        """Ask what matters in a piece, or for a summary of it."""
        state, offset = self._state_of(piece)
        reader, prompt = self.reader, self.reader.prompt
        push(reader, state, Phase.READ, prompt.turn)
        # An answer is to be in a few words; a summary is not.
        task = prompt.task_ids() if self.request is None else prompt.plain_ids("\n\n")
        neutral, _ = push(reader, state, Phase.ASK, task)
        question = self.request
        if question is None:
            about = f"What does the text say about {self.focus}?"
            question = about if self.focus else WHAT_MATTERS
        asked, _ = push(reader, state, Phase.ASK, prompt.plain_ids(question))
        mass = np.mean([mass_on(piece, s, offset) for s in asked], axis=0)
        mass -= np.mean([mass_on(piece, s, offset) for s in neutral], axis=0)
        logits = None
        if self.request is not None:
            _, logits = push(reader, state, Phase.ASK, prompt.closing)
        return Asked(state, offset, mass, logits)

    def _state_of(self, piece: Piece) -> tuple[ModelMemory, int]:
        """A memory of the piece alone, and where in it the piece's first token stands."""
        reader, memory = self.reader, self.memory
        trained = reader.loaded.trained_length
        begin = memory.first_position
        if can_judge(memory.state):
            state = excerpt(
                memory.state,
                self._layers,
                piece.first + begin,
                piece.last + begin,
                trained_length=trained,
                reserve_tokens=self._reserve,
            )
            return state, state.tokens - (piece.last - piece.first)
        # Sliding layers forget: there the piece is read once more, alone.
        state = ModelMemory(
            self._layers, reader.config, trained_length=trained, whole_tokens=trained
        )
        ids = memory.tokens.ids[piece.first : piece.last].astype(np.int64)
        push(reader, state, Phase.READ, np.concatenate([reader.prompt.prefix, ids]))
        return state, begin


def mass_on(piece: Piece, step: Step, offset: int) -> np.ndarray:
    """Mass [n] per query row of a step on the tokens of a piece that begins at `offset`."""
    assert step.mass is not None
    held = step.mass[offset : offset + piece.last - piece.first].double().numpy()
    return held / max(float(step.mass.sum()), 1e-9)
