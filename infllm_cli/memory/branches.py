"""Several short contexts side by side in one pass, each a stretch of the memory.

The tokens of all branches go through the model as one sequence; attention keeps them apart: a
branch sees the sinks, its own stretch of the memory, and its own tokens before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.rotary import Rotary, Table
from infllm_cli.memory.scattered import Scattered


class Branches:
    """Attention of C branches with `length` tokens each.

    Args:
        spans: first and last (excluded) absolute position of each branch's stretch.
        length: tokens per branch.
    """

    def __init__(
        self, layers: list[LayerMemory], spans: list[tuple[int, int]], length: int
    ) -> None:
        assert spans and all(first < last for first, last in spans)
        self.layers = layers
        self.length = length
        held = layers[0].window.end
        self.sink_tokens = sinks = min(layers[0].config.sink_tokens, held)
        # What lies in the sinks is seen by every branch.
        self.spans = [(max(first, sinks), max(last, sinks)) for first, last in spans]
        self.stretch = max(last - first for first, last in self.spans)
        # A shorter stretch stands at the end; what stands in front of it nobody sees.
        ends = torch.tensor([last for _, last in self.spans])[:, None]
        places = (ends - self.stretch + torch.arange(self.stretch)).clamp_(sinks, held - 1)
        self._places = Scattered(layers[0], places.flatten()) if self.stretch else None
        self._mask: Tensor | None = None
        self._tables: dict[tuple[int, int, int], Table] = {}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [H, C * L, d], k and v [H_kv, C * L, d], un-rotated -> out [H, C * L, d]."""
        layer = self.layers[index]
        g = layer.geometry
        context = self.sink_tokens + self.stretch
        own = self._table(g.rotary, context, self.length)
        q = g.rotary.rotate(self._apart(q), own)
        k = g.rotary.rotate(self._apart(k), own)
        scale = g.rotary.query_scale(context, self.length)
        if scale is not None:
            q = (q * scale).to(q.dtype)
        keys, values = self._context(layer)
        keys = torch.cat([keys, k], dim=2)
        values = torch.cat([values, self._apart(v)], dim=2)
        out = _attend(q, keys, values, self._visible(q.device), g.scaling, g.softcap)
        return out.transpose(0, 1).reshape(q.shape[1], -1, values.shape[-1])

    def _apart(self, x: Tensor) -> Tensor:
        """[heads, C * L, d] -> [C, heads, L, d]."""
        return x.unflatten(1, (len(self.spans), self.length)).transpose(0, 1)

    def _table(self, rotary: Rotary, start: int, length: int) -> Table:
        key = (id(rotary), start, length)
        if key not in self._tables:
            self._tables[key] = rotary.table(start, length)
        return self._tables[key]

    def _context(self, layer: LayerMemory) -> tuple[Tensor, Tensor]:
        """Sinks and stretch of each branch: keys, rotated, and values [C, H_kv, S + n, d].

        A shorter stretch stands at the end, next to the branch's tokens.
        """
        g, sinks, context = layer.geometry, self.sink_tokens, self.sink_tokens + self.stretch
        shape = (len(self.spans), g.kv_heads, context)
        keys = torch.empty(*shape, g.head_dim, dtype=g.dtype)
        values = torch.empty(*shape, g.value_dim, dtype=g.dtype)
        keys[:, :, :sinks], values[:, :, :sinks] = layer.stretch(0, sinks)
        if self._places is not None:
            for target, found in zip((keys, values), self._places.of(layer), strict=True):
                apart = found.unflatten(1, (len(self.spans), self.stretch))
                target[:, :, sinks:] = apart.transpose(0, 1)
        keys, values = keys.to(g.device), values.to(g.device)
        return g.rotary.rotate(keys, self._table(g.rotary, 0, context)), values

    def _visible(self, device: torch.device) -> Tensor:
        """[C, 1, L, S + n + L] whether a token sees a key."""
        if self._mask is None:
            context, length = self.sink_tokens + self.stretch, self.length
            mask = torch.ones(len(self.spans), 1, length, context + length, dtype=torch.bool)
            mask[..., context:] = torch.ones(length, length, dtype=torch.bool).tril()
            for branch, (first, last) in enumerate(self.spans):
                mask[branch, :, :, self.sink_tokens : context - (last - first)] = False
            self._mask = mask.to(device)
        return self._mask


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of q [C, H, L, d] over k, v [C, H_kv, T, d] -> [C, H, L, d]."""
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True
        )
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scaling
    scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.matmul(weights.to(v.dtype), v)
