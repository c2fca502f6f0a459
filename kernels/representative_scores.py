"""How much do the tokens that follow look at each token of the window?

`r_m = (1 / l_L) * sum_{j=1..l_L} q_{m+j} . k_m` (InfLLM, arXiv 2402.04617, its representative
score). It is linear in the queries, so the difference of two running sums of rotated queries gives
it and no attention matrix is needed.
"""

from __future__ import annotations

from torch import Tensor

from .dispatch import kernels_for


def representative_scores(prefix: Tensor, keys: Tensor, window_tokens: int) -> Tensor:
    """Scores `[H_kv, n]` of the first n tokens of a window, float32.

    Args:
        prefix: `[H_kv, m, d]` float32, m >= n + window_tokens: running sum of the rotated queries
            (summed over the query heads of a KV head) up to and with each token of the window.
        keys: `[H_kv, n, d]` the tokens' keys, rotated at the same positions.
        window_tokens: l_L, how many following tokens count.
    """
    assert prefix.shape[1] >= keys.shape[1] + window_tokens
    arguments = (prefix, keys, window_tokens)
    twin = representative_scores_torch
    return kernels_for(keys.device.type).run("representative_scores", twin, *arguments)


def representative_scores_torch(prefix: Tensor, keys: Tensor, window_tokens: int) -> Tensor:
    """Do the same in plain torch: the kernel's twin."""
    tokens = keys.shape[1]
    followers = prefix[:, window_tokens : window_tokens + tokens] - prefix[:, :tokens]
    return (followers * keys.float()).sum(dim=-1) / window_tokens
