"""LM-Infinite (arXiv 2308.16137): sinks and window, distances capped at the trained length."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.step import Step
from infllm_cli.memory.two_distances import Keys, attend_two_distances
from infllm_cli.policies.positions import additive, token_range
from infllm_cli.policies.sink_window import SinkWindowLayer


class LMInfiniteLayer(SinkWindowLayer):
    """The Lambda-shaped mask; a sink at position j is `min(t - j, trained length)` away.

    Sinks are there twice, once where they are and once at the cap, and each query sees the one that
    is nearer.
    """

    def __init__(self, geometry: LayerGeometry, config: MemoryConfig, trained_length: int) -> None:
        super().__init__(geometry, config, cap=trained_length)

    def _attend(
        self, q: Tensor, near_q: Tensor, step: Step
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        g = self.geometry
        query, window_at, visible = self._window_mask(step)
        held = self.sink_keys.shape[1]
        sink_at = token_range(0, held)[None, :]
        rotated = g.rotary.rotate(self.sink_keys, step.table(g.rotary, 0, held))
        window = self._in_window()
        near = Keys(
            torch.cat([rotated, window.keys], dim=1),
            torch.cat([self.sink_values, window.values], dim=1),
        )
        distance = query - sink_at
        capped = distance > self.cap
        mask = step.cached_mask(
            ("lm-infinite", held, self.window.start, len(self.window)),
            lambda: additive(torch.cat([capped, ~capped & (distance >= 0), visible], dim=1), q),
        )
        at_cap = g.rotary.rotate(q, step.table(g.rotary, self.cap, 1))
        out, drawn = attend_two_distances(
            self._scaled(at_cap, step),
            self._scaled(near_q, step),
            Keys(self.sink_keys, self.sink_values),
            near,
            mask,
            g.scaling,
            g.softcap,
            want_mass=step.mass is not None,
        )
        return out, drawn, torch.cat([sink_at, sink_at, window_at], dim=1)[0]
