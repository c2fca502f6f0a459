"""Attention of one token, or a few, over its tiers; and the mass that keys draw.

The keys are split over programs that each serve all query heads of a KV head, and what they find is
combined (split-k, as in Flash-Decoding). The mass takes a second look at the keys: the softmax's
denominators are known then, and nothing of size queries x keys is written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tier_tiles import accumulate, load_rows, locate, part_offsets, scores


@triton.jit(do_not_specialize=["length", "sinks", "blocks", "window", "tiles", "share"])
def split_kernel(
    p_q,
    p_sink_k,
    p_sink_v,
    p_slot_k,
    p_slot_v,
    p_table,
    p_win_k,
    p_win_v,
    p_cos,
    p_sin,
    p_acc,  # [H_kv, splits, GROUP * length, DV] float32: weighted sums, not divided yet
    p_max,  # [H_kv, splits, GROUP * length] float32
    p_sum,  # the same
    length,
    sinks,
    blocks,
    window,
    tiles,
    share,  # tiles per program
    stride_sink_k,
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
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """A share of the keys for all queries of a KV head: a sum not divided yet, and its scale."""
    i_s = tl.program_id(0)
    i_kv = tl.program_id(1).to(tl.int64)
    rows = GROUP * length
    o_m = tl.arange(0, ROWS)
    m_m = o_m < rows
    o_k = tl.arange(0, TILE_KEYS)
    o_v = tl.arange(0, PAD_V)
    m_v = o_v < DV
    o_h = tl.arange(0, PAD_H)
    m_h = o_h < HALF
    o_a, o_b = part_offsets(o_h, HALF, INTERLEAVED)
    # The query heads of a KV head lie one after the other: one run of rows.
    p_row = p_q + i_kv * rows * D
    b_qa = load_rows(p_row, o_m, m_m, o_a, m_h, D, OPERAND)
    b_qb = load_rows(p_row, o_m, m_m, o_b, m_h, D, OPERAND)
    b_qc = b_qa
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_qc = load_rows(p_row, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)
    last = window - length + o_m % length

    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, PAD_V], tl.float32)
    for i_t in range(i_s * share, tl.minimum((i_s + 1) * share, tiles)):
        p_k, p_v, first, limit, shift, turned = locate(
            i_t, i_kv, p_sink_k, p_sink_v, p_slot_k, p_slot_v, p_table, p_win_k, p_win_v,
            sinks, blocks, window, stride_sink_k, stride_sink_v, stride_win_k, stride_win_v,
            B, D, DV, TILE_KEYS,
        )  # fmt: skip
        o_n = first + o_k
        m_n = o_n < limit
        m_lead = o_n < turned
        b_s = scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, shift + o_n, m_lead, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        m_seen = m_lead[None, :] | (o_n[None, :] <= last[:, None])
        b_s = tl.where(m_n[None, :] & m_seen, b_s, float("-inf"))
        b_v = load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    o_out = (i_kv * tl.num_programs(0) + i_s) * rows + o_m
    tl.store(p_max + o_out, b_max, mask=m_m)
    tl.store(p_sum + o_out, b_sum, mask=m_m)
    p_row = p_acc + o_out[:, None] * DV + o_v[None, :]
    tl.store(p_row, b_acc, mask=m_m[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def combine_kernel(
    p_acc,
    p_max,
    p_sum,
    p_out,  # [H_kv * rows, DV], contiguous
    p_lse,
    rows,
    splits,
    DV: tl.constexpr,
    PAD_V: tl.constexpr,
    SPLITS: tl.constexpr,
    WANT_LSE: tl.constexpr,
):
    """Join what the splits of one row have found."""
    i_m = tl.program_id(0)
    i_kv = tl.program_id(1).to(tl.int64)
    o_s = tl.arange(0, SPLITS)
    m_s = o_s < splits
    o_v = tl.arange(0, PAD_V)
    m_v = o_v < DV
    o_row = (i_kv * splits + o_s) * rows + i_m
    b_max = tl.load(p_max + o_row, mask=m_s, other=float("-inf"))
    b_sum = tl.load(p_sum + o_row, mask=m_s, other=0.0)
    top = tl.max(b_max, axis=0)
    b_part = tl.exp2(b_max - top)
    total = tl.sum(b_part * b_sum, axis=0)
    mask = m_s[:, None] & m_v[None, :]
    b_acc = tl.load(p_acc + o_row[:, None] * DV + o_v[None, :], mask=mask, other=0.0)
    b_out = tl.sum(b_acc * b_part[:, None], axis=0) / total
    p_row = p_out + (i_kv * rows + i_m) * DV + o_v
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_v)
    if WANT_LSE:
        tl.store(p_lse + i_kv * rows + i_m, top + tl.log2(total))


@triton.jit(do_not_specialize=["length", "sinks", "blocks", "window", "first_tile", "keys"])
def mass_kernel(
    p_q,
    p_sink_k,
    p_sink_v,
    p_slot_k,
    p_slot_v,
    p_table,
    p_win_k,
    p_win_v,
    p_cos,
    p_sin,
    p_lse,  # [H_kv, GROUP * length] float32, to the base 2
    p_mass,  # [H_kv, keys] float32
    length,
    sinks,
    blocks,
    window,
    first_tile,
    keys,
    stride_sink_k,
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
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """What a tile of keys draws from all queries of its KV head."""
    i_t = tl.program_id(0) + first_tile
    i_kv = tl.program_id(1).to(tl.int64)
    rows = GROUP * length
    o_k = tl.arange(0, TILE_KEYS)
    o_h = tl.arange(0, PAD_H)
    m_h = o_h < HALF
    o_a, o_b = part_offsets(o_h, HALF, INTERLEAVED)
    p_k, _, first, limit, shift, turned = locate(
        i_t, i_kv, p_sink_k, p_sink_v, p_slot_k, p_slot_v, p_table, p_win_k, p_win_v,
        sinks, blocks, window, stride_sink_k, stride_sink_v, stride_win_k, stride_win_v,
        B, D, DV, TILE_KEYS,
    )  # fmt: skip
    o_n = first + o_k
    m_n = o_n < limit
    m_lead = o_n < turned
    p_head = p_q + i_kv * rows * D
    b_mass = tl.zeros([TILE_KEYS], tl.float32)
    for o_s in range(0, rows, ROWS):
        o_m = o_s + tl.arange(0, ROWS)
        m_m = o_m < rows
        b_qa = load_rows(p_head, o_m, m_m, o_a, m_h, D, OPERAND)
        b_qb = load_rows(p_head, o_m, m_m, o_b, m_h, D, OPERAND)
        b_qc = b_qa
        if REST > 0:
            o_r = tl.arange(0, PAD_R)
            b_qc = load_rows(p_head, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s = scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, shift + o_n, m_lead, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        last = window - length + o_m % length
        m_seen = m_lead[None, :] | (o_n[None, :] <= last[:, None])
        b_lse = tl.load(p_lse + i_kv * rows + o_m, mask=m_m, other=0.0)
        m_all = m_m[:, None] & m_n[None, :] & m_seen
        b_mass += tl.sum(tl.where(m_all, tl.exp2(b_s - b_lse[:, None]), 0.0), axis=0)
    tl.store(p_mass + i_kv * keys + shift + o_n, b_mass, mask=m_n)
