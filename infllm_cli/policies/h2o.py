"""H2O (arXiv 2306.14048): heavy hitters by accumulated attention, within a fixed budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.memory.attended import note_mass
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry, OnDeviceOnly
from infllm_cli.memory.softmax import attend_mass
from infllm_cli.memory.step import Step
from infllm_cli.policies.positions import token_range


@dataclass(frozen=True, slots=True)
class Kept:
    """What a layer has not given up, per KV head in the document's order; never changed in place.

    Attributes:
        keys, values: [H_kv, n, d], un-rotated.
        mass: [H_kv, n] float32, the attention that each token has drawn so far, summed over the
            queries of the KV head: F_score of the paper.
        positions: [H_kv, n] absolute.
    """

    keys: Tensor
    values: Tensor
    mass: Tensor
    positions: Tensor

    def take(self, slots: Tensor) -> Kept:
        """Some of the tokens, by slots [H_kv, m]."""
        wide = slots[..., None]
        return Kept(
            self.keys.gather(1, wide.expand(-1, -1, self.keys.shape[2])),
            self.values.gather(1, wide.expand(-1, -1, self.values.shape[2])),
            self.mass.gather(1, slots),
            self.positions.gather(1, slots),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all four."""
        return sum(t.nbytes for t in (self.keys, self.values, self.mass, self.positions))


class H2OLayer(OnDeviceOnly):
    """Sinks, the most recent tokens, and of all others those that drew most attention.

    After every step the tokens of least accumulated attention are evicted until the budget holds;
    what is evicted never comes back. With one token per step this is the paper's algorithm 1; a
    chunk attends everything kept and itself before it is decided what of both stays. Positions are
    those within the cache, as for StreamingLLM: true ones would pass the trained length.
    """

    def __init__(self, geometry: LayerGeometry, config: MemoryConfig) -> None:
        g = geometry
        self.geometry = g
        self.config = config
        self.budget = config.budget_tokens
        self.kept = Kept(
            torch.empty(g.kv_heads, 0, g.head_dim, dtype=g.dtype, device=g.device),
            torch.empty(g.kv_heads, 0, g.value_dim, dtype=g.dtype, device=g.device),
            torch.empty(g.kv_heads, 0, device=g.device),
            torch.empty(g.kv_heads, 0, dtype=torch.int64, device=g.device),
        )
        self._end = 0
        self._marks: list[tuple[Kept, int]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        g, kept = self.geometry, self.kept
        assert step.start == self._end, "a step begins where the last one ended"
        before = kept.keys.shape[1]
        total = before + step.length
        keys = torch.cat([kept.keys, k], dim=1)
        values = torch.cat([kept.values, v], dim=1)
        rotated = g.rotary.rotate(q, step.table(g.rotary, before, step.length))
        scale = g.rotary.query_scale(before, step.length)
        if scale is not None:
            rotated = (rotated * scale).to(rotated.dtype)
        placed = g.rotary.rotate(keys, step.table(g.rotary, 0, total))
        mask = step.mask(total, q)
        out, per_head = attend_mass(
            rotated, placed, values, mask, g.scaling, g.softcap, causal=True
        )
        drawn = per_head.unflatten(0, (g.kv_heads, -1)).sum(dim=1)  # [H_kv, T]
        new = token_range(step.start, step.end).to(g.device).expand(g.kv_heads, -1)
        positions = torch.cat([kept.positions, new], dim=1)
        if step.mass is not None:
            note_mass(step, g.index, positions, drawn)
        mass = torch.cat([kept.mass, kept.mass.new_zeros(g.kv_heads, step.length)], dim=1) + drawn
        self._end = step.end
        self.kept = self._evict(Kept(keys, values, mass, positions))
        return out

    def _evict(self, kept: Kept) -> Kept:
        """Keep sinks, window and heavy hitters."""
        total = kept.keys.shape[1]
        if total <= self.budget:
            return kept
        sinks, recent = self.config.sink_tokens, self.config.window_tokens
        between = kept.mass[:, sinks : total - recent]
        heavy = between.topk(self.budget - sinks - recent, dim=1).indices.sort(dim=1).values + sinks
        slots = torch.arange(total, device=heavy.device).expand(len(heavy), -1)
        return kept.take(torch.cat([slots[:, :sinks], heavy, slots[:, total - recent :]], dim=1))

    def mark(self) -> None:
        """Remember this state."""
        self._marks.append((self.kept, self._end))

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        self.kept, self._end = self._marks.pop()

    @property
    def device_bytes(self) -> int:
        """Bytes of what is kept."""
        return self.kept.nbytes
