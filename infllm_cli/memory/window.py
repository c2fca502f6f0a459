"""The local window: the most recent tokens of one layer, kept in place.

One buffer per tensor. New tokens are written behind the window, old ones are given up by moving
its start; the slots in front of it are scratch space for the sinks and the loaded blocks, so that
the attention of a step reads one contiguous run of slots and nothing is concatenated.

    slot    0        first - lead        first               last            capacity
            |  free  |  sinks | blocks   |  window           |  free         |
"""

from __future__ import annotations

import torch
from torch import Tensor


class Window:
    """Keys (raw and rotated) and values of positions [start, start + len(self)).

    Attributes:
        start: absolute position of the first token.
        first, last: the slots that the window takes, [first, last).
        rotated, values: [H_kv, capacity, d]; the slots before `first` are the caller's.
        raw: un-rotated keys, or None where nobody will need them (sliding layers).
        query_sums: [H_kv, capacity, d] float32 running sums of rotated queries, or None.
        mass: [H_kv, capacity, 1] float32 attention that each token has drawn, or None; the caller
            adds to it.
    """

    def __init__(
        self,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        lead: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        keep_raw: bool,
        keep_query_sums: bool,
        keep_mass: bool = False,
    ) -> None:
        self.start = 0
        self.lead = lead
        self.first = self.last = lead

        def buffer(dim: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(kv_heads, lead, dim, dtype=kind, device=device)

        self.rotated = buffer(head_dim)
        self.values = buffer(value_dim)
        self.raw = buffer(head_dim) if keep_raw else None
        self.query_sums = buffer(head_dim, torch.float32) if keep_query_sums else None
        self.mass = buffer(1, torch.float32) if keep_mass else None

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def end(self) -> int:
        """Absolute position just past the last token."""
        return self.start + len(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(getattr(self, name).nbytes for name in self._names())

    def _names(self) -> list[str]:
        names = ["rotated", "values", "raw", "query_sums", "mass"]
        return [name for name in names if getattr(self, name) is not None]

    def make_room(self, tokens: int, slack: int) -> None:
        """Have `tokens` free slots behind the window.

        The window moves back to the front when its buffer is at its end; `slack` more slots make
        that rare. The buffer grows only when the window itself has grown.
        """
        capacity = self.rotated.shape[1]
        if self.last + tokens <= capacity:
            return
        held = len(self)
        needed = self.lead + held + tokens
        for name in self._names():
            old = getattr(self, name)
            kept = old[:, self.first : self.last]
            if needed > capacity:
                new = old.new_empty(old.shape[0], needed + slack, old.shape[2])
            else:
                new, kept = old, kept.clone()  # source and target may overlap
            new[:, self.lead : self.lead + held] = kept
            setattr(self, name, new)
        self.first, self.last = self.lead, self.lead + held

    def push(self, raw: Tensor, rotated: Tensor, values: Tensor, query_sum: Tensor | None) -> None:
        """Append L tokens [H_kv, L, d]; `query_sum` is each token's own rotated query."""
        tokens = slice(self.last, self.last + rotated.shape[1])
        self.rotated[:, tokens] = rotated
        self.values[:, tokens] = values
        if self.raw is not None:
            self.raw[:, tokens] = raw
        if self.query_sums is not None:
            assert query_sum is not None
            sums = query_sum.float().cumsum(dim=1)
            if len(self):
                sums += self.query_sums[:, self.last - 1 : self.last]
            self.query_sums[:, tokens] = sums
        if self.mass is not None:
            self.mass[:, tokens] = 0
        self.last = tokens.stop

    def drop(self, tokens: int) -> None:
        """Give up the oldest tokens."""
        assert 0 <= tokens <= len(self)
        self.first += tokens
        self.start += tokens
        if self.query_sums is not None and len(self):
            # Only differences count; a sum over a million tokens would lose them to rounding.
            kept = self.query_sums[:, self.first : self.last]
            kept -= kept[:, :1].clone()

    def held(self) -> dict[str, Tensor]:
        """Copies [H_kv, tokens, d] of what the window holds, by the buffer's name."""
        slots = slice(self.first, self.last)
        return {name: getattr(self, name)[:, slots].clone() for name in self._names()}

    def put(self, start: int, held: dict[str, Tensor]) -> None:
        """Hold what `held` told of another window, whose first position is `start`."""
        for name in self._names():
            old, tokens = getattr(self, name), held[name]
            new = old.new_empty(old.shape[0], self.lead + tokens.shape[1], old.shape[2])
            new[:, self.lead :] = tokens
            setattr(self, name, new)
        self.start = start
        self.first, self.last = self.lead, self.rotated.shape[1]

    def copy(self) -> Window:
        """An independent copy of the tokens held (the scratch slots are not copied)."""
        twin = object.__new__(Window)
        twin.__dict__.update(self.__dict__)
        held = len(self)
        for name in ("rotated", "values", "raw", "query_sums", "mass"):
            old = getattr(self, name)
            if old is not None:
                new = old.new_empty(old.shape[0], self.lead + held, old.shape[2])
                new[:, self.lead :] = old[:, self.first : self.last]
                setattr(twin, name, new)
        twin.first, twin.last = self.lead, self.lead + held
        return twin
