"""Random queries, keys and values for one layer, and rotation written out the slow way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.rotary import Rotary

CPU = torch.device("cpu")
# Largest difference of outputs, which are of order 1. Keys are rounded after rotation, so in
# bfloat16 a score of about 3 may be off by some hundredths.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def make_geometry(
    heads: int = 6,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    *,
    interleaved: bool = False,
    softcap: float | None = None,
    sliding: int | None = None,
    beta: float = 0.0,
    index: int = 0,
) -> LayerGeometry:
    inv_freq = 100.0 ** (-torch.arange(4) / 4.0)
    return LayerGeometry(
        index=index,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=10,  # 8 of them turn
        value_dim=7,
        scaling=0.4,
        softcap=softcap,
        sliding_window=sliding,
        rotary=Rotary(inv_freq, interleaved, beta, 17),
        dtype=dtype,
        device=CPU,
    )


@dataclass
class Stream:
    """Random queries, keys and values of many tokens, [H or H_kv, n, d]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def part(self, start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(x[:, start : start + length] for x in (self.q, self.k, self.v))


def make_stream(g: LayerGeometry, tokens: int, seed: int = 0) -> Stream:
    generator = torch.Generator().manual_seed(seed + 31 * g.index)

    def draw(heads: int, dim: int) -> Tensor:
        return torch.randn(heads, tokens, dim, generator=generator).to(g.dtype)

    return Stream(
        draw(g.heads, g.head_dim), draw(g.kv_heads, g.head_dim), draw(g.kv_heads, g.value_dim)
    )


def rotate(x: Tensor, positions: Iterable[int], rotary: Rotary) -> Tensor:
    """Rotate x [..., n, d] to positions [n], one pair of dimensions at a time, in float64."""
    out = x.double().clone()
    half = len(rotary.inv_freq)
    at = torch.tensor(list(positions), dtype=torch.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rotary.interleaved else (i, i + half)
        angle = at * float(rotary.inv_freq[i])
        out[..., a] = x[..., a].double() * angle.cos() - x[..., b].double() * angle.sin()
        out[..., b] = x[..., b].double() * angle.cos() + x[..., a].double() * angle.sin()
    return out
