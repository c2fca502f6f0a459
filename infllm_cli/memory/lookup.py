"""Which blocks join the attention of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.exact_lookup import exact_lookup_parts
from infllm_cli.kernels.packed_lookup import packed_lookup
from infllm_cli.kernels.store_codec import FULL
from infllm_cli.memory.blocks import BlockArena, Segment
from infllm_cli.memory.representatives import Representatives


def by_representatives(
    query: Tensor, representatives: Representatives, blocks: int, missing: Tensor | None = None
) -> Tensor:
    """Blocks [H_kv, min(blocks, N)] in document order, by the paper's relevance.

    `sum_{i in X} sum_{j <= r} q_i . k_{b_j}` is linear, so the sum of the step's queries over
    tokens and over the query heads of each KV head is enough: query [H_kv, d] float32. Blocks
    that are `missing` [N] are not found.
    """
    keys = representatives.key_sum[:, : representatives.count]
    relevance = torch.matmul(keys, query[:, :, None])[..., 0]  # [H_kv, N]
    if missing is not None:
        relevance = relevance.masked_fill(missing.to(relevance.device), float("-inf"))
    return top_blocks(relevance, blocks)


def exact(q: Tensor, arena: BlockArena, scaling: float, blocks: int) -> tuple[Tensor, Tensor]:
    """Blocks [H_kv, min(blocks, N)] in document order, and the mass [H_kv, N] they were chosen by.

    Every stored key is scored against every query of q [H, L, d]; a softmax per query over all of
    them; the mass of a block is summed over the queries of its KV head.
    """
    folded = fold(q, arena.kv_heads, scaling)
    parts = list(arena.parts())
    if all(_is_plain(part) for part in parts):
        lse, _ = exact_lookup_parts(folded, [part.keys.codes for part in parts])
    else:
        lse = torch.cat([_scan(folded, part) for part in parts], dim=-1)
    mass = block_mass(lse)
    return top_blocks(mass, blocks), mass


def fold(q: Tensor, kv_heads: int, scaling: float) -> Tensor:
    """Queries [H, L, d], scaled, by KV head [H_kv, G * L, d], where the blocks are."""
    return (q.float() * scaling).to(q.dtype).reshape(kv_heads, -1, q.shape[-1]).cpu()


def _is_plain(part: Segment) -> bool:
    return part.release is None and part.keys.kind == FULL and part.slots is None


def _scan(folded: Tensor, part: Segment) -> Tensor:
    lse, _ = packed_lookup(folded, part.keys)
    if part.release is not None:
        part.release()
    if part.slots is not None:
        everything = lse.new_full((*lse.shape[:2], part.blocks), float("-inf"))
        everything[..., part.held()] = lse
        return everything
    return lse


def top_blocks(relevance: Tensor, blocks: int) -> Tensor:
    """The indices of the highest of relevance [H_kv, N], in document order."""
    chosen = relevance.topk(min(blocks, relevance.shape[-1]), dim=-1).indices
    return chosen.sort(dim=-1).values
