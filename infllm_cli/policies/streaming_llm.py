"""StreamingLLM (arXiv 2309.17453): sinks and window at consecutive positions."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.step import Step
from infllm_cli.memory.two_distances import Keys, attend_two_distances
from infllm_cli.policies.positions import additive, token_range
from infllm_cli.policies.sink_window import SinkWindowLayer


class StreamingLLMLayer(SinkWindowLayer):
    """Positions are those within the cache: sinks at 0 .. S - 1, the window behind them.

    A token that fills the last place of a full cache stands at S + W - 1, so its distance to sink
    j is `min(t, S + W - 1) - j`; within the window distances are the true ones.
    """

    def __init__(self, geometry: LayerGeometry, config: MemoryConfig) -> None:
        super().__init__(geometry, config, cap=config.budget_tokens - 1)

    def _attend(
        self, q: Tensor, near_q: Tensor, step: Step
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        g = self.geometry
        query, window_at, visible = self._window_mask(step)
        held = self.sink_keys.shape[1]
        sink_at = token_range(0, held)[None, :]
        at_own_place = step.table(g.rotary, 0, held)
        sinks = Keys(g.rotary.rotate(self.sink_keys, at_own_place), self.sink_values)
        mask = step.cached_mask(
            ("streaming", held, self.window.start, len(self.window)),
            lambda: additive(torch.cat([sink_at <= query, visible], dim=1), q),
        )
        out, drawn = attend_two_distances(
            self._scaled(self._far_query(q, step), step),
            self._scaled(near_q, step),
            sinks,
            self._in_window(),
            mask,
            g.scaling,
            g.softcap,
            want_mass=step.mass is not None,
        )
        return out, drawn, torch.cat([sink_at, window_at], dim=1)[0]
