"""Which layer a policy without blocks is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Policy
from infllm_cli.memory.layer import Layer, LayerGeometry
from infllm_cli.policies.dense import DenseLayer
from infllm_cli.policies.h2o import H2OLayer
from infllm_cli.policies.infini import InfiniLayer
from infllm_cli.policies.lm_infinite import LMInfiniteLayer
from infllm_cli.policies.streaming_llm import StreamingLLMLayer


def build_layer(
    geometry: LayerGeometry, config: MemoryConfig, trained_length: int, gates: Tensor | None
) -> Layer:
    """An empty layer of `config.policy`, one that keeps no blocks.

    Args:
        gates: [H], of Infini-attention; None: its memory is not read.
    """
    policy = config.policy
    if policy is Policy.DENSE:
        return DenseLayer(geometry, config.chunk_tokens)
    if policy is Policy.STREAMING_LLM:
        return StreamingLLMLayer(geometry, config)
    if policy is Policy.LM_INFINITE:
        return LMInfiniteLayer(geometry, config, trained_length)
    if policy is Policy.H2O:
        return H2OLayer(geometry, config)
    assert policy is Policy.INFINI
    gates = torch.zeros(geometry.heads) if gates is None else gates
    return InfiniLayer(geometry, config, gates, trained_length)
