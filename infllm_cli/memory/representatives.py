"""A few keys that stand for their block while reading.

Which ones is a rule: see `RepresentativeRule`. The paper's is by score.

The score of token m is how much the next l_L tokens look at it (InfLLM, arXiv 2402.04617):
`r_m = (1 / l_L) * sum_{j=1..l_L} q_{m+j} . k_m`. It is linear in the queries, so the difference of
two running sums of rotated queries gives it and no attention matrix is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.knobs import RepresentativeRule


class Representatives:
    """Of every sealed block, per KV head: the chosen tokens and the sum of their keys.

    Attributes:
        chosen: [H_kv, N_capacity, r] index within the block; -1: a mean, no token.
        key_sum: [H_kv, N_capacity, d] float32. The paper's relevance of a block, summed over the
            step's queries and the block's representatives, is one dot product with this sum.
        each_key: [H_kv, N_capacity, r, d] float32, where a ranking asks for more than their sum.
    """

    def __init__(
        self,
        kv_heads: int,
        per_block: int,
        head_dim: int,
        device: torch.device,
        rule: RepresentativeRule = RepresentativeRule.DOT,
        *,
        keep_each: bool = False,
    ) -> None:
        self.count = 0
        self.rule = rule
        self.per_block = per_block = 1 if rule is RepresentativeRule.MEAN else per_block
        self.chosen = torch.zeros(kv_heads, 0, per_block, dtype=torch.int16, device=device)
        self.key_sum = torch.zeros(kv_heads, 0, head_dim, device=device)
        self.each_key: Tensor | None = None
        if keep_each:
            self.each_key = torch.zeros(kv_heads, 0, per_block, head_dim, device=device)

    @property
    def names(self) -> list[str]:
        """Of the tensors that are held."""
        names = ["chosen", "key_sum", "each_key"]
        return [name for name in names if getattr(self, name) is not None]

    @property
    def used_bytes(self) -> int:
        """Bytes that the representatives of the sealed blocks take."""
        heads = self.chosen.shape[0]
        numbers = self.key_sum.shape[2] * (1 + (self.per_block if self.each_key is not None else 0))
        return heads * (4 * numbers + 2 * self.per_block) * self.count

    def append(self, keys: Tensor, scores: Tensor, block_tokens: int) -> None:
        """Choose for blocks of keys [H_kv, n * B, d] by scores [H_kv, n * B], highest first.

        Rules that do not score disregard the scores.
        """
        kv_heads, tokens, dim = keys.shape
        blocks = tokens // block_tokens
        keys = keys.view(kv_heads, blocks, block_tokens, dim)
        if self.rule is RepresentativeRule.MEAN:
            chosen = torch.full((kv_heads, blocks, 1), -1, device=keys.device)
            found = keys.float().mean(dim=2, keepdim=True)
        else:
            scores = scores.reshape(kv_heads, blocks, block_tokens)
            chosen = self._choose(keys, scores)
            found = keys.gather(2, chosen[..., None].expand(-1, -1, -1, dim))
        self._reserve(self.count + blocks)
        new = slice(self.count, self.count + blocks)
        self.chosen[:, new] = chosen.to(torch.int16)
        self.key_sum[:, new] = found.float().sum(dim=2)
        if self.each_key is not None:
            self.each_key[:, new] = found.float()
        self.count += blocks

    def _choose(self, keys: Tensor, scores: Tensor) -> Tensor:
        """Tokens [H_kv, n, r] of blocks of keys [H_kv, n, B, d] with scores [H_kv, n, B]."""
        if self.rule is RepresentativeRule.STRIDE:
            every = stride(keys.shape[2], self.per_block).to(keys.device)
            return every.expand(*keys.shape[:2], -1)
        if self.rule is RepresentativeRule.EXEMPLAR:
            return exemplars(keys, self.per_block)
        return scores.topk(self.per_block, dim=-1).indices

    def held(self, start: int) -> dict[str, Tensor]:
        """Copies [H_kv, count - start, ...] of the blocks from `start` on, by name."""
        return {name: getattr(self, name)[:, start : self.count].clone() for name in self.names}

    def put(self, held: dict[str, Tensor]) -> None:
        """Append what `held` told of others."""
        blocks = held["chosen"].shape[1]
        self._reserve(self.count + blocks)
        for name in self.names:
            getattr(self, name)[:, self.count : self.count + blocks] = held[name]
        self.count += blocks

    def _reserve(self, blocks: int) -> None:
        capacity = self.chosen.shape[1]
        if blocks <= capacity:
            return
        grown = max(blocks, capacity * 2, 64)
        for name in self.names:
            old = getattr(self, name)
            new = old.new_zeros(old.shape[0], grown, *old.shape[2:])
            new[:, : self.count] = old[:, : self.count]
            setattr(self, name, new)

    def truncate(self, count: int) -> None:
        """Forget the blocks after the first `count`."""
        self.count = count


def stride(block_tokens: int, per_block: int) -> Tensor:
    """Tokens [r] in the middle of r stretches of a block, as equal as they can be."""
    return ((2 * torch.arange(per_block) + 1) * block_tokens) // (2 * per_block)


def exemplars(keys: Tensor, per_block: int) -> Tensor:
    """Tokens [..., r] whose keys cover those of the block [..., B, d]: farthest-point traversal.

    The first is the farthest from the block's mean; each further one is the farthest from those
    that have been chosen (Gonzalez, 1985: within twice the best covering radius).
    """
    keys = keys.float()
    distance = (keys - keys.mean(dim=-2, keepdim=True)).square().sum(dim=-1)  # [..., B]
    chosen: list[Tensor] = []
    for _ in range(per_block):
        found = distance.argmax(dim=-1, keepdim=True)  # [..., 1]
        chosen.append(found)
        index = found[..., None].expand(*found.shape, keys.shape[-1])
        to_found = (keys - keys.gather(-2, index)).square().sum(dim=-1)
        distance = to_found if len(chosen) == 1 else torch.minimum(distance, to_found)
        # Equal keys have no distance left: none is chosen twice.
        distance = distance.scatter(-1, torch.cat(chosen, dim=-1), -1.0)
    return torch.cat(chosen, dim=-1)
