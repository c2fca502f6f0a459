"""Sinks and window, nothing else: StreamingLLM and LM-Infinite.

Both let the token at position t attend the first S tokens and the last W of the others, itself
included, and give the rest up for good. They differ in how far away the sinks are. What a token
sees does not depend on the chunk that it comes in.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from infllm_cli.memory.attended import note_mass
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry, OnDeviceOnly, window_of
from infllm_cli.memory.step import Step
from infllm_cli.memory.two_distances import Keys
from infllm_cli.memory.window import Window
from infllm_cli.policies.positions import capped_scale, capped_table, token_range


class SinkWindowLayer(OnDeviceOnly, abc.ABC):
    """What both keep: S sinks, un-rotated, and a window of W tokens, rotated where they stand.

    W is the window and, since all policies attend the same number of tokens, what others load as
    blocks.

    Args:
        cap: the largest position that a query takes towards sinks.
    """

    def __init__(self, geometry: LayerGeometry, config: MemoryConfig, cap: int) -> None:
        g = geometry
        self.geometry = g
        self.config = config
        self.cap = cap
        self.reach = config.budget_tokens - config.sink_tokens
        self.sink_keys = torch.empty(g.kv_heads, 0, g.head_dim, dtype=g.dtype, device=g.device)
        self.sink_values = torch.empty(g.kv_heads, 0, g.value_dim, dtype=g.dtype, device=g.device)
        self.window = window_of(g)
        self._marks: list[tuple[Tensor, Tensor, Window]] = []

    @property
    def end(self) -> int:
        """Absolute position just past the last token."""
        return self.window.end if len(self.window) else self.sink_keys.shape[1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        g, window = self.geometry, self.window
        assert step.start == self.end, "a step begins where the last one ended"
        table = step.table(g.rotary, step.start, step.length)
        near_q = g.rotary.rotate(q, table)
        rotated = g.rotary.rotate(k, table)
        missing = min(self.config.sink_tokens - self.sink_keys.shape[1], step.length)
        if missing > 0:
            self.sink_keys = torch.cat([self.sink_keys, k[:, :missing]], dim=1)
            self.sink_values = torch.cat([self.sink_values, v[:, :missing]], dim=1)
        missing = max(missing, 0)
        if missing < step.length:
            if not len(window):
                window.start = step.start + missing
            window.make_room(step.length - missing, slack=2 * self.config.chunk_tokens)
            window.push(k[:, missing:], rotated[:, missing:], v[:, missing:], None)
        out, drawn, positions = self._attend(q, near_q, step)
        if drawn is not None:
            note_mass(step, g.index, positions, drawn.sum(dim=0))
        # The next token sees the last W - 1 of these and itself.
        window.drop(max(0, len(window) - (self.reach - 1)))
        return out

    @abc.abstractmethod
    def _attend(
        self, q: Tensor, near_q: Tensor, step: Step
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """out [H, L, d], the mass [H, T] of each key if wanted, and the keys' positions [T]."""

    def _in_window(self) -> Keys:
        held = slice(self.window.first, self.window.last)
        return Keys(self.window.rotated[:, held], self.window.values[:, held])

    def _far_query(self, q: Tensor, step: Step) -> Tensor:
        return self.geometry.rotary.rotate(q, capped_table(step, self.geometry.rotary, self.cap))

    def _scaled(self, q: Tensor, step: Step) -> Tensor:
        """Ministral-3 scales queries by where they stand."""
        scale = capped_scale(step, self.geometry.rotary, self.cap)
        return q if scale is None else (q * scale).to(q.dtype)

    def _window_mask(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of queries [L, 1] and of window keys [1, n]; who sees whom [L, n]."""
        query = torch.arange(step.start, step.end)[:, None]
        key = token_range(self.window.start, self.window.start + len(self.window))[None, :]
        return query, key, (key <= query) & (key > query - self.reach)

    def mark(self) -> None:
        """Remember this state."""
        self._marks.append((self.sink_keys, self.sink_values, self.window.copy()))

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        self.sink_keys, self.sink_values, self.window = self._marks.pop()

    @property
    def device_bytes(self) -> int:
        """Bytes of sinks and window."""
        return self.sink_keys.nbytes + self.sink_values.nbytes + self.window.nbytes
