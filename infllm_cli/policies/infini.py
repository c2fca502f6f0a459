"""Infini-attention (arXiv 2404.07143): segments, and one matrix per KV head for all before them."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.attended import note_mass
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry, OnDeviceOnly
from infllm_cli.memory.softmax import attend, attend_mass
from infllm_cli.memory.step import Step
from infllm_cli.policies.compressive import Memory, mix, retrieve, written
from infllm_cli.policies.positions import token_range


class InfiniLayer(OnDeviceOnly):
    """Attention within the segment, mixed per head with what the memory tells of those before.

    A segment ends after `infini_segment_tokens` tokens, wherever a chunk ends; then what it adds is
    added to the memory and attention begins anew. A question does not end a segment: it and its
    answer stay in sight of each other until the trained length is full. While nothing has been
    written yet, nothing is read either, whatever the gates say.

    Args:
        gates: [H] float32, the weight of the memory per head (`sigmoid(beta)`); 0: it is not read.
        trained_length: positions of a segment that a question extends.
    """

    def __init__(
        self, geometry: LayerGeometry, config: MemoryConfig, gates: Tensor, trained_length: int
    ) -> None:
        g = geometry
        assert gates.shape == (g.heads,)
        self.geometry = g
        self.config = config
        self.gates = gates.to(g.device, torch.float32)
        self.longest = max(trained_length, config.infini_segment_tokens)
        self.memory = Memory.empty(g.kv_heads, g.head_dim, g.value_dim, g.device)
        self.pending = self.memory  # what the segment so far will add
        self.keys, self.values = self._room(config.infini_segment_tokens)  # rotated
        self.start = 0  # absolute position of the segment's first token
        self.held = 0
        self._marks: list[tuple[Memory, Memory, Tensor, Tensor, int, int]] = []

    def _room(self, tokens: int) -> tuple[Tensor, Tensor]:
        g = self.geometry
        return (
            torch.empty(g.kv_heads, tokens, g.head_dim, dtype=g.dtype, device=g.device),
            torch.empty(g.kv_heads, tokens, g.value_dim, dtype=g.dtype, device=g.device),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        assert step.start == self.start + self.held, "a step begins where the last one ended"
        most = self.longest if step.keep_from is not None else self.config.infini_segment_tokens
        out, done = [], 0
        mass = None
        if step.mass is not None:
            mass = torch.zeros(step.mass.shape)
        while done < step.length:
            if self.held >= most:
                self._end_segment()
            part = slice(done, done + min(step.length - done, most - self.held))
            out.append(self._attend(q[:, part], k[:, part], v[:, part], step, mass))
            done = part.stop
        if mass is not None:
            note_mass(step, self.geometry.index, token_range(0, len(mass)), mass)
        if step.keep_from is None and self.held == self.config.infini_segment_tokens:
            self._end_segment()
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, mass: Tensor | None) -> Tensor:
        """A part of a step that lies within the segment; `mass` per position is added to."""
        g, length, begin = self.geometry, q.shape[1], self.held
        table = step.table(g.rotary, begin, length)
        rotated = g.rotary.rotate(q, table)
        scale = g.rotary.query_scale(begin, length)
        if scale is not None:
            rotated = (rotated * scale).to(rotated.dtype)
        self._push(g.rotary.rotate(k, table), v)
        keys, values = self.keys[:, : self.held], self.values[:, : self.held]
        mask = step.causal_mask(length, self.held, q)
        drawn = None
        if mass is None:
            local = attend(rotated, keys, values, mask, g.scaling, g.softcap)
        else:
            local, drawn = attend_mass(rotated, keys, values, mask, g.scaling, g.softcap)
        reads = self.memory.tokens > 0
        if drawn is not None:
            share = (1 - self.gates) if reads else torch.ones_like(self.gates)
            per_head = drawn * share[:, None]
            mass[self.start : self.start + self.held] += per_head.sum(dim=0).to(mass.device)
        self.pending = self.pending.plus(written(k, v, self.memory, self.config.infini_update))
        return mix(local, retrieve(q, self.memory), self.gates) if reads else local

    def _push(self, keys: Tensor, values: Tensor) -> None:
        end = self.held + keys.shape[1]
        if end > self.keys.shape[1]:  # a question that makes the segment longer
            old = (self.keys, self.values)
            self.keys, self.values = self._room(min(self.longest, 2 * end))
            self.keys[:, : self.held] = old[0][:, : self.held]
            self.values[:, : self.held] = old[1][:, : self.held]
        self.keys[:, self.held : end] = keys
        self.values[:, self.held : end] = values
        self.held = end

    def _end_segment(self) -> None:
        """Write the segment into the memory and begin the next one."""
        g = self.geometry
        self.memory = self.memory.plus(self.pending)
        self.pending = Memory.empty(g.kv_heads, g.head_dim, g.value_dim, g.device)
        self.start += self.held
        self.held = 0
        if self._marks:  # the marked state's tokens lie in these
            self.keys, self.values = self._room(self.config.infini_segment_tokens)

    def mark(self) -> None:
        """Remember this state."""
        self._marks.append(
            (self.memory, self.pending, self.keys, self.values, self.start, self.held)
        )

    def rollback(self) -> None:
        """Return to the state that was marked last: memories and older tokens never change."""
        (self.memory, self.pending, self.keys, self.values, self.start, self.held) = (
            self._marks.pop()
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of the segment and of the memory."""
        compressed = self.memory.nbytes + self.pending.nbytes
        return self.keys.nbytes + self.values.nbytes + compressed
