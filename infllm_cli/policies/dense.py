"""Dense attention: everything is kept, everything is attended, at its true position."""

from __future__ import annotations

from torch import Tensor

from infllm_cli.memory.attended import note_mass
from infllm_cli.memory.layer import LayerGeometry, OnDeviceOnly, window_of
from infllm_cli.memory.softmax import attend, attend_mass
from infllm_cli.memory.step import Step
from infllm_cli.policies.positions import token_range


class DenseLayer(OnDeviceOnly):
    """The reference inside the trained length; past it positions are such as were never trained.

    Keys are kept rotated. What is held grows with the context.
    """

    def __init__(self, geometry: LayerGeometry, chunk_tokens: int) -> None:
        self.geometry = geometry
        self.chunk_tokens = chunk_tokens
        self.window = window_of(geometry)
        self._expected_tokens = 0
        self._marks: list[int] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        g, window = self.geometry, self.window
        assert step.start == window.end, "a step begins where the last one ended"
        slack = max(2 * self.chunk_tokens, self._expected_tokens - window.end - step.length)
        window.make_room(step.length, slack)
        table = step.table(g.rotary, step.start, step.length)
        q = g.rotary.rotate(q, table)
        scale = g.rotary.query_scale(step.start, step.length)
        if scale is not None:
            q = (q * scale).to(q.dtype)
        window.push(k, g.rotary.rotate(k, table), v, None)
        held = slice(window.first, window.last)
        keys, values = window.rotated[:, held], window.values[:, held]
        mask = step.mask(keys.shape[1], q)
        if step.mass is None:
            return attend(q, keys, values, mask, g.scaling, g.softcap)
        out, drawn = attend_mass(q, keys, values, mask, g.scaling, g.softcap, causal=True)
        note_mass(step, g.index, token_range(0, window.end), drawn.sum(dim=0))
        return out

    def mark(self) -> None:
        """Remember this state."""
        self._marks.append(len(self.window))

    def rollback(self) -> None:
        """Return to the state that was marked last: nothing of it has been lost."""
        self.window.last = self.window.first + self._marks.pop()

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens, so that growing need not copy."""
        self._expected_tokens = tokens

    @property
    def device_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self.window.nbytes
