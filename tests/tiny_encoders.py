"""A small random sentence encoder in a folder, and one that knows some synonyms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from infllm_cli.words import words_of

WORDS = "the a of lamp wick boat goose who made what where was by in river grey night"


def save_encoder(folder: Path, pooling: dict | None) -> Path:
    """A BERT of two layers with a vocabulary of words; `pooling` None: no such file."""
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS.split()]
    ids = {word: index for index, word in enumerate(vocabulary)}
    backend = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=300,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


class Synonyms:
    """Encodes a sentence as the concepts that its words stand for; counts what it encoded."""

    width = 16
    identity = "synonyms"

    def __init__(self, *concepts: str) -> None:
        self.encoded = 0
        self._index = {
            word: index for index, words in enumerate(concepts) for word in words_of(words)
        }

    def encode(self, sentences: Sequence[str]) -> np.ndarray:
        """Unit vectors [n, width]; the last dimension for what is about nothing known."""
        self.encoded += len(sentences)
        found = np.zeros((len(sentences), self.width), dtype=np.float32)
        for row, sentence in zip(found, sentences, strict=True):
            row[-1] = 0.1
            for word in words_of(sentence):
                if word in self._index:
                    row[self._index[word]] += 1
        return found / np.linalg.norm(found, axis=1, keepdims=True)
