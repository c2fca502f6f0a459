"""One softmax over keys that are seen from two different places.

A rotary score depends on the distance only, so a query that is to stand at one distance from some
keys and at another from the rest needs two rotations. Both go side by side into one query of twice
the size, and each key fills its own half: `[q_far, q_near] . [k_far, 0]` and `. [0, k_near]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infllm_cli.memory.softmax import attend, attend_mass


class Keys(NamedTuple):
    """Keys and values [H_kv, n, d], rotated already."""

    keys: Tensor
    values: Tensor


def attend_two_distances(
    far_q: Tensor,
    near_q: Tensor,
    far: Keys,
    near: Keys,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None,
    *,
    want_mass: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of queries [H, L, d], rotated for either group, over `far` and then `near`.

    Args:
        mask: additive [L, n_far + n_near], or None.

    Returns:
        out [H, L, d_v], and with `want_mass` the mass [H, n_far + n_near] that each key draws.
    """
    kv_heads, n_far, dim = far.keys.shape
    n_near = near.keys.shape[1]
    keys = near.keys.new_zeros(kv_heads, n_far + n_near, 2 * dim)
    keys[:, :n_far, :dim] = far.keys
    keys[:, n_far:, dim:] = near.keys
    values = torch.cat([far.values, near.values], dim=1)
    q = torch.cat([far_q, near_q], dim=-1)
    if want_mass:
        return attend_mass(q, keys, values, mask, scaling, softcap)
    value_dim = values.shape[2]
    # The quick kernels want values as wide as keys: measured, half the time of narrower ones.
    values = F.pad(values, (0, 2 * dim - value_dim))
    return attend(q, keys, values, mask, scaling, softcap)[..., :value_dim], None
