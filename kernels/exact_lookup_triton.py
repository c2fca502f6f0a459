"""How much of each query's attention falls on each block, in one Triton kernel?

The twin of `exact_lookup.exact_lookup_torch`. Importing this file imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .exact_lookup import check_shapes

OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# Blocks scanned by one program: several save loads of queries, but only once there are enough
# blocks to occupy every core of the device.
GROUP_SIZE = 4
GROUP_FROM = 512


@triton.jit(do_not_specialize=["n_rows", "n_blocks"])
def _exact_lookup_kernel(
    p_q,  # [H_kv, n_rows, D], contiguous
    p_k,  # [H_kv, N_cap, B, D], last dimension contiguous
    p_lse,  # [H_kv, n_rows, n_blocks], contiguous
    p_peak,  # the same
    n_rows,
    n_blocks,
    stride_kh,
    stride_kn,
    stride_kb,
    D: tl.constexpr,
    B: tl.constexpr,
    PAD_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    OPERAND: tl.constexpr,
    WANT_LSE: tl.constexpr,
):
    # Query tiles vary fastest: those that scan the same keys run together and share the cache.
    n_tiles = tl.cdiv(n_rows, TILE_ROWS)
    i_q = tl.program_id(0) % n_tiles
    i_g = tl.program_id(0) // n_tiles
    i_h = tl.program_id(1).to(tl.int64)  # an arena can pass 2^31 elements

    o_d = tl.arange(0, PAD_D)
    o_q = i_q * TILE_ROWS + tl.arange(0, TILE_ROWS)
    m_d = o_d < D
    m_q = o_q < n_rows
    p_row = p_q + (i_h * n_rows + o_q)[:, None] * D + o_d[None, :]
    # Converted directly after the load: the interpreter cannot compute with bfloat16.
    b_q = tl.load(p_row, mask=m_q[:, None] & m_d[None, :], other=0.0).to(OPERAND)

    for i in range(GROUP):
        i_n = i_g * GROUP + i
        if i_n < n_blocks:
            p_block = p_k + i_h * stride_kh + i_n.to(tl.int64) * stride_kn
            b_peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            b_sum = tl.zeros([TILE_ROWS], tl.float32)
            for o_b in range(0, B, TILE_KEYS):
                o_k = o_b + tl.arange(0, TILE_KEYS)
                m_k = o_k < B
                p_key = p_block + o_k[:, None] * stride_kb + o_d[None, :]
                b_k = tl.load(p_key, mask=m_k[:, None] & m_d[None, :], other=0.0).to(OPERAND)
                b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
                b_s = tl.where(m_k[None, :], b_s, float("-inf"))
                b_new = tl.maximum(b_peak, tl.max(b_s, axis=1))
                if WANT_LSE:
                    # Every tile holds a valid key, so b_new is finite and nothing is inf - inf.
                    b_sum = b_sum * tl.exp(b_peak - b_new)
                    b_sum += tl.sum(tl.exp(b_s - b_new[:, None]), axis=1)
                b_peak = b_new
            o_out = (i_h * n_rows + o_q) * n_blocks + i_n
            tl.store(p_peak + o_out, b_peak, mask=m_q)
            if WANT_LSE:
                tl.store(p_lse + o_out, b_peak + tl.log(b_sum), mask=m_q)


def exact_lookup_triton(
    q: Tensor, keys: Tensor, n_blocks: int, want_lse: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Score every stored key and reduce the scores of each block; see `exact_lookup`.

    Args:
        q: `[H_kv, Q, d]`.
        keys: `[H_kv, N_cap, B, d]`, first `n_blocks` blocks valid.
        n_blocks: number of valid blocks.
        want_lse: False leaves out the sum and returns None for it.

    Returns:
        `(lse, peak)`, both `[H_kv, Q, n_blocks]` float32.
    """
    check_shapes(q, keys, n_blocks)
    n_heads, n_rows, d = q.shape
    size = keys.shape[2]
    lse = q.new_empty((n_heads, n_rows, n_blocks), dtype=torch.float32) if want_lse else None
    peak = q.new_empty((n_heads, n_rows, n_blocks), dtype=torch.float32)
    if peak.numel() == 0:
        return lse, peak
    assert keys.stride(3) == 1, keys.stride()  # copying an arena here would hide a slow path
    q = q.contiguous()
    # tl.dot needs at least 16 along each side, and powers of two.
    pad_d = max(16, triton.next_power_of_2(d))
    # Tiles of queries and keys that stay within 64 KB of shared memory together.
    widest = 64 if pad_d * keys.element_size() <= 256 else 32
    tile_rows = min(max(16, triton.next_power_of_2(n_rows)), widest)
    tile_keys = min(max(16, triton.next_power_of_2(size)), widest)
    group = GROUP_SIZE if n_blocks >= GROUP_FROM else 1
    # Mixed dtypes and the interpreter (see above) multiply in float32.
    interpreted = not isinstance(_exact_lookup_kernel, triton.JITFunction)
    narrow = q.dtype == keys.dtype and not interpreted
    grid = (triton.cdiv(n_rows, tile_rows) * triton.cdiv(n_blocks, group), n_heads)
    _exact_lookup_kernel[grid](
        q,
        keys,
        peak if lse is None else lse,
        peak,
        n_rows,
        n_blocks,
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        D=d,
        B=size,
        PAD_D=pad_d,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        GROUP=group,
        OPERAND=OPERANDS[q.dtype] if narrow else tl.float32,
        WANT_LSE=want_lse,
    )
    return lse, peak
