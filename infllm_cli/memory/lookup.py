"""Which blocks join the attention of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.exact_lookup import exact_lookup_parts
from infllm_cli.kernels.packed_lookup import packed_lookup
from infllm_cli.kernels.store_codec import FULL
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.knobs import Relevance, Sharing
from infllm_cli.memory.representatives import Representatives
from infllm_cli.memory.segment import Segment

UNPACKED_BLOCKS = 16  # at a time: what is unpacked is several times as large


def by_representatives(
    query: Tensor,
    representatives: Representatives,
    blocks: int,
    missing: Tensor | None = None,
    sharing: Sharing = Sharing.PER_KV_HEAD,
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
    return top_blocks(shared(relevance, sharing), blocks)


def by_each_representative(
    q: Tensor,
    representatives: Representatives,
    blocks: int,
    relevance: Relevance,
    scaling: float,
    missing: Tensor | None = None,
    sharing: Sharing = Sharing.PER_KV_HEAD,
) -> Tensor:
    """Blocks [H_kv, min(blocks, N)] in document order, by every query of q [H, L, d] for itself.

    MAX: the best score of a block's representatives; MASS: a softmax over those of all blocks.
    """
    assert representatives.each_key is not None and relevance is not Relevance.SUM
    keys = representatives.each_key[:, : representatives.count]  # [H_kv, N, r, d]
    queries = q.float().reshape(len(keys), -1, q.shape[-1]) * scaling
    scores = torch.matmul(queries, keys.flatten(1, 2).mT).unflatten(-1, keys.shape[1:3])
    if missing is not None:
        scores = scores.masked_fill(missing.to(scores.device)[:, None], float("-inf"))
    if relevance is Relevance.MAX:
        found = scores.amax(dim=-1).sum(dim=1)
    else:
        found = block_mass(scores.logsumexp(dim=-1))
    if missing is not None:  # a mass of 0 is found before nothing
        found = found.masked_fill(missing.to(found.device), float("-inf"))
    return top_blocks(shared(found, sharing), blocks)


def exact(
    q: Tensor,
    arena: BlockArena,
    scaling: float,
    blocks: int,
    relevance: Relevance = Relevance.MASS,
    sharing: Sharing = Sharing.PER_KV_HEAD,
) -> tuple[Tensor, Tensor]:
    """Blocks [H_kv, min(blocks, N)] in document order, and the mass [H_kv, N] of all.

    Every stored key is scored against every query of q [H, L, d]; a softmax per query over all of
    them; the mass of a block is summed over the queries of its KV head. It is what blocks are
    chosen by, unless `relevance` is another one.
    """
    found, mass = exact_relevance(q, arena, scaling, relevance)
    return top_blocks(shared(found, sharing), blocks), mass


def exact_relevance(
    q: Tensor, arena: BlockArena, scaling: float, relevance: Relevance
) -> tuple[Tensor, Tensor]:
    """What blocks are chosen by, [H_kv, N], and their mass [H_kv, N]; see `exact`."""
    folded = fold(q, arena.kv_heads, scaling)
    parts = list(arena.parts())
    if all(_is_plain(part) for part in parts):
        lse, peak = exact_lookup_parts(folded, [part.keys.codes for part in parts])
    else:
        scanned = [_scan(folded, part) for part in parts]
        lse, peak = (torch.cat(pieces, dim=-1) for pieces in zip(*scanned, strict=True))
    mass = block_mass(lse)
    if relevance is Relevance.MASS:
        found = mass
    elif relevance is Relevance.MAX:
        found = peak.sum(dim=1)
    else:
        found = _score_sums(folded, arena)
    return found, mass


def _score_sums(folded: Tensor, arena: BlockArena) -> Tensor:
    """Of all scores of a block's keys, the sum [H_kv, N]: linear, so one query is enough."""
    query = folded.float().sum(dim=1)[:, :, None]  # [H_kv, d, 1]
    sums = []
    for part in arena.parts():
        for start in range(0, part.blocks, UNPACKED_BLOCKS):
            keys, _ = part.unpack(slice(start, start + UNPACKED_BLOCKS), torch.float32)
            found = torch.matmul(keys.sum(dim=2), query)[..., 0]
            held = part.held()[start : start + UNPACKED_BLOCKS]
            sums.append(found.masked_fill(~held, float("-inf")))
        if part.release is not None:
            part.release()
    return torch.cat(sums, dim=-1)


def shared(relevance: Tensor, sharing: Sharing) -> Tensor:
    """Relevance [H_kv, N] of those who load the same blocks: per layer, that of all together."""
    if sharing is Sharing.PER_KV_HEAD:
        return relevance
    return relevance.sum(dim=0, keepdim=True).expand_as(relevance)


def fold(q: Tensor, kv_heads: int, scaling: float) -> Tensor:
    """Queries [H, L, d], scaled, by KV head [H_kv, G * L, d], where the blocks are."""
    return (q.float() * scaling).to(q.dtype).reshape(kv_heads, -1, q.shape[-1]).cpu()


def _is_plain(part: Segment) -> bool:
    return part.release is None and part.keys.kind == FULL and part.slots is None


def _scan(folded: Tensor, part: Segment) -> tuple[Tensor, Tensor]:
    """lse and peak [H_kv, Q, n] of a segment, minus infinity where a block was dropped."""
    found = packed_lookup(folded, part.keys)
    if part.release is not None:
        part.release()
    if part.slots is None:
        return found
    everything = []
    for tensor in found:
        wide = tensor.new_full((*tensor.shape[:2], part.blocks), float("-inf"))
        wide[..., part.held()] = tensor
        everything.append(wide)
    return everything[0], everything[1]


def top_blocks(relevance: Tensor, blocks: int) -> Tensor:
    """The indices of the highest of relevance [H_kv, N], in document order."""
    chosen = relevance.topk(min(blocks, relevance.shape[-1]), dim=-1).indices
    return chosen.sort(dim=-1).values
