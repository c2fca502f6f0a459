"""How much of each query's attention falls on each block of keys that a codec has packed?

What `exact_lookup` tells, from the codes themselves: the codec's constants go into the query, and
of the keys nothing is unpacked but, of int4 and fp8, one tile at a time.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from .exact_lookup import CPU_TILE_SCORES, exact_lookup, exact_lookup_torch
from .store_codec import FP8, FULL, INT8, Packed, grid_codes, unpack, widen_fp8

# A query is rounded to two digits to the base 128, so that products of integers give its scores as
# exactly as 15 bits do (products in bfloat16 have 8).
DIGIT, MOST_DIGIT = 128, 127
# Sums of two digits times a code stay within 32 bits.
MOST_DIM = 1024
# So few rows have a kernel of their own, one that does not put the keys in another order first.
FEW_ROWS = 5


@torch.no_grad()
def packed_lookup(q: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Score every key of a segment and reduce the scores of each block; see `exact_lookup`.

    Args:
        q: `[H_kv, Q, d]`, scaled.
        packed: keys `[H_kv, N, B, d]`.

    Returns:
        `(lse, peak)`, both `[H_kv, Q, N]` float32.
    """
    if packed.kind == FULL:
        lse, peak = exact_lookup(q, packed.codes, packed.blocks)
        assert lse is not None
        return lse, peak
    if q.device.type != "cpu":
        from .segment_lookup import KeyTable, segment_lookup  # which imports this file

        table = KeyTable.of([(packed.map(Tensor.contiguous), range(packed.blocks))])
        return segment_lookup(q, [table], packed.blocks)
    assert packed.scale is not None
    folded = q.float() * packed.scale[:, 0]
    if packed.kind == FP8:
        lse, peak = exact_lookup(
            folded.to(q.dtype), widen_fp8(packed.codes).to(q.dtype), packed.blocks
        )
        assert lse is not None
        return lse, peak
    assert packed.low is not None
    shift = (q.float() * packed.low[:, 0]).sum(dim=-1, keepdim=True)  # of every score of a query
    if multiplies_integers():
        lse, peak = _scan_integers(folded, packed)
    else:
        return packed_lookup_torch(q, packed)
    return lse.add_(shift), peak.add_(shift)


def packed_lookup_torch(q: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Do the same by unpacking the keys: the twin, and what runs where integers are slow."""
    lse, peak = exact_lookup_torch(q.float(), unpack(packed, torch.float32), packed.blocks)
    assert lse is not None
    return lse, peak


def multiplies_integers() -> bool:
    """Whether products of bytes are quick here: oneDNN has them for x86.

    The name is private to torch: one that is gone means the slower way.
    """
    quick = (
        platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    )
    return quick and hasattr(torch, "_int_mm")


def _scores_of_few(digits: Tensor, codes: Tensor, n_rows: int) -> Tensor:
    """Digits `[H, 2 Q, d]`, the high ones first, times codes `[H, N, B, d]`: `[H, Q, N * B]` int32.

    The two digits one after the other: measured on one processor, 46 us for 3 rows and 141 us for
    6; on another, 43 and 69.
    """
    n_heads, _, d = digits.shape
    n_keys = codes.shape[1] * codes.shape[2]
    high, low = (digits.new_empty(n_heads, n_rows, n_keys, dtype=torch.int32) for _ in range(2))
    for i_h in range(n_heads):
        b_k = codes[i_h].reshape(-1, d).T
        torch._int_mm(digits[i_h, :n_rows], b_k, out=high[i_h])
        torch._int_mm(digits[i_h, n_rows:], b_k, out=low[i_h])
    return low.add_(high, alpha=DIGIT)


def _scan_integers(folded: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Scores of the codes alone, for folded queries `[H_kv, Q, d]` float32."""
    n_heads, n_rows, d = folded.shape
    _, n_blocks, size, _ = packed.codes.shape
    assert d <= MOST_DIM
    unit = (folded.abs().amax(dim=-1, keepdim=True) / (MOST_DIGIT * DIGIT)).clamp_(min=1e-37)
    rounded = (folded / unit).round_()
    high = ((rounded + DIGIT // 2) / DIGIT).floor_()
    digits = torch.cat([high, rounded - DIGIT * high], dim=1).to(torch.int8)  # [H, 2 Q, d]
    lse = folded.new_empty(n_heads, n_rows, n_blocks)
    peak = torch.empty_like(lse)
    tile = max(1, min(n_blocks, CPU_TILE_SCORES // (2 * n_rows * size)))
    for o_n in range(0, n_blocks, tile):
        blocks = slice(o_n, min(o_n + tile, n_blocks))
        part = packed if tile == n_blocks else packed.cut(blocks)
        codes = part.codes if packed.kind == INT8 else grid_codes(part)
        if n_rows <= FEW_ROWS:
            # All heads at once: with so few rows the calls cost as much as what they do.
            b_s = _scores_of_few(digits, codes, n_rows).mul(unit)
            b_s = b_s.view(n_heads, n_rows, -1, size)
            b_peak = torch.amax(b_s, dim=-1)
            peak[..., blocks] = b_peak
            b_s.sub_(b_peak.unsqueeze(-1)).exp_()
            lse[..., blocks] = torch.sum(b_s, dim=-1).log_().add_(b_peak)
            continue
        for i_h in range(n_heads):
            b_k = codes[i_h].reshape(-1, d).T
            both = torch._int_mm(digits[i_h], b_k)  # [2 Q, n * B] int32
            b_s = both[n_rows:].add_(both[:n_rows], alpha=DIGIT) * unit[i_h]
            b_s = b_s.view(n_rows, -1, size)
            b_peak = torch.amax(b_s, dim=-1)
            peak[i_h, :, blocks] = b_peak
            b_s.sub_(b_peak.unsqueeze(-1)).exp_()
            lse[i_h, :, blocks] = torch.sum(b_s, dim=-1).log_().add_(b_peak)
    return lse, peak
