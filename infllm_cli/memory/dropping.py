"""Blocks that are given up where neither RAM nor disk hold them, if the user allows it.

A block goes from all layers at once: what is left of the document is then the same everywhere. Its
place stays, so that positions and the blocks' numbers are as before.
"""

from __future__ import annotations

import torch

from infllm_cli.memory.model_memory import ModelMemory


def drop_least_used(memory: ModelMemory, most: int) -> int:
    """Give up to `most` blocks up, those that reading has loaded least, the oldest first.

    Blocks on disk, of the newest segment and of the tail stay: the last have had no time to be
    used.

    Returns:
        How many were dropped; 0: there is none to drop.
    """
    layers = memory.tiered
    arena = layers[0].arena
    candidates = arena.droppable()
    if not candidates:
        return 0
    uses = sum(layer.arena.uses(candidates) for layer in layers)
    order = torch.argsort(uses, stable=True)[:most]
    chosen = [candidates[index] for index in order.tolist()]
    for layer in layers:
        layer.arena.drop(chosen)
    return len(chosen)
