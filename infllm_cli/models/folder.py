"""Is a folder on disk a whole model that `from_pretrained` can load, and what does it hold?

Reads only; neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from infllm_cli.errors import ModelError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
LFS_POINTER = b"version https://git-lfs"


def check_folder(folder: Path) -> None:
    """Find what is missing or broken in a model's folder before anything is loaded.

    Raises ModelError that names the file and the next step.
    """
    try:
        _check_config(folder)
        _check_tokenizer(folder)
        for shard in _shards(folder):
            if not shard.is_file():
                raise ModelError(
                    f"{shard}: the weights file is missing; "
                    "copy or download it, all shards are needed"
                )
            refuse_pointer(shard)
            _safetensors_header(shard)
    except OSError as exc:
        raise ModelError(
            f"{exc.filename or folder}: cannot be read ({exc.strerror or exc}); "
            "mend its permissions"
        ) from exc


def refuse_pointer(path: Path) -> None:
    """Raise ModelError for a git-LFS pointer; an absent file is not one."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    if pointer:
        raise ModelError(
            f"{path}: a git-LFS pointer, not the file itself; run `git lfs pull` in {path.parent}"
        )


def folder_facts(folder: Path | None) -> dict[str, Any]:
    """What the files of a checked folder tell; None for what they do not, or without a folder.

    Keys: architecture, layers, heads, kv_heads, head_dim, trained_length (tokens), parameters,
    dtype, size_bytes (on disk).
    """
    config = _text_config(read_json(folder / "config.json")) if folder else {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    return {
        "architecture": (config.get("architectures") or [config.get("model_type")])[0],
        "layers": config.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "trained_length": config.get("max_position_embeddings"),
        "parameters": _count_parameters(folder) if folder else None,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "size_bytes": folder_size(folder) if folder else 0,
    }


def folder_size(folder: Path) -> int:
    """Bytes of all files under `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when the file is absent, broken or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _check_config(folder: Path) -> None:
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        hint = (
            f"to use the GGUF file in it, give --model {ggufs[0]}"
            if ggufs
            else "give the folder that holds config.json, the tokenizer and *.safetensors"
        )
        raise ModelError(f"{folder}: not a model's folder, config.json is missing; {hint}")
    refuse_pointer(config)
    if not read_json(config):
        raise ModelError(f"{config}: not valid JSON; copy or download the model again")


def _check_tokenizer(folder: Path) -> None:
    present = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not present:
        raise ModelError(
            f"{folder}: the tokenizer is missing (no {', '.join(TOKENIZER_FILES)}); "
            "copy the tokenizer's files into a copy of the folder"
        )
    for file in present:
        refuse_pointer(file)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration that also holds images or sound."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _shards(folder: Path) -> list[Path]:
    """The weights files that transformers would load from `folder`, in its order of preference."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        refuse_pointer(index)
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise ModelError(f"{index}: holds no weight_map; copy or download the model again")
        return [folder / name for name in sorted(set(weights.values()))]
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder}: only pytorch_model.bin is here, a format that can run code when it is "
            "loaded; convert the model to safetensors (save_pretrained writes it)"
        )
    raise ModelError(f"{single}: the weights file is missing; copy or download it")


def _count_parameters(folder: Path) -> int:
    return sum(
        math.prod(tensor["shape"])
        for shard in _shards(folder)
        for name, tensor in _safetensors_header(shard).items()
        if name != "__metadata__"
    )


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: name -> dtype, shape and offsets in bytes.

    Raises ModelError unless the file holds as many bytes as the header promises.
    """
    again = "copy or download it again"
    size = path.stat().st_size
    if size == 0:
        raise ModelError(f"{path}: the weights file is empty; {again}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Compared before reading, for a broken length can ask for exabytes.
        if size < 8 or length > size - 8:
            raise ModelError(f"{path}: the weights file is cut short; {again}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        promised = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        for tensor in tensors:
            math.prod(tensor["shape"])
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as exc:
        raise ModelError(f"{path}: not a safetensors file or a broken one; {again}") from exc
    if size < promised:
        raise ModelError(
            f"{path}: the weights file is cut short ({size} of {promised} bytes); {again}"
        )
    return header
