"""Tiny models with random weights, one per architecture, built in the test process."""

from __future__ import annotations

import torch
from torch import nn

from infllm_cli import attention

COMMON = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]

# model_type -> what differs from COMMON
ARCHITECTURES: dict[str, dict] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral3": {
        "head_dim": 16,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 24,
            "max_position_embeddings": 96,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 1.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 2.5, 3.0, 4.0],
            "original_max_position_embeddings": 32,
        },
        "original_max_position_embeddings": 32,
    },
    "gemma2": {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 12, "layer_types": SLIDING},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 1.5},
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "starcoder2": {"sliding_window": None},
    "seed_oss": {"head_dim": 16},
    "ernie4_5": {"head_dim": 16},
}
# The same architectures in other shapes.
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama ungrouped": ("llama", {"num_key_value_heads": 6}),
    "llama yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral sliding": ("mistral", {"sliding_window": 160}),
    "qwen2 sliding": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    "phi3 partial": (
        "phi3",
        {
            "head_dim": 16,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}


def build(kind: str, **changes: object) -> nn.Module:
    """A tiny float32 model of architecture (or variant) `kind`, its attention ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    model_type, variant = VARIANTS.get(kind, (kind, {}))
    settings = {**COMMON, **ARCHITECTURES[model_type], **variant, **changes}
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Default initial weights are so small that attention hardly matters.
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
        # Logits of about +-1, so that rounding stays far below what a mistake would change.
        model.get_output_embeddings().weight *= 0.3
    return model.eval().requires_grad_(False)
