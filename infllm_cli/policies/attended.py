"""Where a step looked, for policies that keep their keys in other places than the tiers."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.step import Step


def note_mass(step: Step, index: int, positions: Tensor, per_key: Tensor) -> None:
    """Add attention mass per key [...] at absolute positions [...] to what a step has seen.

    Args:
        index: of the layer.
    """
    assert step.mass is not None
    mass = step.mass
    if step.by_layer is not None:
        mass = step.by_layer[index] = torch.zeros_like(step.mass)
    mass.index_add_(0, positions.flatten().to(mass.device), per_key.flatten().to(mass.device))
    if step.by_layer is not None:
        step.mass += mass
