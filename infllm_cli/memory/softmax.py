"""One softmax over the concatenation of sinks, loaded blocks and local window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """Attention of q [H, L, d] over k, v [H_kv, T, d] -> [H, L, d], rotated already.

    `mask` is additive [L, T]; `softcap` c turns a score s into `c * tanh(s / c)` (Gemma-2).
    """
    if softcap is not None:
        return attend_weights(q, k, v, mask, scaling, softcap)[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]


def attend_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `attend`, also returning the weights [H_kv, G * L, T] float32 (query heads of a KV head
    one after the other).
    """
    heads, length, dim = q.shape
    kv_heads, keys = k.shape[:2]
    folded = q.reshape(kv_heads, heads // kv_heads * length, dim)
    scores = torch.matmul(folded, k.transpose(1, 2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.view(kv_heads, -1, length, keys).add_(mask)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v.dtype), v).view(heads, length, v.shape[-1]), weights
