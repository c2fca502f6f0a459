"""What one forward step tells every layer, and what the layers report back."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from infllm_cli.memory.rotary import Rotary, Table


class Phase(enum.Enum):
    """Why tokens pass through the model."""

    READ = "read"  # the document, a chunk at a time
    SKIM = "skim"  # what is said before every question: read like a document, but watched
    ASK = "ask"  # the question
    ANSWER = "answer"  # generated tokens, one at a time

    @property
    def reads(self) -> bool:
        """Whether blocks are looked up as while reading."""
        return self in (Phase.READ, Phase.SKIM)


@dataclass(slots=True)
class Step:
    """One forward pass over `length` tokens whose first has absolute position `start`.

    Attributes:
        keep_from: position of the first token that must stay in the window (the question's first
            token while asking and answering), or None.
        mass: [start + length] float32 attention mass per absolute position, summed over layers,
            heads and queries; None while reading, where nobody looks at it.
        by_layer: the same mass for each layer index apart, where somebody wants to see it.
        block_share: [layers, blocks] mass of each stored block as the exact lookup saw it, filled
            by layer index; None where the lookup was not exact.
        earlier_tables: rotary tables of the step before: from one answer token to the next most
            places stay what they are.
        deferred: what layers on a GPU look at when the step is done, not to wait for it meanwhile.
    """

    phase: Phase
    start: int
    length: int
    keep_from: int | None = None
    mass: Tensor | None = None
    by_layer: dict[int, Tensor] | None = None
    loaded: dict[int, Tensor] = field(default_factory=dict)
    block_mass: dict[int, Tensor] = field(default_factory=dict)
    deferred: list[Callable[[], None]] = field(default_factory=list)
    earlier_tables: dict[tuple[int, int, int], Table] = field(default_factory=dict)
    _tables: dict[tuple[int, int, int], Table] = field(default_factory=dict)
    _masks: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Absolute position just past the step's last token."""
        return self.start + self.length

    @property
    def loaded_blocks(self) -> int:
        """Blocks per KV head that joined the step."""
        return max((blocks.shape[-1] for blocks in self.loaded.values()), default=0)

    def table(self, rotary: Rotary, start: int, length: int) -> Table:
        """The rotary table of a run of positions, computed once for all layers of the step."""
        key = (id(rotary), start, length)
        if key not in self._tables:
            known = self.earlier_tables.get(key)
            self._tables[key] = rotary.table(start, length) if known is None else known
        return self._tables[key]

    @property
    def tables(self) -> dict[tuple[int, int, int], Table]:
        """Those that were wanted."""
        return self._tables

    def mask(self, keys: int, like: Tensor, sliding: int | None = None) -> Tensor | None:
        """Additive mask [length, keys], or None where every query sees every key.

        The step's own tokens are the last `length` of the keys; each sees those before it, and
        with `sliding` only keys less than that many positions away.
        """
        if self.length == 1 and (sliding is None or keys <= sliding):
            return None
        key = (keys, like.dtype, like.device, sliding)
        if key not in self._masks:
            column = torch.arange(keys, device=like.device)[None, :]
            row = torch.arange(keys - self.length, keys, device=like.device)[:, None]
            hidden = column > row
            if sliding is not None:
                hidden |= column <= row - sliding
            mask = torch.zeros(self.length, keys, dtype=like.dtype, device=like.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))
        return self._masks[key]

    def cached_mask(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """A mask of another form, made once for all layers of the step that give the same key."""
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]

    def causal_mask(self, length: int, keys: int, like: Tensor) -> Tensor | None:
        """As `mask`, for the last `length` of so many keys; None for one query."""
        if length == 1:
            return None

        def make() -> Tensor:
            hidden = torch.ones(length, keys, dtype=torch.bool, device=like.device)
            hidden = hidden.triu(keys - length + 1)
            mask = torch.zeros(length, keys, dtype=like.dtype, device=like.device)
            return mask.masked_fill_(hidden, float("-inf"))

        return self.cached_mask(("causal", length, keys, like.dtype, like.device), make)
