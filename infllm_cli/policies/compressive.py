"""The compressive memory of Infini-attention (arXiv 2404.07143, section 2.1), as equations.

Per KV head a matrix M [d, d_v] and a normalizer z [d], both float32; `sigma(x) = elu(x) + 1`.
All functions can be differentiated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infllm_cli.memory.knobs import InfiniUpdate

EPSILON = 1e-6


class Memory(NamedTuple):
    """M [H_kv, d, d_v] and z [H_kv, d] float32; of `tokens` tokens."""

    matrix: Tensor
    normalizer: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, kv_heads: int, head_dim: int, value_dim: int, device: torch.device) -> Memory:
        """Of nothing."""
        return cls(
            torch.zeros(kv_heads, head_dim, value_dim, device=device),
            torch.zeros(kv_heads, head_dim, device=device),
        )

    def plus(self, other: Memory) -> Memory:
        """Both together."""
        return Memory(
            self.matrix + other.matrix,
            self.normalizer + other.normalizer,
            self.tokens + other.tokens,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.matrix.nbytes + self.normalizer.nbytes


def sigma(x: Tensor) -> Tensor:
    """`elu(x) + 1`, float32: positive, so that a normalizer never vanishes."""
    return F.elu(x.float()) + 1


def retrieve(q: Tensor, memory: Memory) -> Tensor:
    """A_mem [H, L, d_v] of un-rotated q [H, L, d]: `sigma(Q) M / (sigma(Q) z)`, equation 3."""
    kv_heads = memory.matrix.shape[0]
    features = sigma(q).reshape(kv_heads, -1, q.shape[-1])  # [H_kv, G * L, d]
    read = _read(features, memory)
    return read.view(q.shape[0], q.shape[1], -1)


def _read(features: Tensor, memory: Memory) -> Tensor:
    above = torch.matmul(features, memory.matrix)
    below = torch.matmul(features, memory.normalizer[..., None])
    return above / (below + EPSILON)


def written(k: Tensor, v: Tensor, memory: Memory, update: InfiniUpdate) -> Memory:
    """What un-rotated keys and values [H_kv, L, d] add to `memory`, equations 4 and 5.

    Of one segment the parts may be written one after the other, all against the memory of the
    segments before it: what they add is a sum over tokens.
    """
    features, values = sigma(k), v.float()
    if update is InfiniUpdate.DELTA:
        values = values - _read(features, memory)
    return Memory(torch.matmul(features.mT, values), features.sum(dim=1), k.shape[1])


def mix(local: Tensor, read: Tensor, gates: Tensor) -> Tensor:
    """`g * A_mem + (1 - g) * A_dot` [H, L, d_v], g = sigmoid(beta) [H] per head: equation 6."""
    g = gates[:, None, None]
    return (g * read + (1 - g) * local.float()).to(local.dtype)
