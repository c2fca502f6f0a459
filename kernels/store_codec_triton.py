"""Codes from numbers and back, in Triton: twins of the torch forms in `store_codec`.

They agree bit for bit, so that a memory is the same whichever packed it: divisions are rounded
correctly, products and sums are not fused, halves are rounded to even, and bfloat16 and float8 are
made of bits, which every device and Triton's interpreter do alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import pad
from .store_codec import _TINY, FP8, FP8_MOST, INT4, INT8, Packed

KINDS = {INT8: 1, FP8: 2, INT4: 3}
TILE = 32  # tokens
EXACT = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _round(x):
    """To whole numbers, halves to even, of numbers below 2^22: what an addition does."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _to_bf16(x):
    """Rounded to bfloat16, and the bits of that; no NaN comes here."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 32767 + ((bits >> 16) & 1)) >> 16
    return (bits << 16).to(tl.float32, bitcast=True), bits.to(tl.int16)


@triton.jit
def _from_bf16(bits):
    """Of bits in int16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_fp8(x):
    """Bits of float8_e4m3fn of numbers up to 448, halves to even."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 128
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 steps are 2^-9; eight of them are the first normal number, whose bits are 8.
    small = _round(size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    code = tl.where(size < 0x3C800000, small, normal)
    return (sign | code).to(tl.uint8)


@triton.jit
def _from_fp8(b_x):
    exponent = (b_x >> 3) & 15
    mantissa = b_x & 7
    b_normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    b_y = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, b_normal)
    return tl.where((b_x & 128) != 0, -b_y, b_y)


@triton.jit
def _grid(p_x, mask, b_low, b_scale):
    """Points 0..255 of the grid of a channel."""
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    b_g = _round(tl.div_rn(b_x - b_low[None, :], b_scale[None, :]))
    return tl.minimum(tl.maximum(b_g, 0.0), 255.0)


@triton.jit
def _range(p_x, o_d, m_d, b_low, b_scale, B: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Where a block begins on the grid of each channel, and the step that reaches its end."""
    b_least = b_low * 0.0 + 255.0
    b_most = b_low * 0.0
    for o_b in range(0, B, ROWS):
        o_r = o_b + tl.arange(0, ROWS)
        m_r = o_r < B
        mask = m_r[:, None] & m_d[None, :]
        b_g = _grid(p_x + o_r[:, None] * D + o_d[None, :], mask, b_low, b_scale)
        b_least = tl.minimum(b_least, tl.min(tl.where(m_r[:, None], b_g, 255.0), axis=0))
        b_most = tl.maximum(b_most, tl.max(tl.where(m_r[:, None], b_g, 0.0), axis=0))
    b_step = tl.maximum(tl.ceil(tl.div_rn(b_most - b_least, b_least * 0.0 + 15.0)), 1.0)
    return b_least, b_step


@triton.jit
def _nibbles(p_x, mask, b_low, b_scale, b_base, b_step):
    b_g = _grid(p_x, mask, b_low, b_scale)
    b_base = b_base[None, :] + b_g * 0.0
    b_step = b_step[None, :] + b_g * 0.0
    b_code = _round(tl.div_rn(b_g - b_base, b_step))
    return tl.minimum(b_code, tl.floor(tl.div_rn(255.0 - b_base, b_step))).to(tl.int32)


@triton.jit
def _pack_keys_kernel(
    p_x,  # [H, N, B, D], contiguous
    p_scale,  # [H, D] float32
    p_low,  # the same, not for fp8
    p_code,  # [H, N, B, D] bytes; int4: [H, N, B, HALF]
    p_step,  # [H, N, D] uint8, for int4
    p_base,
    B: tl.constexpr,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    HALF: tl.constexpr,
    PAD_H: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    i_n = tl.program_id(0)
    i_h = tl.program_id(1)
    i_row = i_h.to(tl.int64) * tl.num_programs(0) + i_n
    p_x += i_row * (B * D)
    if KIND == 3:
        o_a = tl.arange(0, PAD_H)
        o_b = o_a + HALF
        m_a = o_a < HALF
        m_b = o_b < D
        b_low_a = tl.load(p_low + i_h * D + o_a, mask=m_a, other=0.0)
        b_low_b = tl.load(p_low + i_h * D + o_b, mask=m_b, other=0.0)
        b_scale_a = tl.load(p_scale + i_h * D + o_a, mask=m_a, other=1.0)
        b_scale_b = tl.load(p_scale + i_h * D + o_b, mask=m_b, other=1.0)
        b_base_a, b_step_a = _range(p_x, o_a, m_a, b_low_a, b_scale_a, B, D, ROWS)
        b_base_b, b_step_b = _range(p_x, o_b, m_b, b_low_b, b_scale_b, B, D, ROWS)
        tl.store(p_step + i_row * D + o_a, b_step_a.to(tl.int32).to(tl.uint8), mask=m_a)
        tl.store(p_step + i_row * D + o_b, b_step_b.to(tl.int32).to(tl.uint8), mask=m_b)
        # The first point of the signed grid is -128: 128 in a byte.
        b_first = (b_base_a.to(tl.int32) + 128) & 255
        tl.store(p_base + i_row * D + o_a, b_first.to(tl.uint8), mask=m_a)
        b_first = (b_base_b.to(tl.int32) + 128) & 255
        tl.store(p_base + i_row * D + o_b, b_first.to(tl.uint8), mask=m_b)
        for o_s in range(0, B, ROWS):
            o_r = o_s + tl.arange(0, ROWS)
            m_r = o_r < B
            m_ra = m_r[:, None] & m_a[None, :]
            m_rb = m_r[:, None] & m_b[None, :]
            p_a = p_x + o_r[:, None] * D + o_a[None, :]
            b_code = _nibbles(p_a, m_ra, b_low_a, b_scale_a, b_base_a, b_step_a)
            b_high = _nibbles(p_a + HALF, m_rb, b_low_b, b_scale_b, b_base_b, b_step_b)
            b_code = b_code | (tl.where(m_rb, b_high, 0) << 4)
            p_out = p_code + (i_row * B + o_r)[:, None] * HALF + o_a[None, :]
            tl.store(p_out, b_code.to(tl.uint8), mask=m_ra)
    else:
        o_d = tl.arange(0, PAD_D)
        m_d = o_d < D
        b_scale = tl.load(p_scale + i_h * D + o_d, mask=m_d, other=1.0)
        if KIND == 1:
            b_low = tl.load(p_low + i_h * D + o_d, mask=m_d, other=0.0)
        for o_s in range(0, B, ROWS):
            o_r = o_s + tl.arange(0, ROWS)
            mask = (o_r < B)[:, None] & m_d[None, :]
            p_row = p_x + o_r[:, None] * D + o_d[None, :]
            p_out = p_code + (i_row * B + o_r)[:, None] * D + o_d[None, :]
            if KIND == 1:
                b_g = _grid(p_row, mask, b_low, b_scale)
                tl.store(p_out, (b_g - 128.0).to(tl.int32).to(tl.int8), mask=mask)
            else:
                b_x = tl.load(p_row, mask=mask, other=0.0).to(tl.float32)
                b_x = tl.div_rn(b_x, b_scale[None, :] + b_x * 0.0)
                tl.store(p_out, _to_fp8(b_x), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _pack_values_kernel(
    p_x,  # [rows, D], contiguous
    p_scale,  # [rows] bfloat16 as int16
    p_low,  # the same, for int4
    p_code,  # [rows, D] bytes; int4: [rows, HALF]
    rows,
    MOST: tl.constexpr,
    TINY: tl.constexpr,
    D: tl.constexpr,
    PAD_D: tl.constexpr,
    HALF: tl.constexpr,
    PAD_H: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    o_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < rows
    if KIND == 3:
        o_a = tl.arange(0, PAD_H)
        m_a = m_r[:, None] & (o_a < HALF)[None, :]
        m_b = m_r[:, None] & (o_a + HALF < D)[None, :]
        p_a = p_x + o_r[:, None] * D + o_a[None, :]
        b_a = tl.load(p_a, mask=m_a, other=0.0).to(tl.float32)
        b_b = tl.load(p_a + HALF, mask=m_b, other=0.0).to(tl.float32)
        inf = float("inf")
        b_least = tl.minimum(
            tl.min(tl.where(m_a, b_a, inf), axis=1), tl.min(tl.where(m_b, b_b, inf), axis=1)
        )
        b_most = tl.maximum(
            tl.max(tl.where(m_a, b_a, -inf), axis=1), tl.max(tl.where(m_b, b_b, -inf), axis=1)
        )
        b_least = tl.where(m_r, b_least, 0.0)
        b_most = tl.where(m_r, b_most, 0.0)
        b_low, low_bits = _to_bf16(b_least)
        b_scale = tl.maximum(tl.div_rn(b_most - b_low, b_low * 0.0 + 15.0), TINY)
        b_scale, scale_bits = _to_bf16(b_scale)
        b_a = _round(tl.div_rn(b_a - b_low[:, None], b_scale[:, None] + b_a * 0.0))
        b_b = _round(tl.div_rn(b_b - b_low[:, None], b_scale[:, None] + b_b * 0.0))
        b_code = tl.minimum(tl.maximum(b_a, 0.0), 15.0).to(tl.int32)
        b_high = tl.minimum(tl.maximum(b_b, 0.0), 15.0).to(tl.int32)
        b_code = b_code | (tl.where(m_b, b_high, 0) << 4)
        tl.store(p_code + o_r[:, None] * HALF + o_a[None, :], b_code.to(tl.uint8), mask=m_a)
        tl.store(p_low + o_r, low_bits, mask=m_r)
    else:
        o_d = tl.arange(0, PAD_D)
        mask = m_r[:, None] & (o_d < D)[None, :]
        b_x = tl.load(p_x + o_r[:, None] * D + o_d[None, :], mask=mask, other=0.0).to(tl.float32)
        b_most = tl.max(tl.abs(b_x), axis=1)
        b_scale = tl.maximum(tl.div_rn(b_most, b_most * 0.0 + MOST), TINY)
        b_scale, scale_bits = _to_bf16(b_scale)
        b_x = tl.div_rn(b_x, b_scale[:, None] + b_x * 0.0)
        b_x = tl.minimum(tl.maximum(b_x, -MOST), MOST)
        p_out = p_code + o_r[:, None] * D + o_d[None, :]
        if KIND == 1:
            tl.store(p_out, _round(b_x).to(tl.int32).to(tl.int8), mask=mask)
        else:
            tl.store(p_out, _to_fp8(b_x), mask=mask)
    tl.store(p_scale + o_r, scale_bits, mask=m_r)


@triton.jit
def _unpack_kernel(
    p_code,
    p_scale,
    p_low,
    p_step,
    p_base,
    p_out,  # [C, B, D], contiguous; bfloat16 as int16
    p_slots,  # [H * N] int64
    n_blocks,  # N
    B: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,  # of D, or of HALF
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    KEYS: tl.constexpr,  # constants per channel, not per token
    HAS_LOW: tl.constexpr,
    TO_BF16: tl.constexpr,
):
    i_b = tl.program_id(0).to(tl.int64)  # of all blocks of all heads
    i_h = i_b // n_blocks
    o_r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_r = o_r < B
    o_row = i_b * B + o_r
    p_out += tl.load(p_slots + i_b) * (B * D)
    o_d = tl.arange(0, PAD)
    width: tl.constexpr = HALF if KIND == 3 else D
    mask = m_r[:, None] & (o_d < width)[None, :]
    o_code = o_row[:, None] * width + o_d[None, :]
    if not KEYS:
        b_scale = _from_bf16(tl.load(p_scale + o_row, mask=m_r, other=0))[:, None]
        b_low = b_scale * 0.0
        if HAS_LOW:
            b_low = _from_bf16(tl.load(p_low + o_row, mask=m_r, other=0))[:, None]
    b_x = tl.load(p_code + o_code, mask=mask, other=0).to(tl.int32)
    for part in tl.static_range(2 if KIND == 3 else 1):
        o_c = o_d + part * HALF
        m_c = (o_c < D) & (o_d < width)
        if KEYS:
            b_scale = tl.load(p_scale + i_h * D + o_c, mask=m_c, other=0.0)[None, :]
            b_low = b_scale * 0.0
            if HAS_LOW:
                b_low = tl.load(p_low + i_h * D + o_c, mask=m_c, other=0.0)[None, :]
        if KIND == 1:
            b_y = b_x.to(tl.float32)
        elif KIND == 2:
            b_y = _from_fp8(b_x)
        else:
            b_n = (b_x >> (4 * part)) & 15
            if KEYS:
                b_step = tl.load(p_step + i_b * D + o_c, mask=m_c, other=0).to(tl.int32)
                b_base = tl.load(p_base + i_b * D + o_c, mask=m_c, other=0).to(tl.int32)
                b_n = (b_n * b_step[None, :] + b_base[None, :]) & 255
                b_n = (b_n ^ 128) - 128
            b_y = b_n.to(tl.float32)
        b_y = b_y * b_scale
        if HAS_LOW:
            b_y += b_low
        p_to = p_out + o_r[:, None] * D + o_c[None, :]
        if TO_BF16:
            _, b_y = _to_bf16(b_y)
        tl.store(p_to, b_y.to(p_out.dtype.element_ty), mask=m_r[:, None] & m_c[None, :])


def pack_keys_triton(keys: Tensor, kind: str) -> Packed:
    """Run the kernel; see `store_codec.pack_keys`."""
    keys = keys.contiguous()
    heads, blocks, size, d = keys.shape
    least = keys.amin(dim=(1, 2), keepdim=True).float()
    most = keys.amax(dim=(1, 2), keepdim=True).float()
    low = step = base = None
    if kind == FP8:
        scale = (torch.maximum(-least, most) / FP8_MOST).clamp_(min=_TINY)
        codes = torch.empty(keys.shape, dtype=torch.float8_e4m3fn, device=keys.device)
        bytes_ = codes.view(torch.uint8)
    else:
        low, scale = least, ((most - least) / 255).clamp_(min=_TINY)
        width = (d + 1) // 2 if kind == INT4 else d
        codes = keys.new_empty(
            heads, blocks, size, width, dtype=torch.uint8 if kind == INT4 else torch.int8
        )
        bytes_ = codes
    if kind == INT4:
        step, base = (keys.new_empty(heads, blocks, 1, d, dtype=torch.uint8) for _ in range(2))
    _pack_keys_kernel[(blocks, heads)](
        keys,
        scale,
        scale if low is None else low,
        bytes_,
        bytes_ if step is None else step,
        bytes_ if base is None else base,
        B=size,
        D=d,
        PAD_D=pad(d),
        HALF=(d + 1) // 2,
        PAD_H=pad((d + 1) // 2),
        ROWS=TILE,
        KIND=KINDS[kind],
        **EXACT,
    )
    if low is not None:
        low = low + 128 * scale  # codes are signed
    return Packed(kind, d, codes, scale, low, step, base)


def pack_values_triton(values: Tensor, kind: str) -> Packed:
    """Run the kernel; see `store_codec.pack_values`."""
    values = values.contiguous()
    *shape, d = values.shape
    rows = values.numel() // d
    width = (d + 1) // 2 if kind == INT4 else d
    dtype = {INT8: torch.int8, FP8: torch.float8_e4m3fn, INT4: torch.uint8}[kind]
    codes = values.new_empty(*shape, width, dtype=dtype)
    scale = values.new_empty(*shape, 1, dtype=torch.bfloat16)
    low = torch.empty_like(scale) if kind == INT4 else None
    _pack_values_kernel[(triton.cdiv(rows, TILE),)](
        values,
        scale.view(torch.int16),
        (scale if low is None else low).view(torch.int16),
        codes.view(torch.uint8) if kind == FP8 else codes,
        rows,
        MOST=127.0 if kind == INT8 else FP8_MOST,
        TINY=_TINY,
        D=d,
        PAD_D=pad(d),
        HALF=(d + 1) // 2,
        PAD_H=pad((d + 1) // 2),
        ROWS=TILE,
        KIND=KINDS[kind],
        **EXACT,
    )
    return Packed(kind, d, codes, scale, low)


def unpack_into_triton(packed: Packed, out: Tensor, slots: Tensor) -> None:
    """Run the kernel; see `store_codec.unpack_into`."""
    heads, blocks, size, _ = packed.codes.shape
    if packed.kind not in KINDS:
        out.index_copy_(0, slots, packed.codes.flatten(0, 1).to(out.dtype))
        return
    assert packed.scale is not None and out.is_contiguous()
    assert all(tensor.is_contiguous() for tensor in packed.tensors().values())
    d = packed.dim
    is_keys = packed.scale.shape[-1] == d and packed.scale.dtype == torch.float32
    half = (d + 1) // 2
    scale, low = packed.scale, packed.low
    if not is_keys:
        scale = scale.view(torch.int16)
        low = low.view(torch.int16) if low is not None else None
    codes = packed.codes.view(torch.uint8) if packed.kind == FP8 else packed.codes
    _unpack_kernel[(heads * blocks, triton.cdiv(size, TILE))](
        codes,
        scale,
        scale if low is None else low,
        codes if packed.step is None else packed.step,
        codes if packed.base is None else packed.base,
        out.view(torch.int16) if out.dtype == torch.bfloat16 else out,
        slots,
        blocks,
        B=size,
        D=d,
        PAD=pad(half if packed.kind == INT4 else d),
        HALF=half,
        ROWS=TILE,
        KIND=KINDS[packed.kind],
        KEYS=is_keys,
        HAS_LOW=low is not None,
        TO_BF16=out.dtype == torch.bfloat16,
        **EXACT,
    )
