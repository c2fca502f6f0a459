"""Where a step looked: attention mass by absolute position."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.step import Step


def note_mass(step: Step, index: int, positions: Tensor, per_key: Tensor) -> None:
    """Add attention mass per key [...] at absolute positions [...] to what a step has seen.

    Args:
        index: of the layer.
    """
    mass = mass_of(step, index)
    mass.index_add_(0, positions.flatten().to(mass.device), per_key.flatten().to(mass.device))
    add_mass(step, mass)


def note_tiers(
    step: Step,
    index: int,
    per_key: Tensor,
    blocks: Tensor | None,
    block_tokens: int,
    lead: int,
    start: int,
) -> None:
    """The same of a context of sinks, blocks [H_kv, n] and window: mass per key [H_kv, T].

    Args:
        index: of the layer.
        lead: tokens of sinks and blocks.
        start: absolute position of the window's first token.
    """
    mass = mass_of(step, index)
    per_key = per_key.to(mass.device)
    sinks = lead - (0 if blocks is None else blocks.shape[1] * block_tokens)
    mass[start : start + per_key.shape[1] - lead] += per_key[:, lead:].sum(dim=0)
    mass[:sinks] += per_key[:, :sinks].sum(dim=0)
    if blocks is not None:
        positions = sinks + blocks[..., None] * block_tokens + torch.arange(block_tokens)
        mass.index_add_(0, positions.flatten(), per_key[:, sinks:lead].flatten())
    add_mass(step, mass)


def mass_of(step: Step, index: int) -> Tensor:
    """What a layer's mass is added to: the step's, or one of its own where layers are watched."""
    assert step.mass is not None
    if step.by_layer is None:
        return step.mass
    step.by_layer[index] = torch.zeros_like(step.mass)
    return step.by_layer[index]


def add_mass(step: Step, mass: Tensor) -> None:
    """A layer's mass, where it is one of its own, joins the step's."""
    if step.by_layer is not None:
        assert step.mass is not None
        step.mass += mass
