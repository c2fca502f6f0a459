"""The tiers of a step in one softmax, in Triton: twin of `tiered_attention.tiered_attention_torch`.

Two forms. A chunk of queries: one program per tile of queries and query head, tier after tier, in
the manner of FlashAttention-2 (arXiv 2307.08691). One token, or a few: the keys are split over
programs that each serve all query heads of a KV head, and what they find is combined (split-k, as
in Flash-Decoding). A third kernel scores keys once more for the mass they draw: the softmax's
denominators are known then, and nothing of size queries x keys is written.

A key is loaded as the two parts that a rotation mixes and the rest that it leaves alone, so that it
is rotated in registers and never put together again: `q . k = q_a . k_a + q_b . k_b + q_c . k_c`.

Letters: `i_` index, `o_` offset, `b_` in registers, `p_` pointer, `m_` mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import operand_of, pad, programs_wanted, shared_memory
from .tiered_attention import Mass, Tiers, block_sums

LOG2E = 1.4426950408889634
# Queries (tokens x heads of a KV head) that one program can hold beside each other.
SPLIT_ROWS = 64
SPLIT_KEYS = 64
MASS_ROWS = 64


@triton.jit
def _part_offsets(o_h, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the dimensions lie that a rotation mixes."""
    if INTERLEAVED:
        o_a = 2 * o_h
        o_b = 2 * o_h + 1
    else:
        o_a = o_h
        o_b = o_h + HALF
    return o_a, o_b


@triton.jit
def _load_rows(p, o_n, m_n, o_d, m_d, STRIDE: tl.constexpr, TO: tl.constexpr):
    """A tile of a tensor whose rows are STRIDE apart, converted at once: see `launch`."""
    mask = m_n[:, None] & m_d[None, :]
    return tl.load(p + o_n[:, None] * STRIDE + o_d[None, :], mask=mask, other=0.0).to(TO)


@triton.jit
def _scores(
    b_qa,
    b_qb,
    b_qc,
    p_k,
    o_n,
    m_n,
    p_cos,
    p_sin,
    o_lead,
    m_lead,
    scale,
    cap,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAD_H: tl.constexpr,
    REST: tl.constexpr,
    PAD_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Scores [rows, keys] to the base 2 of a tile of keys, which is rotated where `m_lead`."""
    o_h = tl.arange(0, PAD_H)
    m_h = o_h < HALF
    o_a, o_b = _part_offsets(o_h, HALF, INTERLEAVED)
    b_a = _load_rows(p_k, o_n, m_n, o_a, m_h, D, tl.float32)
    b_b = _load_rows(p_k, o_n, m_n, o_b, m_h, D, tl.float32)
    m_turn = m_lead[:, None] & m_h[None, :]
    o_turn = o_lead[:, None] * HALF + o_h[None, :]
    b_cos = tl.load(p_cos + o_turn, mask=m_turn, other=1.0)
    b_sin = tl.load(p_sin + o_turn, mask=m_turn, other=0.0)
    b_ka = (b_a * b_cos - b_b * b_sin).to(OPERAND)
    b_kb = (b_b * b_cos + b_a * b_sin).to(OPERAND)
    b_s = tl.dot(b_qa, tl.trans(b_ka), input_precision="ieee")
    b_s += tl.dot(b_qb, tl.trans(b_kb), input_precision="ieee")
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_kc = _load_rows(p_k, o_n, m_n, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s += tl.dot(b_qc, tl.trans(b_kc), input_precision="ieee")
    return _scaled(b_s, scale, cap, CAPPED)


@triton.jit
def _window_scores(
    b_qa,
    b_qb,
    b_qc,
    p_k,
    o_n,
    m_n,
    scale,
    cap,
    D: tl.constexpr,
    HALF: tl.constexpr,
    PAD_H: tl.constexpr,
    REST: tl.constexpr,
    PAD_R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    OPERAND: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """The same for keys that are rotated already."""
    o_h = tl.arange(0, PAD_H)
    m_h = o_h < HALF
    o_a, o_b = _part_offsets(o_h, HALF, INTERLEAVED)
    b_ka = _load_rows(p_k, o_n, m_n, o_a, m_h, D, OPERAND)
    b_kb = _load_rows(p_k, o_n, m_n, o_b, m_h, D, OPERAND)
    b_s = tl.dot(b_qa, tl.trans(b_ka), input_precision="ieee")
    b_s += tl.dot(b_qb, tl.trans(b_kb), input_precision="ieee")
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_kc = _load_rows(p_k, o_n, m_n, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s += tl.dot(b_qc, tl.trans(b_kc), input_precision="ieee")
    return _scaled(b_s, scale, cap, CAPPED)


@triton.jit
def _scaled(b_s, scale, cap, CAPPED: tl.constexpr):
    """Scores to the base 2; `scale` holds log2(e) unless they are capped first."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which stays right where exp overflows or vanishes.
        b_s = cap * (1.0 - 2.0 / (tl.exp(2.0 * b_s * scale / cap) + 1.0))
        return b_s * 1.4426950408889634
    return b_s * scale


@triton.jit
def _accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND: tl.constexpr):
    """Add a tile of scores and values to the running softmax."""
    b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
    # A row that has seen no key yet: -inf - (-inf) would be NaN.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_safe[:, None])
    b_decay = tl.exp2(b_max - b_safe)
    b_sum = b_sum * b_decay + tl.sum(b_p, axis=1)
    b_acc = b_acc * b_decay[:, None]
    b_acc += tl.dot(b_p.to(OPERAND), b_v, input_precision="ieee")
    return b_new, b_sum, b_acc


@triton.jit(do_not_specialize=["length", "sinks", "blocks", "window"])
def _chunk_kernel(
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
    o_a, o_b = _part_offsets(o_h, HALF, INTERLEAVED)
    p_row = p_q + i_head * length * D
    b_qa = _load_rows(p_row, o_m, m_m, o_a, m_h, D, OPERAND)
    b_qb = _load_rows(p_row, o_m, m_m, o_b, m_h, D, OPERAND)
    b_qc = b_qa
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_qc = _load_rows(p_row, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)

    b_max = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([TILE_ROWS], tl.float32)
    b_acc = tl.zeros([TILE_ROWS, PAD_V], tl.float32)

    p_k = p_sink_k + i_kv * stride_sink_k
    p_v = p_sink_v + i_kv * stride_sink_v
    for o_s in range(0, sinks, TILE_KEYS):
        o_n = o_s + o_k
        m_n = o_n < sinks
        b_s = _scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, o_n, m_n, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_v = _load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = _accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    for i_n in range(0, blocks):
        i_slot = tl.load(p_table + i_kv * blocks + i_n).to(tl.int64)
        p_k = p_slot_k + i_slot * (B * D)
        p_v = p_slot_v + i_slot * (B * DV)
        for o_s in range(0, B, TILE_KEYS):
            o_n = o_s + o_k
            m_n = o_n < B
            o_lead = sinks + i_n * B + o_n
            b_s = _scores(
                b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, o_lead, m_n, scale, cap,
                D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
            )  # fmt: skip
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
            b_v = _load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
            b_max, b_sum, b_acc = _accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    p_k = p_win_k + i_kv * stride_win_k
    p_v = p_win_v + i_kv * stride_win_v
    last = window - length + o_m  # the last key that a query sees: itself
    end = tl.minimum(window, window - length + (i_m + 1) * TILE_ROWS)
    for o_s in range(0, end, TILE_KEYS):
        o_n = o_s + o_k
        m_n = o_n < window
        b_s = _window_scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        b_s = tl.where(m_n[None, :] & (o_n[None, :] <= last[:, None]), b_s, float("-inf"))
        b_v = _load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = _accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    b_out = b_acc / b_sum[:, None]
    p_row = p_out + (i_head * length + o_m)[:, None] * DV + o_v[None, :]
    tl.store(p_row, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_v[None, :])
    if WANT_LSE:
        tl.store(p_lse + i_head * length + o_m, b_max + tl.log2(b_sum), mask=m_m)


@triton.jit
def _locate(
    i_t,
    i_kv,
    p_sink_k,
    p_sink_v,
    p_slot_k,
    p_slot_v,
    p_table,
    p_win_k,
    p_win_v,
    sinks,
    blocks,
    window,
    stride_sink_k,
    stride_sink_v,
    stride_win_k,
    stride_win_v,
    B: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Where tile `i_t` of all keys lies.

    Returns pointers to its tier's keys and values, its first key there, how many keys there are,
    what to add to a key's index for its place among all keys, and how many are to be rotated: all
    of them, or of the window none.
    """
    sink_tiles = tl.cdiv(sinks, TILE_KEYS)
    block_tiles: tl.constexpr = (B + TILE_KEYS - 1) // TILE_KEYS
    i_u = i_t - sink_tiles
    p_k = p_win_k + i_kv * stride_win_k
    p_v = p_win_v + i_kv * stride_win_v
    first = (i_u - blocks * block_tiles) * TILE_KEYS
    limit = window
    shift = sinks + blocks * B
    if i_t < sink_tiles:
        p_k = p_sink_k + i_kv * stride_sink_k
        p_v = p_sink_v + i_kv * stride_sink_v
        first = i_t * TILE_KEYS
        limit = sinks
        shift = sinks * 0
    elif i_u < blocks * block_tiles:
        i_n = i_u // block_tiles
        i_slot = tl.load(p_table + i_kv * blocks + i_n).to(tl.int64)
        p_k = p_slot_k + i_slot * (B * D)
        p_v = p_slot_v + i_slot * (B * DV)
        first = (i_u % block_tiles) * TILE_KEYS
        limit = sinks * 0 + B
        shift = sinks + i_n * B
    turned = limit
    if i_u >= blocks * block_tiles:
        turned = limit * 0
    return p_k, p_v, first, limit, shift, turned


@triton.jit(do_not_specialize=["length", "sinks", "blocks", "window", "tiles", "share"])
def _split_kernel(
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
    o_a, o_b = _part_offsets(o_h, HALF, INTERLEAVED)
    # The query heads of a KV head lie one after the other: one run of rows.
    p_row = p_q + i_kv * rows * D
    b_qa = _load_rows(p_row, o_m, m_m, o_a, m_h, D, OPERAND)
    b_qb = _load_rows(p_row, o_m, m_m, o_b, m_h, D, OPERAND)
    b_qc = b_qa
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_qc = _load_rows(p_row, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)
    last = window - length + o_m % length

    b_max = tl.full([ROWS], float("-inf"), tl.float32)
    b_sum = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, PAD_V], tl.float32)
    for i_t in range(i_s * share, tl.minimum((i_s + 1) * share, tiles)):
        p_k, p_v, first, limit, shift, turned = _locate(
            i_t, i_kv, p_sink_k, p_sink_v, p_slot_k, p_slot_v, p_table, p_win_k, p_win_v,
            sinks, blocks, window, stride_sink_k, stride_sink_v, stride_win_k, stride_win_v,
            B, D, DV, TILE_KEYS,
        )  # fmt: skip
        o_n = first + o_k
        m_n = o_n < limit
        m_lead = o_n < turned
        b_s = _scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, shift + o_n, m_lead, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        m_seen = m_lead[None, :] | (o_n[None, :] <= last[:, None])
        b_s = tl.where(m_n[None, :] & m_seen, b_s, float("-inf"))
        b_v = _load_rows(p_v, o_n, m_n, o_v, m_v, DV, OPERAND)
        b_max, b_sum, b_acc = _accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND)

    o_out = (i_kv * tl.num_programs(0) + i_s) * rows + o_m
    tl.store(p_max + o_out, b_max, mask=m_m)
    tl.store(p_sum + o_out, b_sum, mask=m_m)
    p_row = p_acc + o_out[:, None] * DV + o_v[None, :]
    tl.store(p_row, b_acc, mask=m_m[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _combine_kernel(
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
def _mass_kernel(
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
    o_a, o_b = _part_offsets(o_h, HALF, INTERLEAVED)
    p_k, _, first, limit, shift, turned = _locate(
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
        b_qa = _load_rows(p_head, o_m, m_m, o_a, m_h, D, OPERAND)
        b_qb = _load_rows(p_head, o_m, m_m, o_b, m_h, D, OPERAND)
        b_qc = b_qa
        if REST > 0:
            o_r = tl.arange(0, PAD_R)
            b_qc = _load_rows(p_head, o_m, m_m, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s = _scores(
            b_qa, b_qb, b_qc, p_k, o_n, m_n, p_cos, p_sin, shift + o_n, m_lead, scale, cap,
            D, HALF, PAD_H, REST, PAD_R, INTERLEAVED, OPERAND, CAPPED,
        )  # fmt: skip
        last = window - length + o_m % length
        m_seen = m_lead[None, :] | (o_n[None, :] <= last[:, None])
        b_lse = tl.load(p_lse + i_kv * rows + o_m, mask=m_m, other=0.0)
        m_all = m_m[:, None] & m_n[None, :] & m_seen
        b_mass += tl.sum(tl.where(m_all, tl.exp2(b_s - b_lse[:, None]), 0.0), axis=0)
    tl.store(p_mass + i_kv * keys + shift + o_n, b_mass, mask=m_n)


def tiered_attention_triton(
    q: Tensor, tiers: Tiers, scaling: float, softcap: float | None = None, mass: Mass = "none"
) -> tuple[Tensor, Tensor | None]:
    """Run the kernels; see `tiered_attention.tiered_attention`."""
    tiers.check(q)
    heads, length, d = q.shape
    kv_heads, window = tiers.window_keys.shape[:2]
    sinks, blocks = tiers.sink_keys.shape[1], tiers.slots.shape[1]
    d_v, size = tiers.window_values.shape[-1], tiers.block_tokens
    q = q.contiguous()
    cos, sin = _turns(tiers, d)
    half = cos.shape[-1]
    group = heads // kv_heads
    rows = group * length
    out = q.new_empty(heads, length, d_v)
    lse = q.new_empty(heads, length, dtype=torch.float32) if mass != "none" else None
    tensors = (
        q,
        *(_rows(tiers.sink_keys), _rows(tiers.sink_values)),
        *(tiers.slot_keys.contiguous(), tiers.slot_values.contiguous()),
        tiers.slots.contiguous(),
        *(_rows(tiers.window_keys), _rows(tiers.window_values)),
        cos,
        sin,
    )
    sizes = (length, sinks, blocks, window)
    # Capped scores are scaled first; the others take the change of base along.
    factor = scaling if softcap is not None else scaling * LOG2E
    strides = [
        _head_stride(t)
        for t in (tiers.sink_keys, tiers.sink_values, tiers.window_keys, tiers.window_values)
    ]
    scalars = (*strides, factor, 1.0 if softcap is None else float(softcap))
    rest = d - 2 * half
    constants = {
        "GROUP": group,
        "B": size,
        "D": d,
        "HALF": half,
        "PAD_H": pad(half),
        "REST": rest,
        "PAD_R": pad(rest),
        "DV": d_v,
        "INTERLEAVED": tiers.interleaved,
        "OPERAND": operand_of(q.dtype, _chunk_kernel),
        "CAPPED": softcap is not None,
    }
    if rows <= SPLIT_ROWS:
        _run_split(q, tensors, sizes, scalars, constants, out, lse)
    else:
        _run_chunk(q, tensors, sizes, scalars, constants, out, lse)
    if lse is None:
        return out, None
    tile = _mass_tile(d, q.element_size())
    sink_tiles, block_tiles = triton.cdiv(sinks, tile), blocks * triton.cdiv(size, tile)
    first, count = 0, sink_tiles + block_tiles + triton.cdiv(window, tile)
    if mass == "blocks":
        first, count = sink_tiles, block_tiles
    keys = tiers.lead + window
    drawn = torch.empty(kv_heads, keys, dtype=torch.float32, device=q.device)
    if count:
        _mass_kernel[(count, kv_heads)](
            *tensors,
            lse,
            drawn,
            *sizes,
            first,
            keys,
            *scalars,
            **constants,
            ROWS=min(MASS_ROWS, pad(rows)),
            TILE_KEYS=tile,
            num_warps=4,
            num_stages=1,
        )
    return out, drawn if mass == "keys" else block_sums(drawn, tiers)


def _run_chunk(q, tensors, sizes, scalars, constants, out, lse) -> None:
    heads, length, d = q.shape
    d_v = out.shape[-1]
    wide = max(pad(d), pad(d_v)) * q.element_size()  # bytes of a row
    tile_rows, tile_keys, stages, warps = _chunk_tiles(wide, shared_memory(q.device))
    _chunk_kernel[(triton.cdiv(length, tile_rows), heads)](
        *tensors,
        out,
        out if lse is None else lse,
        *sizes,
        *scalars,
        **constants,
        PAD_V=pad(d_v),
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        WANT_LSE=lse is not None,
        num_warps=warps,
        num_stages=stages,
    )


def _chunk_tiles(wide: int, shared: int) -> tuple[int, int, int, int]:
    """Queries and keys of a tile, stages, warps; for rows of so many bytes.

    As compiled for a Hopper: 128 x 64 x 2 takes 131 KB and 210 registers without spilling (64 x 64
    x 2 spills), 64 x 32 x 2 takes 66 KB and 194, which an Ada has.
    """
    if wide <= 256:  # head_dim 128 in 16 bits
        return (128, 64, 2, 8) if shared >= 160 * 1024 else (64, 32, 2, 4)
    return (64, 32, 1, 8) if wide <= 512 else (32, 16, 1, 8)


def _run_split(q, tensors, sizes, scalars, constants, out, lse) -> None:
    length, sinks, blocks, window = sizes
    kv_heads, d_v = tensors[6].shape[0], out.shape[-1]
    rows = constants["GROUP"] * length
    tile = _mass_tile(q.shape[2], q.element_size())
    tiles = (
        triton.cdiv(sinks, tile)
        + blocks * triton.cdiv(constants["B"], tile)
        + triton.cdiv(window, tile)
    )
    share = triton.cdiv(tiles, max(1, programs_wanted(q.device) // kv_heads))
    splits = triton.cdiv(tiles, share)
    acc = q.new_empty(kv_heads, splits, rows, d_v, dtype=torch.float32)
    top, total = (q.new_empty(kv_heads, splits, rows, dtype=torch.float32) for _ in range(2))
    _split_kernel[(splits, kv_heads)](
        *tensors,
        acc,
        top,
        total,
        *sizes,
        tiles,
        share,
        *scalars,
        **constants,
        PAD_V=pad(d_v),
        ROWS=pad(rows),
        TILE_KEYS=tile,
        num_warps=4,
        num_stages=1,
    )
    _combine_kernel[(rows, kv_heads)](
        acc,
        top,
        total,
        out,
        out if lse is None else lse,
        rows,
        splits,
        DV=d_v,
        PAD_V=pad(d_v),
        SPLITS=triton.next_power_of_2(splits),
        WANT_LSE=lse is not None,
        num_warps=4,
    )


def _mass_tile(d: int, item: int) -> int:
    return SPLIT_KEYS if pad(d) * item <= 256 else SPLIT_KEYS // 2


def _turns(tiers: Tiers, d: int) -> tuple[Tensor, Tensor]:
    """Tables for the kernels, which take a key apart as a rotation does even where none turns."""
    if tiers.cos.shape[-1]:
        return tiers.cos.contiguous(), tiers.sin.contiguous()
    cos = tiers.cos.new_ones(tiers.lead, d // 2)
    return cos, torch.zeros_like(cos)


def _rows(x: Tensor) -> Tensor:
    """`[n, m, d]` whose rows lie directly behind each other, which every tier's do."""
    assert x.numel() == 0 or x.stride(2) == 1, x.stride()
    assert x.shape[1] <= 1 or x.stride(1) == x.shape[2], x.stride()
    return x


def _head_stride(x: Tensor) -> int:
    """From head to head; of a single head torch may name any number."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]
