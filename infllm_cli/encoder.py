"""Sentences as vectors: those that mean the same lie close together, whatever words they use.

A small frozen model beside the one that reads (Reimers and Gurevych, Sentence-BERT, EMNLP 2019).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from infllm_cli.errors import ModelError
from infllm_cli.models.folder import read_json
from infllm_cli.models.lean_import import lean
from infllm_cli.models.loading import choose_dtype, quiet_transformers
from infllm_cli.models.store import file_sha256

# Of a sentence; those of a document are cut long before.
MOST_TOKENS = 256
# Tokens of one pass, padding included: more would leave the caches.
PASS_TOKENS = 1024


class SentenceEncoder:
    """A model in the form of sentence-transformers.

    Args:
        folder: see `models.encoders`.
        device: where it runs.

    Raises:
        ModelError: it cannot be loaded, or pools in a way that is not known here.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._first_token = _pools_by_first_token(folder)
        self._folder = folder
        dtype = choose_dtype("auto", device)
        try:
            with lean(), quiet_transformers():
                from transformers import AutoModel, AutoTokenizer

                self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                self._model = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise ModelError(
                f"{folder}: not a sentence encoder that can be loaded ({error})"
            ) from error
        self._model.eval().to(device)
        self._device = device
        self.width = int(self._model.config.hidden_size)

    @cached_property
    def identity(self) -> str:
        """The hash of its weights: vectors of two encoders have nothing to do with each other."""
        files = sorted(self._folder.glob("*.safetensors"))
        digests = [file_sha256(path, "checking the encoder", lambda *_: None) for path in files]
        return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Unit vectors [n, width] float32 of sentences, each cut at `MOST_TOKENS`."""
        found = np.zeros((len(sentences), self.width), dtype=np.float32)
        if not sentences:
            return found
        ids = self._tokenizer(list(sentences), truncation=True, max_length=MOST_TOKENS)["input_ids"]
        # Alike in length they need hardly any padding.
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        while order:
            count = max(1, PASS_TOKENS // len(ids[order[-1]]))
            batch, order = order[-count:], order[:-count]
            found[batch] = self._pass([ids[index] for index in batch])
        return found

    @torch.inference_mode()
    def _pass(self, ids: list[list[int]]) -> np.ndarray:
        padded = self._tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self._device)
        hidden = self._model(**padded).last_hidden_state.float()
        if self._first_token:
            pooled = hidden[:, 0]
        else:
            mask = padded["attention_mask"][..., None]
            pooled = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


def _pools_by_first_token(folder: Path) -> bool:
    """Whether the first token's vector stands for the sentence; else the mean of all.

    Raises:
        ModelError: something else does.
    """
    pooling = read_json(folder / "1_Pooling" / "config.json")
    if pooling.get("pooling_mode_cls_token"):
        return True
    if pooling.get("pooling_mode_mean_tokens", not pooling):
        return False
    raise ModelError(
        f"{folder}: pools neither by the mean nor by the first token; choose another --encoder"
    )
