"""What a model's attention layers are made of, found by looking and not by knowing names.

Two passes over two tokens whose attention returns zeros: hidden states then do not depend on
positions, so each layer's keys with and without a position show whether and how it rotates them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from infllm_cli.attention import ARGUMENT, HARMLESS, HONOURED
from infllm_cli.errors import ModelError
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.rotary import NO_ROTATION, Rotary

PROBE_POSITION = 41
# Largest relative difference between a layer's rotated keys and ours, in any dtype. A wrong
# frequency, pairing or share of the head is off by tenths.
SAME_ROTATION = 0.05


@dataclass(slots=True)
class _Seen:
    module: nn.Module
    heads: int
    keys: Tensor  # [H_kv, 2, d]
    value_dim: int
    scaling: float
    extra: dict[str, Any]


class _Recorder:
    """An attention call that remembers what came in and answers zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, _Seen] = {}

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        self.seen[module.layer_idx] = _Seen(
            module, q.shape[0], k.clone(), v.shape[-1], scaling, dict(extra)
        )
        return q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])


def probe_layers(model: nn.Module, context_length: int | None = None) -> list[LayerGeometry]:
    """The geometry of every layer of a model whose attention is ours.

    Args:
        model: a transformers causal language model with `attn_implementation` ours.
        context_length: tokens that a context may hold; models whose frequencies depend on it
            (LongRoPE, dynamic NTK) get those that the library would use at this length.

    Raises:
        ModelError: an attention that the memory cannot stand in for, naming the reason.
    """
    name = type(model).__name__
    position = PROBE_POSITION if context_length is None else max(context_length - 1, 1)
    still, frequencies = _record(model, 0)
    moved, frequencies = _record(model, position)
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(still) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(still))
        raise ModelError(
            f"{name} cannot be read: its layers {_runs(missing)} have no ordinary attention "
            "(state-space, hybrid or linear attention)."
        )
    geometries = []
    for index in range(layers):
        a, b = still[index], moved[index]
        _check_extra(name, a.extra)
        rotary = _find_rotary(a.keys, b.keys, position, frequencies)
        if rotary is None:
            raise ModelError(
                f"{name} cannot be read: layer {index} encodes positions in its own way."
            )
        rotary = _with_query_scale(rotary, model.config.get_text_config())
        sliding = a.extra.get("sliding_window")
        geometries.append(
            LayerGeometry(
                index=index,
                heads=a.heads,
                kv_heads=a.keys.shape[0],
                head_dim=a.keys.shape[-1],
                value_dim=a.value_dim,
                scaling=float(a.scaling),
                softcap=a.extra.get("softcap"),
                sliding_window=int(sliding) if sliding else None,
                rotary=rotary,
                dtype=a.keys.dtype,
                device=a.keys.device,
            )
        )
    if all(g.rotary is NO_ROTATION for g in geometries):
        raise ModelError(f"{name} cannot be read: it has no rotary positions.")
    return _share_rotaries(geometries)


def depends_on_length(config: Any) -> bool:
    """Whether a model's frequencies change with the length of the context."""
    text = json.dumps(getattr(config, "rope_parameters", None) or {}, default=str)
    return "longrope" in text or "dynamic" in text


def _record(model: nn.Module, position: int) -> tuple[dict[int, _Seen], list[Tensor]]:
    device = model.get_input_embeddings().weight.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    recorder = _Recorder()
    with torch.inference_mode():
        model.get_decoder()(
            input_ids=torch.tensor([[vocabulary // 3, vocabulary // 2]], device=device),
            position_ids=torch.tensor([[0, position]], device=device),
            use_cache=False,
            **{ARGUMENT: recorder},
        )
    # Read before the next pass: some models rewrite their frequencies at every pass.
    frequencies = [
        buffer.clone().float()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    ]
    return recorder.seen, frequencies


def _check_extra(name: str, extra: dict[str, Any]) -> None:
    unknown = [
        key
        for key, value in extra.items()
        if value is not None and value is not False and key not in HONOURED | HARMLESS
    ]
    if unknown:
        raise ModelError(
            f"{name} cannot be read: its attention uses {', '.join(sorted(unknown))}, "
            "which the memory does not compute."
        )


def _find_rotary(
    still: Tensor, moved: Tensor, position: int, frequencies: list[Tensor]
) -> Rotary | None:
    """The rotation that turns keys at position 0 into those at `position`, or None."""
    before, after = still[:, 1:].float(), moved[:, 1:].float()
    scale = after.norm().clamp_min(1e-9)
    best, best_error = None, SAME_ROTATION
    if torch.equal(before, after):
        return NO_ROTATION
    for inv_freq in frequencies:
        if 2 * inv_freq.shape[0] > before.shape[-1]:
            continue
        for interleaved in (False, True):
            rotary = Rotary(inv_freq.to(before.device), interleaved)
            turned = rotary.rotate(before, rotary.table(position, 1))
            error = float((turned - after).norm() / scale)
            if error < best_error:
                best, best_error = rotary, error
    return best


def _with_query_scale(rotary: Rotary, config: Any) -> Rotary:
    parameters = getattr(config, "rope_parameters", None) or {}
    beta = parameters.get("llama_4_scaling_beta")
    if not beta:
        return rotary
    length = int(parameters["original_max_position_embeddings"])
    return Rotary(rotary.inv_freq, rotary.interleaved, float(beta), length)


def _share_rotaries(layers: list[LayerGeometry]) -> list[LayerGeometry]:
    """Let equal rotations be one object: tables are computed once per object and step."""
    kinds: list[Rotary] = []
    shared = []
    for layer in layers:
        for kind in kinds:
            if (
                kind.inv_freq.device
                == layer.rotary.inv_freq.device  # of several GPUs each has its own
                and kind.interleaved == layer.rotary.interleaved
                and kind.scale_beta == layer.rotary.scale_beta
                and torch.equal(kind.inv_freq, layer.rotary.inv_freq)
            ):
                shared.append(replace(layer, rotary=kind))
                break
        else:
            kinds.append(layer.rotary)
            shared.append(layer)
    return shared


def _runs(numbers: list[int]) -> str:
    """7 numbers and more are cut short."""
    head = ", ".join(map(str, numbers[:6]))
    return head if len(numbers) <= 6 else f"{head}, ... ({len(numbers)} in all)"
