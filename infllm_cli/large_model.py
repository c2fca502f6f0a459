"""A large model with random weights reads a long document: what `kernels.check` times on a GPU.

What the weights are does not matter for speed and memory, so nothing has to be fetched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infllm_cli import attention
from infllm_cli.attention import MemoryCall, forward
from infllm_cli.kernels.floors import SHARE_OF_OWN_SPEED
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase
from infllm_cli.models.probe import probe_layers

QUESTION, ANSWER = 20, 32  # tokens
OWN_RUNS = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama; by default of Llama-3.1-8B."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    trained_length: int = 131072
    tokens: int = 131072  # that are read


def build(shape: Shape, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model, its attention ours."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attention.register()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.trained_length,
        attn_implementation=attention.NAME,
    )
    torch.manual_seed(0)
    with torch.device(device):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(default)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def measure(
    device: torch.device,
    shape: Shape = Shape(),
    dtype: torch.dtype = torch.bfloat16,
    options: DeviceOptions | None = None,
    **sizes: Any,
) -> dict[str, Any]:
    """Read, ask and answer; figures by name.

    Args:
        device: where the model is.
        shape: of the model, and how much it reads.
        dtype: of the weights.
        options: how memories use the device.
        sizes: fields of `MemoryConfig`.
    """
    model = build(shape, device, dtype)
    layers = probe_layers(model)
    config = MemoryConfig.for_model(shape.trained_length, **sizes)
    ids = torch.randint(0, shape.vocabulary, (shape.tokens,), device=device)
    own = _own_speed(model, layers, config, ids[: config.chunk_tokens])
    memory = ModelMemory(layers, config, trained_length=shape.trained_length, device=options)
    held = []
    began = _now(device)
    for piece in ids.split(config.chunk_tokens):
        _pass(model, memory, Phase.READ, piece)
        held.append(_held(memory, device))
    speed = shape.tokens / (_now(device) - began)
    memory.freeze()
    with memory.question():
        began = _now(device)
        _pass(model, memory, Phase.ASK, ids[:QUESTION])
        asked = _now(device) - began
        began = _now(device)
        for index in range(ANSWER):
            _pass(model, memory, Phase.ANSWER, ids[index : index + 1])
        answered = (_now(device) - began) / ANSWER
    settled = held[len(held) // 2 :]
    return {
        "tokens": shape.tokens,
        "tokens_per_second": round(speed, 1),
        "own_tokens_per_second": round(own, 1),
        "share_of_own_speed": round(speed / own, 3),
        "share_wanted": SHARE_OF_OWN_SPEED,
        "device_bytes": max(held),
        "device_bytes_grown_in_second_half": max(settled) - min(settled),
        "question_seconds": round(asked, 4),
        "answer_token_seconds": round(answered, 4),
        **(memory.device_cache or {}),
    }


def _own_speed(
    model: nn.Module, layers: list[LayerGeometry], config: MemoryConfig, ids: Tensor
) -> float:
    """Tokens per second of a chunk that has nothing before it, the fastest of some."""
    best = float("inf")
    for _ in range(OWN_RUNS):
        memory = ModelMemory(layers, config, trained_length=len(ids), whole_tokens=len(ids))
        began = _now(ids.device)
        _pass(model, memory, Phase.READ, ids)
        best = min(best, _now(ids.device) - began)
    return len(ids) / best


def _pass(model: nn.Module, memory: ModelMemory, phase: Phase, ids: Tensor) -> None:
    step = memory.step(phase, len(ids), keep_from=None)
    forward(model, ids, MemoryCall(memory, step), want_logits=int(phase is not Phase.READ))
    memory.finish(step)


def _held(memory: ModelMemory, device: torch.device) -> int:
    """Bytes on the device, representatives left out: they grow with the document."""
    grown = sum(layer.representatives.used_bytes for layer in memory.tiered)
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) - grown
    return memory.device_bytes - grown


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
