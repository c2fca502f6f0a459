"""A tile of keys of some tier, in Triton: where it lies, its scores, its part of the softmax.

A key is loaded as the two parts that a rotation mixes and the rest that it leaves alone, so that it
is rotated in registers and never put together again: `q . k = q_a . k_a + q_b . k_b + q_c . k_c`.

Letters, here and in the kernels: `i_` index, `o_` offset, `b_` in registers, `p_` pointer, `m_`
mask.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_offsets(o_h, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where the dimensions lie that a rotation mixes."""
    if INTERLEAVED:
        o_a = 2 * o_h
        o_b = 2 * o_h + 1
    else:
        o_a = o_h
        o_b = o_h + HALF
    return o_a, o_b


@triton.jit
def load_rows(p, o_n, m_n, o_d, m_d, STRIDE: tl.constexpr, TO: tl.constexpr):
    """A tile of a tensor whose rows are STRIDE apart, converted at once: see `launch`."""
    mask = m_n[:, None] & m_d[None, :]
    return tl.load(p + o_n[:, None] * STRIDE + o_d[None, :], mask=mask, other=0.0).to(TO)


@triton.jit
def scores(
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
    o_a, o_b = part_offsets(o_h, HALF, INTERLEAVED)
    b_a = load_rows(p_k, o_n, m_n, o_a, m_h, D, tl.float32)
    b_b = load_rows(p_k, o_n, m_n, o_b, m_h, D, tl.float32)
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
        b_kc = load_rows(p_k, o_n, m_n, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s += tl.dot(b_qc, tl.trans(b_kc), input_precision="ieee")
    return scaled(b_s, scale, cap, CAPPED)


@triton.jit
def window_scores(
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
    o_a, o_b = part_offsets(o_h, HALF, INTERLEAVED)
    b_ka = load_rows(p_k, o_n, m_n, o_a, m_h, D, OPERAND)
    b_kb = load_rows(p_k, o_n, m_n, o_b, m_h, D, OPERAND)
    b_s = tl.dot(b_qa, tl.trans(b_ka), input_precision="ieee")
    b_s += tl.dot(b_qb, tl.trans(b_kb), input_precision="ieee")
    if REST > 0:
        o_r = tl.arange(0, PAD_R)
        b_kc = load_rows(p_k, o_n, m_n, o_r + 2 * HALF, o_r < REST, D, OPERAND)
        b_s += tl.dot(b_qc, tl.trans(b_kc), input_precision="ieee")
    return scaled(b_s, scale, cap, CAPPED)


@triton.jit
def scaled(b_s, scale, cap, CAPPED: tl.constexpr):
    """Scores to the base 2; `scale` holds log2(e) unless they are capped first."""
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), which stays right where exp overflows or vanishes.
        b_s = cap * (1.0 - 2.0 / (tl.exp(2.0 * b_s * scale / cap) + 1.0))
        return b_s * 1.4426950408889634
    return b_s * scale


@triton.jit
def accumulate(b_s, b_v, b_max, b_sum, b_acc, OPERAND: tl.constexpr):
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


@triton.jit
def locate(
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
