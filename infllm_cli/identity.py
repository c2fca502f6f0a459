"""When are two memories the same? What decides how a document is read, and nothing else.

The question, the answer's length and the temperature do not; a byte of the document, a weight or a
size of the memory does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from infllm_cli.memory.config import MemoryConfig
from infllm_cli.models.loading import LoadedModel
from infllm_cli.models.selftest import fingerprint
from infllm_cli.models.weights import weights_sha256
from infllm_cli.shelf import FORMAT

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

KEY_DIGITS = 32
# What does not change what a model computes, or is known otherwise.
_OF_NO_ACCOUNT = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
}
# Decides how the memory is asked, not what it holds.
ASKING = frozenset(
    {"answer_blocks", "answer_lookup", "scan_every", "device_cache_blocks", "device_cache_policy"}
)
# Of policies whose memories are not saved.
_OF_OTHERS = frozenset({"infini_segment_tokens", "infini_update", "infini_gates"})
# Came later: as long as they are what they always were, a memory from before is the same.
_KNOBS = frozenset({"policy", "representative_rule", "relevance", "sharing", "positions"})


def key_facts(
    reader: Reader, memory: Memory, cache_dir: Path, report: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """What a saved memory is addressed by, as plain values.

    Raises:
        OSError: the weights cannot be read.
    """
    document, loaded, state = memory.document, reader.loaded, memory.state
    assert state.config.policy.has_blocks, "nothing else is saved"
    usual = MemoryConfig().as_dict()
    config = {
        name: value
        for name, value in state.config.as_dict().items()
        if name not in ASKING | _OF_OTHERS and not (name in _KNOBS and value == usual[name])
    }
    return {
        "format": FORMAT,
        "document": [document.sha256, *(part.sha256 for part in document.parts)],
        # Of the tokens as read: whatever tokenizer, template and encoding gave, it is in here.
        "prefix": prefix_of(reader),
        "ids": _sha256(memory.tokens.ids.astype("<i4").tobytes()),
        "spans": _sha256(memory.tokens.spans.astype("<i8").tobytes()),
        "weights": weights_of(loaded, cache_dir, report),
        "model": fingerprint(loaded.model),  # geometry, dtype, kind of device, versions
        "layers": layers_of(memory),
        "whole": memory.whole,
        "config": config,
    }


def key_of(facts: dict[str, Any]) -> str:
    """The name of the memory's folder."""
    return _sha256(json.dumps(facts, sort_keys=True).encode())[:KEY_DIGITS]


def prefix_of(reader: Reader) -> str:
    """A digest of the tokens before every document."""
    return _sha256(reader.prompt.prefix.astype("<i4").tobytes())


def config_of(loaded: LoadedModel) -> dict[str, Any]:
    """The model's configuration as plain values, but for names and versions."""
    config = loaded.model.config.to_dict()
    told = json.loads(json.dumps(config, default=str))
    return {name: value for name, value in told.items() if name not in _OF_NO_ACCOUNT}


def layers_of(memory: Memory) -> list[dict[str, Any]]:
    """The geometry of each layer, as plain values."""
    return [_layer(layer.geometry) for layer in memory.state.layers]


def weights_of(
    loaded: LoadedModel, cache_dir: Path, report: Callable[[str, int, int], None]
) -> str:
    """A digest of the weights' bytes.

    Raises:
        OSError: they cannot be read.
    """
    if loaded.folder is not None:
        return weights_sha256(loaded.folder, cache_dir, report)
    digest = hashlib.sha256()
    for name, tensor in sorted(loaded.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _layer(geometry: Any) -> dict[str, Any]:
    facts = {
        field.name: getattr(geometry, field.name)
        for field in fields(geometry)
        if field.name not in ("rotary", "dtype", "device")
    }
    rotary = geometry.rotary
    facts["rotary"] = [
        _sha256(rotary.inv_freq.detach().double().cpu().numpy().tobytes()),
        rotary.interleaved,
        rotary.scale_beta,
        rotary.scale_length,
    ]
    facts["dtype"] = str(geometry.dtype)
    return facts


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
