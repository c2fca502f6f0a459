"""One softmax over the concatenation of sinks, loaded blocks and local window."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infllm_cli.kernels.exact_lookup import multiplies_natively

# Queries of each head in a tile: its scores against a whole context stay in the second-level
# cache, and the keys behind a tile's last query are left out.
TILE_QUERIES = 128
# Fewer queries than this are served as well by the library's function.
LEAST_TILED = 32
# Up to so many rows per KV head the keys are the long operand of a product, and go first.
FEW_ROWS = 16


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    *,
    causal: bool = False,
) -> Tensor:
    """Attention of q [H, L, d] over k, v [H_kv, T, d] -> [H, L, d], rotated already.

    `mask` is additive [L, T]; `softcap` c turns a score s into `c * tanh(s / c)` (Gemma-2).
    `causal`: all that the mask hides is the later of the last L keys.
    """
    if softcap is not None:
        return attend_weights(q, k, v, mask, scaling, softcap)[0]
    if mask is not None and q.shape[1] >= LEAST_TILED and multiplies_natively(q):
        return attend_tiles(q, k, v, mask, scaling, causal=causal)
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, scale=scaling, enable_gqa=True
    )[0]


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, *, causal: bool
) -> Tensor:
    """`attend` for processors with products of bfloat16, in tiles of queries.

    torch's own function multiplies pieces too small for such a processor: measured on one core at
    512 queries and 1,792 keys, 30 ms for it and 15 ms for this. Scores and weights are rounded to
    bfloat16, as in the library's eager attention.
    """
    return _in_tiles(q, k, v, mask, scaling, None, causal=causal)


def attend_mass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `attend`, also returning the mass [H, T] float32 that each key draws, over all queries."""
    tiled = softcap is None and mask is not None and q.shape[1] >= LEAST_TILED
    if tiled and multiplies_natively(q):
        return attend_mass_tiles(q, k, v, mask, scaling, causal=causal)
    out, weights = attend_weights(q, k, v, mask, scaling, softcap)
    return out, weights.view(q.shape[0], q.shape[1], -1).sum(dim=1)


def attend_mass_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """`attend_mass` in tiles of queries: no weights of a whole chunk are ever held.

    As `attend_tiles`, but that the weights are float32 until they have been added up: H2O's masses
    are sums over a whole document.
    """
    drawn = q.new_zeros(q.shape[0], k.shape[1], dtype=torch.float32)
    return _in_tiles(q, k, v, mask, scaling, drawn, causal=causal), drawn


def _in_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float,
    drawn: Tensor | None,
    *,
    causal: bool,
) -> Tensor:
    """Attention in tiles; what keys draw is added to `drawn` [H, T] float32, if it is given."""
    kv_heads, keys = k.shape[:2]
    length = q.shape[1]
    # Rounded once more where the scale is no power of two.
    grouped = (q.float() * scaling).to(q.dtype).unflatten(0, (kv_heads, -1))  # [H_kv, G, L, d]
    group, dim = grouped.shape[1], q.shape[2]
    out = q.new_empty(kv_heads, group, length, v.shape[-1])
    # Weights of float32 take twice the bytes.
    tile, precise = (TILE_QUERIES, None) if drawn is None else (TILE_QUERIES // 2, torch.float32)
    for i_h in range(kv_heads):
        for start in range(0, length, tile):
            rows = slice(start, min(start + tile, length))
            seen = keys - length + rows.stop
            b_q = grouped[i_h, :, rows].reshape(-1, dim)
            b_s = torch.mm(b_q, k[i_h, :seen].T).view(group, -1, seen)
            hides = slice(keys - length + start if causal else 0, seen)
            b_s[..., hides] += mask[rows, hides]
            b_w = torch.softmax(b_s, dim=-1, dtype=precise)
            if drawn is not None:
                drawn.unflatten(0, (kv_heads, group))[i_h, :, :seen] += b_w.sum(dim=1)
            b_o = torch.mm(b_w.to(v.dtype).view(-1, seen), v[i_h, :seen])
            out[i_h, :, rows] = b_o.view(group, -1, v.shape[-1])
    return out.flatten(0, 1)


def attend_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As `attend`, also returning the weights [H_kv, G * L, T] float32 (query heads of a KV head
    one after the other).
    """
    heads, length, dim = q.shape
    kv_heads, keys = k.shape[:2]
    folded = q.reshape(kv_heads, heads // kv_heads * length, dim)
    if folded.shape[1] <= FEW_ROWS and multiplies_natively(q):
        # The other way round the keys would be copied first: 0.46 ms instead of 0.14.
        products = torch.bmm(k, folded.transpose(1, 2)).transpose(1, 2)
        scores = products.to(torch.float32, memory_format=torch.contiguous_format).mul_(scaling)
        assert scores.is_contiguous()
    else:
        scores = torch.matmul(folded, k.transpose(1, 2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores.view(kv_heads, -1, length, keys).add_(mask)
    weights = torch.softmax(scores, dim=-1)
    return torch.matmul(weights.to(v.dtype), v).view(heads, length, v.shape[-1]), weights
