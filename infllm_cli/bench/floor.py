"""What a step needs at least: its operations and bytes over what this machine does of them.

Two rates are measured, not looked up: a matrix product of the size of a chunk, and a copy that is
larger than the caches. A step that computes with every weight once is bound by the second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory

COPY_BYTES = 2**28
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Rates:
    """Of this machine, in the model's dtype.

    Attributes:
        product: operations per second of a matrix product (a multiply-add is two).
        moved: bytes per second, read and written, of a copy.
    """

    product: float
    moved: float


@dataclass(frozen=True, slots=True)
class Need:
    """Of one step.

    Attributes:
        operations: of its matrix products (a multiply-add is two).
        read: bytes of weights, stored keys, and loaded keys and values that it must read.
    """

    operations: float
    read: float

    def seconds(self, rates: Rates) -> float:
        """At least, where products and reading overlap perfectly."""
        return max(self.operations / rates.product, self.read / rates.moved)


def measure_rates(model: nn.Module, chunk_tokens: int) -> Rates:
    """Measure the two rates."""
    weight = model.get_input_embeddings().weight
    wide = max((m.weight for m in linears(model)), key=lambda w: w.numel() if w.ndim == 2 else 0)
    x = torch.randn(chunk_tokens, wide.shape[1]).to(weight)
    wide = wide[: 8 * wide.shape[1]].contiguous()
    product = _best(lambda: torch.mm(x, wide.T), weight.device)
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=weight.device)
    target = torch.zeros_like(source)
    copy = _best(lambda: target.copy_(source), weight.device)
    return Rates(2 * x.shape[0] * wide.numel() / product, 2 * COPY_BYTES / copy)


def linears(model: nn.Module) -> list[nn.Linear]:
    """The matrices that every token meets."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def _best(run: Callable[[], object], device: torch.device) -> float:
    def timed() -> float:
        began = now(device)
        run()
        return now(device) - began

    run()
    return min(timed() for _ in range(REPEATS))


def now(device: torch.device) -> float:
    """Seconds of a clock, when all that was begun on the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def need_of(model: nn.Module, state: ModelMemory, tokens: int, *, answering: bool) -> Need:
    """Of a step of so many tokens behind what `state` holds.

    Args:
        model: as the library loads it.
        answering: with exact lookup and the output head; otherwise a chunk that is being read.
    """
    head = model.get_output_embeddings()
    weights = [m.weight for m in linears(model) if answering or m is not head]
    if answering and head is not None and all(head is not m for m in linears(model)):
        weights.append(head.weight)
    # The head is computed for the last token only.
    per_token = sum(w.numel() for w in weights if head is None or w is not head.weight)
    operations = 2.0 * per_token * tokens
    if answering and head is not None:
        operations += 2.0 * head.weight.numel()
    read = float(sum(w.nbytes for w in weights))
    for layer in state.layers:
        g = layer.geometry
        keys = len(layer.window) + tokens
        if isinstance(layer, LayerMemory):
            config, arena = layer.config, layer.arena
            loaded = config.answer_blocks if answering else config.read_blocks
            keys += config.sink_tokens + min(loaded, arena.count) * config.block_tokens
            if answering:
                operations += (
                    2.0 * g.heads * tokens * arena.count * config.block_tokens * g.head_dim
                )
                read += sum(part.keys.nbytes for part in arena.parts())
        operations += 2.0 * g.heads * tokens * keys * (g.head_dim + g.value_dim)
        read += g.kv_heads * keys * (g.head_dim + g.value_dim) * g.dtype.itemsize
    return Need(operations, read)
