"""Is a model's answer through our attention the one that its own attention gives?"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor, nn

from infllm_cli import __version__
from infllm_cli.attention import NAME, MemoryCall, forward
from infllm_cli.errors import ModelError
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase

TOKENS = 48
CHUNK = 20  # several chunks, the last one shorter: window, causal tail and positions all take part

# Largest root mean square difference of the logits, relative to their spread.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.08}
# Or as many times the difference between the library's own two attention functions: keys with a
# large bias (Qwen2) lose so much in half precision that these differ by 0.14 themselves.
OWN_DIFFERENCE = 1.25


def relative_difference(ours: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over the standard deviation of the reference."""
    difference = (ours - reference).float().square().mean().sqrt()
    return float(difference / reference.float().std().clamp_min(1e-9))


def self_test(model: nn.Module, layers: list[LayerGeometry]) -> float:
    """The relative difference of logits after `TOKENS` tokens, ours against the library's own.

    Raises:
        ModelError: the difference is larger than rounding explains.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (TOKENS,), generator=generator)
    ids = ids.to(model.get_input_embeddings().weight.device)
    with torch.inference_mode():
        reference = _own_logits(model, ids, "eager")
        config = MemoryConfig(chunk_tokens=CHUNK)
        memory = ModelMemory(layers, config, trained_length=TOKENS, whole_tokens=TOKENS)
        logits = None
        for piece in ids.split(CHUNK):
            step = memory.step(Phase.READ, len(piece))
            logits = forward(model, piece, MemoryCall(memory, step), want_logits=1)
            memory.finish(step)
    assert logits is not None
    difference = relative_difference(logits[0], reference.float())
    tolerance = TOLERANCE.get(reference.dtype, 1e-4)
    if not difference <= tolerance and reference.dtype is not torch.float32:
        # Not every model has this one; a ValueError of the library says so.
        with contextlib.suppress(ValueError):
            own = relative_difference(_own_logits(model, ids, "sdpa"), reference)
            tolerance = max(tolerance, OWN_DIFFERENCE * own)
    if not difference <= tolerance:  # also catches NaN
        raise ModelError(
            f"{type(model).__name__} cannot be read: its logits through the memory differ from "
            f"the library's own by {difference:.2g} of their spread."
        )
    return difference


@torch.inference_mode()
def _own_logits(model: nn.Module, ids: Tensor, attention: str) -> Tensor:
    """Logits [V] of the last of ids [n] through one of the library's attention functions."""
    try:
        model.set_attn_implementation(attention)
        positions = torch.arange(len(ids), device=ids.device)[None]
        return model(ids[None], position_ids=positions, use_cache=False).logits[0, -1]
    finally:
        model.set_attn_implementation(NAME)


def fingerprint(model: nn.Module) -> str:
    """What a self-test's result holds for: geometry, versions, dtype and kind of device."""
    import transformers

    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path"):
        config.pop(name, None)
    weight = model.get_input_embeddings().weight
    facts = [config, transformers.__version__, torch.__version__, __version__]
    facts += [str(weight.dtype), weight.device.type]
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def vouch(model: nn.Module, layers: list[LayerGeometry], memo: Path | None) -> None:
    """Run the self-test unless `memo` (a JSON file) remembers that this kind of model passed it.

    Raises:
        ModelError: the model did not pass.
    """
    key = fingerprint(model)
    passed: dict[str, float] = {}
    if memo is not None:
        # A broken memo, or one that cannot be read or written, costs one test.
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(memo.read_text())
            passed = found if isinstance(found, dict) else {}
    if key in passed:
        return
    passed[key] = self_test(model, layers)
    if memo is not None:
        with contextlib.suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True)
            partial = memo.with_suffix(".tmp")
            partial.write_text(json.dumps(passed, indent=1))
            partial.replace(memo)
