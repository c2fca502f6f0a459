"""Every stored key of many segments scored in one launch: twin of `segment_lookup_torch`.

The codec's constants of a segment go into the query, per channel, in registers; of its keys only a
tile at a time is made of codes. Codes of 8 bits are exact in bfloat16, the query is not: it goes in
as the sum of two, for 16 bits of it at the speed of tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import is_interpreted, operand_of, pad
from .segment_lookup import COLUMNS, KeyTable
from .store_codec import FP8, FULL, INT4, INT8

KINDS = {FULL: 0, INT8: 1, FP8: 2, INT4: 3}
STORED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Blocks scanned by one program, once there are enough to occupy a device all the same.
GROUP_SIZE, GROUP_FROM = 4, 1024


@triton.jit
def _constants(p_row, COLUMN: tl.constexpr, i_h, o_d, m_d, D: tl.constexpr):
    """A segment's constants of the channels of a KV head: the address of [H_kv, 1, 1, D] float32
    stands in a column of the table.
    """
    p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.float32))
    return tl.load(p + i_h * D + o_d, mask=m_d, other=0.0)


@triton.jit
def _bytes(p_row, COLUMN: tl.constexpr, i_row, o_d, m_d, D: tl.constexpr):
    """The same of a block, of bytes: [H_kv, n, 1, D] uint8, row `i_row` of all."""
    p = tl.load(p_row + COLUMN).to(tl.pointer_type(tl.uint8))
    return tl.load(p + i_row * D + o_d, mask=m_d, other=0).to(tl.int32)


@triton.jit
def _product(b_q, b_k, OPERAND: tl.constexpr, SPLIT: tl.constexpr):
    """Scores [rows, keys] of b_q [rows, d] float32 and b_k [keys, d]."""
    b_high = b_q.to(OPERAND)
    b_t = tl.trans(b_k.to(OPERAND))
    b_s = tl.dot(b_high, b_t, input_precision="ieee")
    if SPLIT:
        b_low = (b_q - b_high.to(tl.float32)).to(OPERAND)
        b_s += tl.dot(b_low, b_t, input_precision="ieee")
    return b_s


@triton.jit
def _from_fp8(b_x):
    """Bits of float8_e4m3fn, as int32 -> float32, exactly; no device needs to know the type."""
    exponent = (b_x >> 3) & 15
    mantissa = b_x & 7
    b_normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    b_small = mantissa.to(tl.float32) * 0.001953125  # 2^-9
    b_y = tl.where(exponent == 0, b_small, b_normal)
    return tl.where((b_x & 128) != 0, -b_y, b_y)


@triton.jit
def _from_grid(b_nibbles, b_step, b_base):
    """Codes of 4 bits -> points of the signed grid of 8 bits, as float32; bytes wrap around."""
    b_x = (b_nibbles * b_step[None, :] + b_base[None, :]) & 255
    return ((b_x ^ 128) - 128).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "n_listed", "n_blocks"])
def _segment_kernel(
    p_q,  # [H_kv, n_rows, D], contiguous
    p_table,  # [segments, COLUMNS] int64
    p_segment,  # [n_listed] int32
    p_inside,
    p_place,
    p_lse,  # [H_kv, n_rows, n_blocks] float32, contiguous
    p_peak,
    n_rows,
    n_listed,
    n_blocks,
    D: tl.constexpr,
    B: tl.constexpr,
    HALF: tl.constexpr,  # of int4: bytes of a key
    PAD_D: tl.constexpr,
    PAD_H: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    COLUMNS_: tl.constexpr,
    STORED_: tl.constexpr,
    OPERAND: tl.constexpr,
    SPLIT: tl.constexpr,
):
    # Query tiles vary fastest: those that scan the same keys run together and share the cache.
    n_tiles = tl.cdiv(n_rows, TILE_ROWS)
    i_q = tl.program_id(0) % n_tiles
    i_g = tl.program_id(0) // n_tiles
    i_h = tl.program_id(1).to(tl.int64)
    o_q = i_q * TILE_ROWS + tl.arange(0, TILE_ROWS)
    m_q = o_q < n_rows
    p_row = p_q + (i_h * n_rows + o_q)[:, None] * D
    if KIND == 3:
        o_d = tl.arange(0, PAD_H)
        m_d = o_d < HALF
        m_e = o_d + HALF < D
        b_qa = tl.load(p_row + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
        b_qb = tl.load(p_row + HALF + o_d[None, :], mask=m_q[:, None] & m_e[None, :], other=0.0)
        b_qa = b_qa.to(tl.float32)
        b_qb = b_qb.to(tl.float32)
    else:
        o_d = tl.arange(0, PAD_D)
        m_d = o_d < D
        b_qa = tl.load(p_row + o_d[None, :], mask=m_q[:, None] & m_d[None, :], other=0.0)
        b_qa = b_qa.to(tl.float32)

    for i in range(GROUP):
        i_l = i_g * GROUP + i
        if i_l < n_listed:
            p_here = p_table + tl.load(p_segment + i_l).to(tl.int64) * COLUMNS_
            i_n = tl.load(p_inside + i_l).to(tl.int64)
            i_row = i_h * tl.load(p_here + 5) + i_n  # of [H_kv, n]
            b_shift = tl.zeros([TILE_ROWS], tl.float32)
            b_fa = b_qa
            if KIND > 0:
                b_fa = b_qa * _constants(p_here, 1, i_h, o_d, m_d, D)[None, :]
            if KIND == 1 or KIND == 3:
                b_low = _constants(p_here, 2, i_h, o_d, m_d, D)
                b_shift += tl.sum(b_qa * b_low[None, :], axis=1)
            if KIND == 3:
                b_fb = b_qb * _constants(p_here, 1, i_h, o_d + HALF, m_e, D)[None, :]
                b_low = _constants(p_here, 2, i_h, o_d + HALF, m_e, D)
                b_shift += tl.sum(b_qb * b_low[None, :], axis=1)
                b_step_a = _bytes(p_here, 3, i_row, o_d, m_d, D)
                b_step_b = _bytes(p_here, 3, i_row, o_d + HALF, m_e, D)
                b_base_a = _bytes(p_here, 4, i_row, o_d, m_d, D)
                b_base_b = _bytes(p_here, 4, i_row, o_d + HALF, m_e, D)

            b_peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            b_sum = tl.zeros([TILE_ROWS], tl.float32)
            for o_b in range(0, B, TILE_KEYS):
                o_k = o_b + tl.arange(0, TILE_KEYS)
                m_k = o_k < B
                m_kd = m_k[:, None] & m_d[None, :]
                if KIND == 3:
                    p_codes = tl.load(p_here).to(tl.pointer_type(tl.uint8))
                    o_code = (i_row * B + o_k)[:, None] * HALF + o_d[None, :]
                    b_x = tl.load(p_codes + o_code, mask=m_kd, other=0).to(tl.int32)
                    b_ka = _from_grid(b_x & 15, b_step_a, b_base_a)
                    b_kb = _from_grid(b_x >> 4, b_step_b, b_base_b)
                    b_s = _product(b_fa, b_ka, OPERAND, SPLIT)
                    b_s += _product(b_fb, b_kb, OPERAND, SPLIT)
                else:
                    o_code = (i_row * B + o_k)[:, None] * D + o_d[None, :]
                    if KIND == 0:
                        p_codes = tl.load(p_here).to(tl.pointer_type(STORED_))
                        b_k = tl.load(p_codes + o_code, mask=m_kd, other=0.0).to(OPERAND)
                    elif KIND == 1:
                        p_codes = tl.load(p_here).to(tl.pointer_type(tl.int8))
                        b_k = tl.load(p_codes + o_code, mask=m_kd, other=0).to(tl.float32)
                    else:
                        p_codes = tl.load(p_here).to(tl.pointer_type(tl.uint8))
                        b_x = tl.load(p_codes + o_code, mask=m_kd, other=0).to(tl.int32)
                        b_k = _from_fp8(b_x)
                    b_s = _product(b_fa, b_k, OPERAND, SPLIT)
                b_s = tl.where(m_k[None, :], b_s, float("-inf"))
                b_new = tl.maximum(b_peak, tl.max(b_s, axis=1))
                # Every tile holds a valid key, so b_new is finite and nothing is inf - inf.
                b_sum = b_sum * tl.exp(b_peak - b_new)
                b_sum += tl.sum(tl.exp(b_s - b_new[:, None]), axis=1)
                b_peak = b_new
            b_peak += b_shift
            o_out = (i_h * n_rows + o_q) * n_blocks + tl.load(p_place + i_l)
            tl.store(p_peak + o_out, b_peak, mask=m_q)
            tl.store(p_lse + o_out, b_peak + tl.log(b_sum), mask=m_q)


def segment_lookup_triton(
    q: Tensor, tables: Sequence[KeyTable], n_blocks: int
) -> tuple[Tensor, Tensor]:
    """Run the kernel, once for each table; see `segment_lookup.segment_lookup`."""
    heads, n_rows, d = q.shape
    listed = sum(table.blocks for table in tables)
    lse, peak = (q.new_empty(heads, n_rows, n_blocks, dtype=torch.float32) for _ in range(2))
    if listed < n_blocks:
        lse.fill_(float("-inf"))
        peak.fill_(float("-inf"))
    if lse.numel() == 0:
        return lse, peak
    q = q.contiguous()
    for table in tables:
        first = table.parts[0]
        assert first.codes.shape[0] == heads and first.dim == d
        size = first.codes.shape[2]
        packed = first.kind != FULL
        stored = None if packed else STORED[first.codes.dtype]
        operand = operand_of(torch.bfloat16 if packed else first.codes.dtype, _segment_kernel)
        wide = pad(d) * (2 if packed else first.codes.element_size())
        widest = 64 if wide <= 256 else 32
        tile_rows, tile_keys = (min(pad(n), widest) for n in (n_rows, size))
        group = GROUP_SIZE if table.blocks >= GROUP_FROM else 1
        grid = (triton.cdiv(n_rows, tile_rows) * triton.cdiv(table.blocks, group), heads)
        _segment_kernel[grid](
            q,
            table.addresses,
            table.segment,
            table.inside,
            table.place,
            lse,
            peak,
            n_rows,
            table.blocks,
            n_blocks,
            D=d,
            B=size,
            HALF=(d + 1) // 2,
            PAD_D=pad(d),
            PAD_H=pad((d + 1) // 2),
            TILE_ROWS=tile_rows,
            TILE_KEYS=tile_keys,
            GROUP=group,
            KIND=KINDS[first.kind],
            COLUMNS_=COLUMNS,
            STORED_=stored if packed is False else tl.float32,
            OPERAND=operand,
            SPLIT=packed and not is_interpreted(_segment_kernel),
            num_warps=4,
            num_stages=2,
        )
    return lse, peak


assert set(KINDS) == {FULL, INT8, FP8, INT4}
