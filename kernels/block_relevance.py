"""How relevant is each block to the queries of a step, by the few keys that represent it?

The paper's rule (InfLLM, arXiv 2402.04617) is a sum of dot products; two others are a maximum, and
the softmax over all representatives.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .block_mass import block_mass
from .dispatch import kernels_for
from .exact_lookup import exact_lookup_torch

Rule = Literal["sum", "max", "mass"]


def block_relevance(q: Tensor, keys: Tensor, rule: Rule, missing: Tensor | None = None) -> Tensor:
    """Score blocks by their representatives.

    With `s_ij = q_i . k_j`, for block B: "sum": `sum_i sum_{j in B} s_ij` (the paper); "max":
    `sum_i max_{j in B} s_ij`; "mass": `sum_i sum_{j in B} softmax_j(s_ij)`, over all
    representatives.

    Args:
        q: `[H_kv, Q, d]`, the queries of each KV head, scaled where the rule wants it.
        keys: `[H_kv, N, R, d]` representatives, contiguous per block.
        rule: see above.
        missing: `[N]` bool, blocks that are not to be found; None: none.

    Returns:
        `[H_kv, N]` float32; -inf where missing.
    """
    arguments = (q, keys, rule, missing)
    return kernels_for(q.device.type).run("block_relevance", block_relevance_torch, *arguments)


def block_relevance_torch(
    q: Tensor, keys: Tensor, rule: Rule, missing: Tensor | None = None
) -> Tensor:
    """Do the same in plain torch: the kernel's twin."""
    assert q.ndim == 3 and keys.ndim == 4 and q.shape[0] == keys.shape[0], (q.shape, keys.shape)
    n_blocks = keys.shape[1]
    if rule == "sum":  # linear: the sums of queries and of keys are enough
        query = q.float().sum(dim=1)
        found = torch.matmul(keys.float().sum(dim=2), query[:, :, None])[..., 0]
    else:
        lse, peak = exact_lookup_torch(q.float(), keys.float(), n_blocks)
        if missing is not None:
            lse = lse.masked_fill(missing, float("-inf"))
        found = peak.sum(dim=1) if rule == "max" else block_mass(lse)
    return found if missing is None else found.masked_fill(missing, float("-inf"))


def relevant_blocks(
    q: Tensor, keys: Tensor, rule: Rule, blocks: int, missing: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The most relevant blocks `[H_kv, min(blocks, N)]`, best first, and the scores of all."""
    relevance = block_relevance(q, keys, rule, missing)
    return relevance.topk(min(blocks, relevance.shape[1]), dim=-1).indices, relevance
