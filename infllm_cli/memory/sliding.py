"""A layer that was trained to see a sliding window only (Gemma-2 and -3, some Qwen2, Phi-3)."""

from __future__ import annotations

from torch import Tensor

from infllm_cli.memory.layer import LayerGeometry, OnDeviceOnly, window_of
from infllm_cli.memory.softmax import attend
from infllm_cli.memory.step import Step
from infllm_cli.memory.window import Window


class SlidingLayer(OnDeviceOnly):
    """Keeps the last `sliding_window` tokens, rotated at their true positions; no blocks."""

    def __init__(self, geometry: LayerGeometry, chunk_tokens: int) -> None:
        assert geometry.sliding_window is not None
        self.geometry = geometry
        self.chunk_tokens = chunk_tokens
        self.window = window_of(geometry)
        self._marked: list[Window] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        g, window = self.geometry, self.window
        assert step.start == window.end, "a step begins where the last one ended"
        window.make_room(step.length, slack=self.chunk_tokens)
        table = step.table(g.rotary, step.start, step.length)
        q = g.rotary.rotate(q, table)
        scale = g.rotary.query_scale(step.start, step.length)
        if scale is not None:
            q = (q * scale).to(q.dtype)
        window.push(k, g.rotary.rotate(k, table), v, None)
        held = slice(window.first, window.last)
        keys = window.rotated[:, held]
        mask = step.mask(keys.shape[1], q, g.sliding_window)
        out = attend(q, keys, window.values[:, held], mask, g.scaling, g.softcap)
        # The next token sees the last `sliding_window` - 1 of these and itself.
        window.drop(max(0, len(window) - (g.sliding_window - 1)))
        return out

    def mark(self) -> None:
        """Remember this state."""
        self._marked.append(self.window.copy())

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        self.window = self._marked.pop()

    @property
    def device_bytes(self) -> int:
        """Bytes of the window."""
        return self.window.nbytes


def windows_only(layers: list[LayerGeometry]) -> int | None:
    """The sliding window of a model all of whose layers slide, or None.

    Such a model was never trained on longer distances: its window is its trained length, and the
    tiers reach beyond it.
    """
    windows = [layer.sliding_window for layer in layers]
    return None if None in windows else min(w for w in windows if w is not None)
