"""Attention of a chunk over its tiers: a program per tile of queries and query head.

Tier after tier, in the manner of FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tier_tiles import accumulate, load_rows, part_offsets, scores, window_scores


@triton.jit(do_not_specialize=["length", "sinks", "blocks", "window"])
def chunk_kernel(
    p_q,  # [H, length, D], contiguous
    p_sink_k,
    p_sink_v,
    p_slot_k,  # [C, B, D], contiguous
    p_slot_v,
    p_table,  # [H_kv, blocks] int32, contiguous
    p_win_k,
    p_win_v,
    p_cos,
    p_sin,
    p_out,  # [H, length, DV], contiguous
    p_lse,  # [H, length] float32, to the base 2
    length,
    sinks,
    blocks,
    window,
    stride_sink_k,  # from KV head to KV head
    stride_sink_v,
    stride_win_k,
    stride_win_v,
    scale,
    cap,
    GROUP: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAD_H: tl.constexpr,
    REST: tl.constexpr,
    PAD_R: tl.constexpr,
    DV: tl.constexpr,
    PAD_V: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
    WANT_LSE: tl.constexpr,
):
    """A tile of queries of one head over all tiers; outputs, and log-sum-exps if wanted."""
    # Heads vary slowest, so that programs which read the same keys run together.
    i_m = tl.program_id(0)
    i_head = tl.program_id(1).to(tl.int64)
    i_kv = i_head // GROUP
    o_m = i_m * TILE_ROWS + tl.arange(0, TILE_ROWS)
    m_m = o_m < length
    o_k = tl.arange(0, TILE_KEYS)
    o_v = tl.arange(0, PAD_V)
    m_v = o_v < DV

    o_h = tl.arange(0, PAD_H)
    m_h = o_h < HALF
    o_a, o_b = part_offsets(o_h, HALF, INTERLEAVED)
    p_row = p_q + i_head * length * D
    b_qa = load_rows(p_row, o_m, m_m, o_a, m_h, D, OPERAND)
    b_qb = load_rows(p_row, o_m, m_m, o_b, m_h, D, OPERAND)
    b_qc = b_qa
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_qc = load_rows(p_row, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)

    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    b_acc = tl.zeros([TILE_ROWS, PAD_V], tl.float32)

    p_k = p_sink_k + i_kv * stride_sink_k
    p_v = p_sink_v + i_kv * stride_sink_v
    for o_s in range(0, sinks, TILE_KEYS):
        o_n = o_s + o_k
        m_n = o_n < sinks
        b_s = scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, o_n, m_n, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_v = load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    for i_n in range(0, blocks):
        i_slot = tl.load(p_table + i_kv * blocks + i_n).to(tl.int64)
        p_k = p_slot_k + i_slot * (B * D)
        p_v = p_slot_v + i_slot * (B * DV)
        for o_s in range(0, B, TILE_KEYS):
            o_n = o_s + o_k
            m_n = o_n < B
            o_lead = sinks + i_n * B + o_n
            b_s = scores(
                b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, o_lead, m_n, scale, cap,
                D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
            )  # fmt: skip
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
            b_v = load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
            b_max, b_sum, b_acc = accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    p_k = p_win_k + i_kv * stride_win_k
    p_v = p_win_v + i_kv * stride_win_v
    last = window - length + o_m  # the last key that a query sees: itself
    end = tl.minimum(window, window - length + (i_m + 1) * TILE_ROWS)
    for o_s in range(0, end, TILE_KEYS):
        o_n = o_s + o_k
        m_n = o_n < window
        b_s = window_scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        b_s = tl.where(m_n[None, :] & (o_n[None, :] <= last[:, None]), b_s, float("-inf"))
        b_v = load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    b_out = b_acc / b_sum[:, None]
    p_row = p_out + (i_head * length + o_m)[:, None] * DV + o_v[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_v[None, :])
    if WANT_LSE:
        tl.store(p_lse + i_head * length + o_m, b_max + tl.log2(b_sum), mask=m_m)
