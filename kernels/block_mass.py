"""How much attention does each block draw from all the queries of a head together?"""

from __future__ import annotations

import torch
from torch import Tensor


def block_mass(lse: Tensor) -> Tensor:
    """Sum each query's softmax over blocks over the queries of its head.

    `mass_B = sum_i exp(lse_iB) / sum_B' exp(lse_iB')`, so the masses of a head add up to the
    number of its queries.

    Args:
        lse: `[H_kv, Q, N]`, log-sum-exp of the scores of each query in each block.

    Returns:
        `[H_kv, N]` float32.
    """
    return torch.softmax(lse.float(), dim=-1).sum(dim=1)
