"""The gates of Infini-attention for one model: as they were fitted, or none.

A gate is a number per layer and head, the weight of the memory against the segment's own attention;
`infllm fit-gates` finds them. They lie in the cache folder, addressed by what the weights are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infllm_cli.errors import ModelError
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import InfiniGates, Policy
from infllm_cli.models.loading import LoadedModel
from infllm_cli.models.weights import weights_sha256

BETA = "beta"  # the tensor's name: [layers, H] float32, a gate is its sigmoid
KEY_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Gates:
    """What a reader's layers are built with.

    Attributes:
        weights: [layers, H] float32, or None: memories are not read.
        told: what the user should know; empty where the policy has none.
        path: of the file that they come from.
    """

    weights: Tensor | None = None
    told: str = ""
    path: Path | None = None

    def as_dict(self) -> dict[str, Any] | None:
        """For `--json`."""
        if not self.told:
            return None
        mean = None if self.weights is None else round(float(self.weights.mean()), 4)
        return {"mean": mean, "file": None if self.path is None else str(self.path)}


def gates_path(loaded: LoadedModel, cache_dir: Path) -> Path | None:
    """Where the gates of a model lie, whether they are there or not; None: it is of no files."""
    if loaded.folder is None:
        return None
    digest = weights_sha256(loaded.folder, cache_dir, lambda stage, done, total: None)
    return cache_dir / "gates" / f"{digest[:KEY_DIGITS]}.safetensors"


def choose_gates(loaded: LoadedModel, config: MemoryConfig) -> Gates:
    """The gates that `config` asks for.

    Raises:
        ModelError: a file of gates that cannot be used.
    """
    if config.policy is not Policy.INFINI:
        return Gates()
    shape = (len(loaded.layers), loaded.layers[0].heads)
    if config.infini_gates is InfiniGates.HALF:
        return Gates(
            torch.full(shape, 0.5), "the gates of infini are at 0.5, as before any fitting."
        )
    if config.infini_gates is InfiniGates.OFF:
        return Gates(None, "the gates of infini are off: segments know nothing of each other.")
    path = gates_path(loaded, loaded.cache_dir) if loaded.cache_dir is not None else None
    if path is None or not path.exists():
        return Gates(
            None,
            f"no gates have been fitted for {loaded.name}, so the memory of infini is off: run "
            "`infllm fit-gates DOCUMENT`.",
        )
    beta, facts = load_gates(path, shape)
    told = f"the gates of infini are those fitted on {facts.get('documents', 'a document')}."
    if facts.get("segment") not in (None, str(config.infini_segment_tokens)):
        told += (
            f" They were fitted for segments of {facts['segment']} tokens; these are of "
            f"{config.infini_segment_tokens}."
        )
    return Gates(torch.sigmoid(beta), told, path)


def load_gates(path: Path, shape: tuple[int, int]) -> tuple[Tensor, dict[str, str]]:
    """Beta [layers, H] and what was noted with it.

    Raises:
        ModelError: it cannot be read, or is of another model.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            beta = file.get_tensor(BETA).float()
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read ({error}); run `infllm fit-gates` again."
        ) from None
    if tuple(beta.shape) != shape or not bool(torch.isfinite(beta).all()):
        raise ModelError(
            f"{path} holds gates of shape {list(beta.shape)}, but the model has {list(shape)}; run "
            "`infllm fit-gates` again."
        )
    return beta, facts


def save_gates(path: Path, beta: Tensor, facts: dict[str, Any]) -> None:
    """Write beta [layers, H] in one stroke.

    Raises:
        OSError: there is no room, or no right.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")
    told = {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}
    try:
        save_file({BETA: beta.detach().float().contiguous().cpu()}, partial, metadata=told)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
