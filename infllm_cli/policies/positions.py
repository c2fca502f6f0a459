"""Positions that are no plain run: capped ones, and which of them see each other."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.rotary import Rotary, Table
from infllm_cli.memory.step import Step


def token_range(start: int, end: int) -> Tensor:
    """Absolute positions [end - start] int64."""
    return torch.arange(start, end)


def capped_table(step: Step, rotary: Rotary, cap: int) -> Table:
    """The table of the step's positions, none of them beyond `cap`."""
    below = max(0, min(step.end, cap) - step.start)
    if below == step.length:
        return step.table(rotary, step.start, step.length)
    at_cap = step.table(rotary, cap, 1)
    rest = [x.expand(step.length - below, -1) for x in at_cap]
    if not below:
        return Table(*rest)
    first = step.table(rotary, step.start, below)
    return Table(*(torch.cat(pair) for pair in zip(first, rest, strict=True)))


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """A mask to add to scores: 0 where visible [L, T], else minus infinity."""
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible.to(like.device), float("-inf"))


def capped_scale(step: Step, rotary: Rotary, cap: int) -> Tensor | None:
    """Factors [L, 1] of the step's queries at positions none of which is beyond `cap`, or None."""
    if rotary.scale_beta == 0.0:
        return None
    below = max(0, min(step.end, cap) - step.start)
    parts = []
    if below:
        first = rotary.query_scale(step.start, below)
        parts.append(torch.ones(below, 1) if first is None else first)
    if below < step.length:
        last = rotary.query_scale(cap, 1)
        last = torch.ones(1, 1) if last is None else last
        parts.append(last.expand(step.length - below, 1))
    return torch.cat([part.to(rotary.inv_freq.device) for part in parts])
