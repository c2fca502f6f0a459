"""A layer that was trained to see a sliding window only (Gemma-2 and -3, some Qwen2, Phi-3)."""

from __future__ import annotations

from torch import Tensor

from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.softmax import attend
from infllm_cli.memory.step import Step
from infllm_cli.memory.window import Window


class SlidingLayer:
    """Keeps the last `sliding_window` tokens, rotated at their true positions; no blocks."""

    def __init__(self, geometry: LayerGeometry, chunk_tokens: int) -> None:
        g = geometry
        assert g.sliding_window is not None
        self.geometry = g
        self.chunk_tokens = chunk_tokens
        self.window = self._new_window()
        self._marked: list[Window] = []

    def _new_window(self) -> Window:
        g = self.geometry
        return Window(
            g.kv_heads,
            g.head_dim,
            g.value_dim,
            lead=0,
            dtype=g.dtype,
            device=g.device,
            keep_raw=False,
            keep_query_sums=False,
        )

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

    def reserve(self, tokens: int) -> None:
        """Nothing grows with the document here."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the window."""
        return self.window.nbytes

    @property
    def host_bytes(self) -> int:
        """Nothing is offloaded."""
        return 0

    @property
    def mapped_bytes(self) -> int:
        """Nothing is on disk."""
        return 0


def windows_only(layers: list[LayerGeometry]) -> int | None:
    """The sliding window of a model all of whose layers slide, or None.

    Such a model was never trained on longer distances: its window is its trained length, and the
    tiers reach beyond it.
    """
    windows = [layer.sliding_window for layer in layers]
    return None if None in windows else min(w for w in windows if w is not None)
