"""Small model folders, of a few bytes, for the tests of the catalog and what it uses."""

from __future__ import annotations

import json
import struct

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def safetensors_bytes(shape=(2, 3), missing=0):
    size = 2 * shape[0] * shape[1]
    tensor = {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, size]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size - missing)


def make_folder(folder, **files):
    """A model's folder that passes the checks; a value of None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "config.json": json.dumps(CONFIG).encode(),
        "tokenizer.json": b"{}",
        "model.safetensors": safetensors_bytes(),
        **files,
    }
    for name, data in content.items():
        if data is not None:
            (folder / name).write_bytes(data)
    return folder


def left_in(cache):
    """What lies under the models' folder, without the lock files."""
    models = cache / "models"
    return sorted(p.name for p in models.iterdir() if not p.name.startswith(".lock"))
