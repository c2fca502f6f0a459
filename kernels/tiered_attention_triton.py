"""The tiers of a step in one softmax, in Triton: twin of `tiered_attention.tiered_attention_torch`.

Which form is launched, and with which tiles: `tier_chunk` for many queries, `tier_split` for few.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .launch import operand_of, pad, programs_wanted, shared_memory
from .tier_chunk import chunk_kernel
from .tier_split import combine_kernel, mass_kernel, split_kernel
from .tiered_attention import Mass, Tiers, block_sums

LOG2E = 1.4426950408889634
# Queries (tokens x heads of a KV head) that one program can hold beside each other.
SPLIT_ROWS = 64
SPLIT_KEYS = 64
MASS_ROWS = 64


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
        "OPERAND": operand_of(q.dtype, chunk_kernel),
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
        mass_kernel[(count, kv_heads)](
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
    chunk_kernel[(triton.cdiv(length, tile_rows), heads)](
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
    split_kernel[(splits, kv_heads)](
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
    combine_kernel[(rows, kv_heads)](
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
