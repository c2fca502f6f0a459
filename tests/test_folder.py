"""What is refused before a model's folder is loaded."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from model_folders import POINTER, make_folder, safetensors_bytes

from infllm_cli.errors import ModelError
from infllm_cli.models.folder import check_folder

SHARDS = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
SHARDED = {
    "model.safetensors": None,
    "model.safetensors.index.json": SHARDS.encode(),
    "model-1.safetensors": safetensors_bytes(),
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": None}, r"mine: .*config\.json is missing"),
        ({"config.json": None, "x.gguf": b"GGUF"}, r"--model .*mine/x\.gguf"),
        ({"config.json": b"{"}, r"config\.json: not valid JSON"),
        ({"tokenizer.json": None}, "tokenizer is missing"),
        ({"tokenizer.json": POINTER}, r"tokenizer\.json: a git-LFS pointer"),
        ({"model.safetensors": POINTER}, r"model\.safetensors: .*`git lfs pull`"),
        ({"model.safetensors": b""}, r"model\.safetensors: .*empty"),
        ({"model.safetensors": b"abc"}, r"model\.safetensors: .*cut short"),
        ({"model.safetensors": struct.pack("<Q", 2**62) + b"{}"}, "cut short"),
        ({"model.safetensors": safetensors_bytes(missing=1)}, "cut short"),
        ({"model.safetensors": struct.pack("<Q", 4) + b"nope"}, "not a safetensors file"),
        ({"model.safetensors": struct.pack("<Q", 8) + b'{"a": 1}'}, "not a safetensors file"),
        ({"model.safetensors": None}, r"model\.safetensors: .*missing"),
        ({"model.safetensors": None, "pytorch_model.bin": b"x"}, "convert the model to safe"),
        (SHARDED, r"model-2\.safetensors: the weights file is missing"),
        (
            {**SHARDED, "model-2.safetensors": safetensors_bytes(missing=2)},
            r"model-2\.safetensors: .*cut short",
        ),
        ({**SHARDED, "model.safetensors.index.json": b"{}"}, "weight_map"),
    ],
)
def test_a_broken_folder_is_refused_by_the_files_name(tmp_path, files, expected):
    folder = make_folder(tmp_path / "mine", **files)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ModelError, match=expected):
        check_folder(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_all_shards_of_a_good_folder_are_accepted(tmp_path):
    check_folder(
        make_folder(tmp_path / "mine", **SHARDED, **{"model-2.safetensors": safetensors_bytes()})
    )


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "mine")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"config\.json: cannot be read .*mend its permissions"):
        check_folder(folder)
