"""Rotary positions: cosine and sine tables at positions of our choosing, and the rotation.

Keys are stored un-rotated, so that one key can stand at a different place in every context it is
loaded into (RoPE, arXiv 2104.09864; consecutive positions as in StreamingLLM, arXiv 2309.17453).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """Cosines and sines of a run of positions, [n, r / 2] float32, r the rotated dimensions."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotation of one kind of layer.

    Attributes:
        inv_freq: [r / 2] radians per position.
        interleaved: whether dimension pairs are neighbours (GLM, Cohere) or halves apart (Llama).
        scale_beta, scale_length: Ministral-3 scales a query at position p by
            `1 + beta * ln(1 + floor(p / length))`; beta 0 for all others.
    """

    inv_freq: Tensor
    interleaved: bool = False
    scale_beta: float = 0.0
    scale_length: int = 1

    def table(self, start: int, length: int) -> Table:
        """Tables for positions [start, start + length).

        Angles are float64: at a million tokens a float32 angle is off by several hundredths.
        """
        device = self.inv_freq.device
        positions = torch.arange(start, start + length, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.inv_freq.double()[None, :]
        return Table(angles.cos().float(), angles.sin().float())

    def query_scale(self, start: int, length: int) -> Tensor | None:
        """Factors [length, 1] for queries at context positions [start, start + length), or None."""
        if self.scale_beta == 0.0 or start + length <= self.scale_length:
            return None
        steps = torch.arange(start, start + length, device=self.inv_freq.device)
        steps = torch.div(steps, self.scale_length, rounding_mode="floor")
        return 1 + self.scale_beta * torch.log1p(steps.float())[:, None]

    def rotate(self, x: Tensor, table: Table, out: Tensor | None = None) -> Tensor:
        """Rotate x [..., n, d] to the positions of `table`; only the first r dimensions turn.

        `out` may be a strided view of the same shape; it may not overlap x.
        """
        cos, sin = table
        half = cos.shape[-1]
        out = torch.empty_like(x) if out is None else out
        if self.interleaved:
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            out_a, out_b = out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2]
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            out_a, out_b = out[..., :half], out[..., half : 2 * half]
        # Products in float32 whatever x is, rounded once at the end.
        out_a.copy_(torch.addcmul(a * cos, b, sin, value=-1))
        out_b.copy_(torch.addcmul(b * cos, a, sin))
        if 2 * half < x.shape[-1]:
            out[..., 2 * half :].copy_(x[..., 2 * half :])
        return out


NO_ROTATION = Rotary(torch.zeros(0))
