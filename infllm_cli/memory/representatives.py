"""A few keys that stand for their block while reading.

The score of token m is how much the next l_L tokens look at it (InfLLM, arXiv 2402.04617):
`r_m = (1 / l_L) * sum_{j=1..l_L} q_{m+j} . k_m`. It is linear in the queries, so the difference of
two running sums of rotated queries gives it and no attention matrix is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Representatives:
    """Of every sealed block, per KV head: the chosen tokens and the sum of their keys.

    Attributes:
        chosen: [H_kv, N_capacity, r] index within the block.
        key_sum: [H_kv, N_capacity, d] float32. The paper's relevance of a block, summed over the
            step's queries and the block's representatives, is one dot product with this sum.
    """

    def __init__(self, kv_heads: int, per_block: int, head_dim: int, device: torch.device) -> None:
        self.count = 0
        self.per_block = per_block
        self.chosen = torch.zeros(kv_heads, 0, per_block, dtype=torch.int16, device=device)
        self.key_sum = torch.zeros(kv_heads, 0, head_dim, device=device)

    @property
    def used_bytes(self) -> int:
        """Bytes that the representatives of the sealed blocks take."""
        per_block = self.chosen[:, :1].nbytes + self.key_sum[:, :1].nbytes
        return per_block * self.count

    def append(self, keys: Tensor, scores: Tensor, block_tokens: int) -> None:
        """Choose for blocks of keys [H_kv, n * B, d] by scores [H_kv, n * B], highest first."""
        kv_heads, tokens, dim = keys.shape
        blocks = tokens // block_tokens
        keys = keys.view(kv_heads, blocks, block_tokens, dim)
        scores = scores.view(kv_heads, blocks, block_tokens)
        chosen = scores.topk(self.per_block, dim=-1).indices
        found = keys.gather(2, chosen[..., None].expand(-1, -1, -1, dim))
        self._reserve(self.count + blocks)
        self.chosen[:, self.count : self.count + blocks] = chosen.to(torch.int16)
        self.key_sum[:, self.count : self.count + blocks] = found.float().sum(dim=2)
        self.count += blocks

    def held(self, start: int) -> dict[str, Tensor]:
        """Copies [H_kv, count - start, ...] of the blocks from `start` on, by name."""
        return {
            name: getattr(self, name)[:, start : self.count].clone()
            for name in ("chosen", "key_sum")
        }

    def put(self, held: dict[str, Tensor]) -> None:
        """Append what `held` told of others."""
        blocks = held["chosen"].shape[1]
        self._reserve(self.count + blocks)
        for name in ("chosen", "key_sum"):
            getattr(self, name)[:, self.count : self.count + blocks] = held[name]
        self.count += blocks

    def _reserve(self, blocks: int) -> None:
        capacity = self.chosen.shape[1]
        if blocks <= capacity:
            return
        grown = max(blocks, capacity * 2, 64)
        for name in ("chosen", "key_sum"):
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], grown, *old.shape[2:])
            new[:, : self.count] = old[:, : self.count]
            setattr(self, name, new)

    def truncate(self, count: int) -> None:
        """Forget the blocks after the first `count`."""
        self.count = count


def running_sum_scores(prefix: Tensor, keys: Tensor, window_tokens: int) -> Tensor:
    """Scores [H_kv, n] of the first n tokens of a window.

    Args:
        prefix: [H_kv, m, d] float32, m >= n + window_tokens: running sum of the rotated queries
            (summed over the query heads of a KV head) up to and with each token of the window.
        keys: [H_kv, n, d] the tokens' keys, rotated at the same positions.
        window_tokens: l_L, how many following tokens count.
    """
    tokens = keys.shape[1]
    followers = prefix[:, window_tokens : window_tokens + tokens] - prefix[:, :tokens]
    return (followers * keys.float()).sum(dim=-1) / window_tokens
