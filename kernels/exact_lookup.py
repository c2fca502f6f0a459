"""How much of each query's attention over *all* stored keys falls on each block?

Representatives stand in for a block while a document is read; an answer needs the exact scores.
Nothing of size `queries x keys` is ever held: the scores of one tile are reduced to two numbers
per query and block before the next tile is scored.

This file holds the plain torch form, which is also what the CPU runs, and the choice of form.
The Triton kernel is its neighbour `exact_lookup_triton`, imported only when it is to run, since
importing Triton is slow and not possible everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import kernels_for

# Sizes of the working tiles of the torch form. On a CPU they are to stay in the second-level
# cache from the matrix product to the sum (2 MB of scores, 1 MB of keys); elsewhere each step is
# a kernel launch, so that larger tiles pay. Scores never take more than 32 MB.
CPU_TILE_SCORES = 2**19
DEVICE_TILE_SCORES = 2**23
KEY_TILE_FRACTION = 2  # elements of a key tile: those of a score tile, divided by this
MAX_TILE_ROWS = 1024  # so that a tile of scores has room for several blocks
# Up to here the scan is bound by reading the keys, and widening them to float32 would cost more
# than the product itself.
FEW_ROWS = 16


def exact_lookup(
    q: Tensor, keys: Tensor, n_blocks: int, want_lse: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Score every stored key and reduce the scores of each block.

    With `s = q . k` (the caller has scaled, and where wanted rotated, the queries), for block B:
    `lse = log sum_{k in B} exp(s)` and `peak = max_{k in B} s`. A softmax of `lse` over blocks is
    each block's share of the query's attention over everything stored (see `block_mass`).

    Args:
        q: `[H_kv, Q, d]`, the queries of each KV head: group x tokens rows.
        keys: `[H_kv, N_cap, B, d]`, an arena whose first `n_blocks` blocks hold keys; of any
            strides.
        n_blocks: number of valid blocks, 0 to `N_cap`.
        want_lse: False leaves out the sum (and returns None for it), which saves about a quarter
            where there are many queries and nothing for a few.

    Returns:
        `(lse, peak)`, both `[H_kv, Q, n_blocks]` float32 on the device of `q`.
    """
    arguments = (q, keys, n_blocks, want_lse)
    return kernels_for(q.device.type).run("exact_lookup", exact_lookup_torch, *arguments)


def exact_lookup_torch(
    q: Tensor, keys: Tensor, n_blocks: int, want_lse: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Do the same in plain torch: the kernel's twin, and what the CPU runs.

    Products are float32, with one exception: a few bfloat16 queries on a CPU that multiplies
    bfloat16 natively. There each score is rounded to bfloat16 (relative error 2^-9), as in the
    model's own eager attention, for a scan at the speed of memory.
    """
    check_shapes(q, keys, n_blocks)
    return exact_lookup_parts(q, [keys[:, :n_blocks]], want_lse)


@torch.no_grad()  # `out=` refuses operands that require gradients
def exact_lookup_parts(
    q: Tensor, parts: Sequence[Tensor], want_lse: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Do the same for keys that lie in several parts, one behind the other.

    Args:
        q: as in `exact_lookup`.
        parts: `[H_kv, n, B, d]` each, all blocks of each of them valid.

    Returns:
        As `exact_lookup` for the parts joined, `N` the sum of their blocks.
    """
    for keys in parts:
        check_shapes(q, keys, keys.shape[1])
    n_heads, n_rows, _ = q.shape
    n_blocks = sum(keys.shape[1] for keys in parts)
    lse = q.new_empty((n_heads, n_rows, n_blocks), dtype=torch.float32) if want_lse else None
    peak = q.new_empty((n_heads, n_rows, n_blocks), dtype=torch.float32)
    if peak.numel() == 0:
        return lse, peak
    largest = max(parts, key=lambda keys: keys.shape[1])
    tile_scores = CPU_TILE_SCORES if q.device.type == "cpu" else DEVICE_TILE_SCORES
    tile_rows = min(n_rows, MAX_TILE_ROWS)
    narrow = n_rows <= FEW_ROWS and q.dtype == largest.dtype and multiplies_natively(q)
    tile_heads = n_heads if narrow else 1
    room = tile_scores // (tile_heads * tile_rows * largest.shape[2])
    tile_blocks = max(1, min(largest.shape[1], room))
    # Working memory is taken once: the scan of a small part costs less than fresh pages.
    score = (_NarrowScores if narrow else _WideScores)(tile_rows, tile_blocks, largest)
    start = 0
    for keys in parts:
        stop = start + keys.shape[1]
        for o_h in range(0, n_heads, tile_heads):
            heads = slice(o_h, o_h + tile_heads)
            for o_q in range(0, n_rows, tile_rows):
                rows = slice(o_q, o_q + tile_rows)
                for o_n in range(start, stop, tile_blocks):
                    blocks = slice(o_n, min(o_n + tile_blocks, stop))
                    b_k = keys[heads, blocks.start - start : blocks.stop - start]
                    b_s = score(q[heads, rows], b_k)  # [heads, rows, blocks, B]
                    b_peak = peak[heads, rows, blocks].copy_(torch.amax(b_s, dim=-1))
                    if lse is not None:
                        b_s.sub_(b_peak.unsqueeze(-1)).exp_()
                        lse[heads, rows, blocks] = torch.sum(b_s, dim=-1)
        start = stop
    if lse is not None:
        lse.log_().add_(peak)
    return lse, peak


def check_shapes(q: Tensor, keys: Tensor, n_blocks: int) -> None:
    """Assert what every form relies on."""
    assert q.ndim == 3 and keys.ndim == 4, (q.shape, keys.shape)
    assert q.shape[0] == keys.shape[0] and q.shape[2] == keys.shape[3], (q.shape, keys.shape)
    assert q.device == keys.device, (q.device, keys.device)
    assert 0 <= n_blocks <= keys.shape[1], (n_blocks, keys.shape)


class _WideScores:
    """Scores of a tile in float32: the keys are widened piece by piece."""

    def __init__(self, tile_rows: int, tile_blocks: int, keys: Tensor) -> None:
        _, _, size, d = keys.shape
        self.scores = keys.new_empty(tile_rows * tile_blocks * size, dtype=torch.float32)
        limit = CPU_TILE_SCORES if keys.device.type == "cpu" else DEVICE_TILE_SCORES
        self.piece = max(1, min(tile_blocks, limit // KEY_TILE_FRACTION // (size * d)))
        self.widened = (
            None
            if keys.dtype == torch.float32
            else keys.new_empty((self.piece, size, d), dtype=torch.float32)
        )

    def __call__(self, q: Tensor, keys: Tensor) -> Tensor:
        """Score `q [1, R, d]` against `keys [1, N, B, d]`: `[1, R, N, B]`, valid until called."""
        _, n_blocks, size, d = keys.shape
        q = q[0].float()
        b_s = self.scores[: len(q) * n_blocks * size].view(len(q), n_blocks * size)
        for o_n in range(0, n_blocks, self.piece):
            b_k = keys[0, o_n : o_n + self.piece]
            if self.widened is not None:
                b_k = self.widened[: len(b_k)].copy_(b_k)
            b_k = b_k.reshape(-1, d)
            torch.mm(q, b_k.T, out=b_s[:, o_n * size : o_n * size + len(b_k)])
        return b_s.view(1, len(q), n_blocks, size)


class _NarrowScores:
    """Scores of a tile, multiplied and rounded in the dtype of the keys, then widened.

    All heads at once: with so few rows the calls would cost as much as the products.
    """

    def __init__(self, tile_rows: int, tile_blocks: int, keys: Tensor) -> None:
        n_scores = keys.shape[0] * tile_rows * tile_blocks * keys.shape[2]
        self.products = keys.new_empty(n_scores)
        self.scores = keys.new_empty(n_scores, dtype=torch.float32)

    def __call__(self, q: Tensor, keys: Tensor) -> Tensor:
        """Score `q [H, R, d]` against `keys [H, N, B, d]`: `[H, R, N, B]`, valid until called."""
        n_heads, n_blocks, size, d = keys.shape
        n_rows = q.shape[1]
        n_scores = n_heads * n_rows * n_blocks * size
        # The long operand on the left: measured up to 1.3 times faster than q @ keys^T.
        b_p = self.products[:n_scores].view(n_heads, n_blocks * size, n_rows)
        torch.bmm(keys.reshape(n_heads, -1, d), q.transpose(1, 2).contiguous(), out=b_p)
        b_s = self.scores[:n_scores].view(n_heads, n_rows, n_blocks * size)
        return b_s.copy_(b_p.transpose(1, 2)).view(n_heads, n_rows, n_blocks, size)


def multiplies_natively(q: Tensor) -> bool:
    """Whether this CPU has instructions for products of bfloat16 (without them it crawls)."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and _has_bfloat16_products()


@functools.cache
def _has_bfloat16_products() -> bool:
    # Private names of torch: one that is gone means the slower, exact way.
    probes = (
        getattr(torch.cpu, name, None)
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return any(probe is not None and probe() for probe in probes)
