"""The running-sum rule in one pass over its operands: twin of `representative_scores_torch`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pad


@triton.jit(do_not_specialize=["tokens", "ahead"])
def _scores_kernel(
    p_sum,  # [H_kv, m, D] float32, rows contiguous
    p_k,  # [H_kv, tokens, D], rows contiguous
    p_out,  # [H_kv, tokens] float32
    tokens,
    ahead,
    stride_sum,
    stride_k,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    TILE: tl.constexpr,
):
    i_h = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    m_n = o_n < tokens
    o_d = tl.arange(0, PAD_D)
    mask = m_n[:, None] & (o_d < D)[None, :]
    o_row = o_n[:, None] * D + o_d[None, :]
    p_row = p_sum + i_h * stride_sum + o_row
    b_before = tl.load(p_row, mask=mask, other=0.0)
    b_after = tl.load(p_row + ahead * D, mask=mask, other=0.0)
    b_k = tl.load(p_k + i_h * stride_k + o_row, mask=mask, other=0.0).to(tl.float32)
    b_score = tl.sum((b_after - b_before) * b_k, axis=1) / ahead
    tl.store(p_out + i_h * tokens + o_n, b_score, mask=m_n)


def representative_scores_triton(prefix: Tensor, keys: Tensor, window_tokens: int) -> Tensor:
    """Run the kernel; see `representative_scores.representative_scores`."""
    heads, tokens, d = keys.shape
    assert prefix.dtype == torch.float32 and prefix.shape[2] == d
    assert prefix.stride()[1:] == (d, 1) and keys.stride()[1:] == (d, 1)
    out = keys.new_empty(heads, tokens, dtype=torch.float32)
    tile = 32
    _scores_kernel[(triton.cdiv(tokens, tile), heads)](
        prefix,
        keys,
        out,
        tokens,
        window_tokens,
        prefix.stride(0) if heads > 1 else prefix.shape[1] * d,
        keys.stride(0) if heads > 1 else tokens * d,
        D=d,
        PAD_D=pad(d),
        TILE=tile,
        num_warps=4,
    )
    return out
