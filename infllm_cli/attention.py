"""The attention function that transformers calls: un-rotated queries, keys and values come in.

With all position ids zero the rotary tables are cosine = attention scaling and sine = 0, so every
model that rotates before it calls the attention interface hands its queries and keys over
un-rotated. The memory rotates them itself, at positions of its choosing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from infllm_cli.errors import ModelError
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Step

NAME = "infllm"
ARGUMENT = "infllm_call"  # passed through the model's keyword arguments down to each layer

# Keyword arguments that change what attention computes and that we honour; all others that are not
# None must be known to be harmless, so that a new kind of attention is refused, never ignored.
HONOURED = {"sliding_window", "softcap"}
HARMLESS = {
    "position_ids",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "use_cache",
    "cache_position",
    "cache",
    "past_key_values",
    "num_items_in_batch",
    "return_dict",
}


class AttentionCall(Protocol):
    """What stands behind the attention function during one forward pass."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], un-rotated -> out [H, L, d_v]."""
        ...


class MemoryCall:
    """An attention call that every layer answers from its own memory."""

    def __init__(self, memory: ModelMemory, step: Step) -> None:
        self.memory = memory
        self.step = step

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        """Scaling and the extra arguments were looked at once, by the probe."""
        return self.memory.attend(module.layer_idx, q, k, v, self.step)


class MemoriesCall:
    """The same for several memories, each of which takes one of the tokens."""

    def __init__(self, memories: Sequence[ModelMemory], steps: Sequence[Step]) -> None:
        assert all(step.length == 1 for step in steps)
        self.pairs = list(zip(memories, steps, strict=True))

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        """As `MemoryCall`."""
        found = []
        for index, (memory, step) in enumerate(self.pairs):
            own = slice(index, index + 1)
            found.append(memory.attend(module.layer_idx, q[:, own], k[:, own], v[:, own], step))
        return torch.cat(found, dim=1)


def infllm_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Registered with transformers under `NAME`; shapes as its interface has them, [b, h, L, d]."""
    call: AttentionCall | None = kwargs.pop(ARGUMENT, None)
    if call is None:
        raise ModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention, "
            "so the memory cannot be reached from there."
        )
    assert query.shape[0] == 1, "one document at a time"
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} brings an attention mask of its own.")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = call(module, query[0], key[0], value[0], scaling, kwargs)
    return out.transpose(0, 1)[None].contiguous(), None


def register() -> None:
    """Make `NAME` known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, infllm_attention)


def forward(
    model: nn.Module, ids: Tensor, call: AttentionCall, *, want_logits: int
) -> Tensor | None:
    """One pass of ids [L] through a model with our attention -> logits [n, V] float32 of the last.

    Args:
        want_logits: n; 0: None is returned, and the output head is not computed.
    """
    arguments = {
        "input_ids": ids[None],
        "position_ids": torch.zeros(1, ids.shape[0], dtype=torch.long, device=ids.device),
        "use_cache": False,
        ARGUMENT: call,
    }
    if not want_logits:
        model.get_decoder()(**arguments)
        return None
    return model(**arguments, logits_to_keep=want_logits).logits[0, -want_logits:].float()
