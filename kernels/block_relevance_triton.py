"""Representatives against queries, in Triton: twin of `block_relevance.block_relevance_torch`.

A program takes a tile of blocks with all their representatives and goes through the queries; the
rule "mass" does so twice, the second time with the softmax's denominators known, so that nothing of
size queries x representatives is ever written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .block_relevance import Rule
from .launch import operand_of, pad

SUM, MAX, DENOMINATOR, MASS = range(4)
TILE_KEYS, TILE_ROWS = 64, 64


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def _relevance_kernel(
    p_q,  # [H_kv, n_rows, D], contiguous
    p_k,  # [H_kv, n_blocks, R, D], last two dimensions contiguous
    p_missing,  # [n_blocks] uint8
    p_lse,  # DENOMINATOR writes [H_kv, n_rows, tiles], MASS reads [H_kv, n_rows]
    p_out,  # [H_kv, n_blocks] float32
    n_rows,
    n_blocks,
    stride_kh,
    STRIDE_N: tl.constexpr,
    R: tl.constexpr,
    PAD_R: tl.constexpr,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a tile
    ROWS: tl.constexpr,
    WAY: tl.constexpr,
    HAS_MISSING: tl.constexpr,
    OPERAND: tl.constexpr,
):
    i_t = tl.program_id(0)
    i_h = tl.program_id(1).to(tl.int64)
    o_j = tl.arange(0, BLOCKS * PAD_R)
    o_n = i_t * BLOCKS + o_j // PAD_R
    o_r = o_j % PAD_R
    m_j = (o_n < n_blocks) & (o_r < R)
    if HAS_MISSING:
        m_j = m_j & (tl.load(p_missing + o_n, mask=o_n < n_blocks, other=1) == 0)
    o_d = tl.arange(0, PAD_D)
    m_d = o_d < D
    p_key = p_k + i_h * stride_kh + o_n.to(tl.int64)[:, None] * STRIDE_N
    p_key += o_r[:, None] * D + o_d[None, :]
    b_k = tl.load(p_key, mask=m_j[:, None] & m_d[None, :], other=0.0)
    o_b = i_t * BLOCKS + tl.arange(0, BLOCKS)

    if WAY == 0:
        b_q = tl.load(p_q + i_h * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_s = tl.sum(b_k.to(tl.float32) * b_q[None, :], axis=1)
        b_out = tl.sum(tl.reshape(b_s, [BLOCKS, PAD_R]), axis=1)
    else:
        b_t = tl.trans(b_k.to(OPERAND))
        b_out = tl.zeros([BLOCKS], tl.float32)
        for o_s in range(0, n_rows, ROWS):
            o_q = o_s + tl.arange(0, ROWS)
            m_q = o_q < n_rows
            p_row = p_q + (i_h * n_rows + o_q)[:, None] * D + o_d[None, :]
            b_q = tl.load(p_row, mask=m_q[:, None] & m_d[None, :], other=0.0).to(OPERAND)
            b_s = tl.dot(b_q, b_t, input_precision="ieee")
            b_s = tl.where(m_j[None, :], b_s, float("-inf"))
            if WAY == 1:
                b_top = tl.max(tl.reshape(b_s, [ROWS, BLOCKS, PAD_R]), axis=2)
                b_out += tl.sum(tl.where(m_q[:, None], b_top, 0.0), axis=0)
            elif WAY == 2:
                b_top = tl.max(b_s, axis=1)
                b_safe = tl.where(b_top == float("-inf"), 0.0, b_top)  # a tile of missing blocks
                b_lse = b_safe + tl.log(tl.sum(tl.exp(b_s - b_safe[:, None]), axis=1))
                o_out = (i_h * n_rows + o_q) * tl.num_programs(0) + i_t
                tl.store(p_lse + o_out, b_lse, mask=m_q)
            else:
                b_lse = tl.load(p_lse + i_h * n_rows + o_q, mask=m_q, other=0.0)
                b_p = tl.where(m_q[:, None], tl.exp(b_s - b_lse[:, None]), 0.0)
                b_out += tl.sum(tl.reshape(tl.sum(b_p, axis=0), [BLOCKS, PAD_R]), axis=1)
    if WAY != 2:
        if HAS_MISSING:
            m_gone = tl.load(p_missing + o_b, mask=o_b < n_blocks, other=1) != 0
            b_out = tl.where(m_gone, float("-inf"), b_out)
        tl.store(p_out + i_h * n_blocks + o_b, b_out, mask=o_b < n_blocks)


def block_relevance_triton(
    q: Tensor, keys: Tensor, rule: Rule, missing: Tensor | None = None
) -> Tensor:
    """Run the kernel; see `block_relevance.block_relevance`."""
    assert q.ndim == 3 and keys.ndim == 4 and q.shape[0] == keys.shape[0], (q.shape, keys.shape)
    heads, n_blocks, per_block, d = keys.shape
    assert keys.stride(3) == 1 and (per_block == 1 or keys.stride(2) == d), keys.stride()
    out = q.new_empty(heads, n_blocks, dtype=torch.float32)
    if n_blocks == 0:
        return out
    if rule == "sum":
        q = q.sum(dim=1, keepdim=True, dtype=torch.float32)
    q = q.contiguous()
    n_rows = q.shape[1]
    padded = triton.next_power_of_2(per_block)
    blocks = max(1, TILE_KEYS // padded)
    if blocks * padded < 16:  # what tl.dot takes at least
        blocks = 16 // padded
    tiles = triton.cdiv(n_blocks, blocks)
    same = q.dtype == keys.dtype
    ways = {"sum": (SUM,), "max": (MAX,), "mass": (DENOMINATOR, MASS)}[rule]
    lse = out
    for way in ways:
        if way == DENOMINATOR:
            lse = q.new_empty(heads, n_rows, tiles, dtype=torch.float32)
        elif way == MASS:
            lse = torch.logsumexp(lse, dim=-1)
        _relevance_kernel[(tiles, heads)](
            q,
            keys,
            out if missing is None else missing.view(torch.uint8),
            lse,
            out,
            n_rows,
            n_blocks,
            keys.stride(0) if heads > 1 else n_blocks * keys.stride(1),
            STRIDE_N=keys.stride(1) if n_blocks > 1 else per_block * d,
            R=per_block,
            PAD_R=padded,
            D=d,
            PAD_D=pad(d),
            BLOCKS=blocks,
            ROWS=min(TILE_ROWS, pad(n_rows)),
            WAY=way,
            HAS_MISSING=missing is not None,
            OPERAND=operand_of(q.dtype if same else torch.float32, _relevance_kernel),
            num_warps=4,
            num_stages=1,
        )
    return out
