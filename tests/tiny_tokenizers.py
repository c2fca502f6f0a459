"""Small trained tokenizers, one for each kind of vocabulary, and prose to read with them."""

from __future__ import annotations

import functools
import json
import math
import random
from collections import Counter

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WORDS = (
    "the whale and of a to in that his it sea ship captain Ahab was with as for on all this at by "
    "but not from him be so one you had have there or were now which me like their are they an "
    "some then upon into when what old would more other over men said been don't it's we'll 1851 "
    "12 344 naïve café Москва 世界 😀 harpooneer Nantucket perhaps hand-in-hand (see below)"
)


def prose(characters: int, seed: int = 1) -> str:
    """Random sentences, paragraphs and indented lines of at least this many characters."""
    rng = random.Random(seed)
    words, parts, size = WORDS.split(), [], 0
    while size < characters:
        sentence = " ".join(rng.choices(words, k=rng.randint(3, 15))).capitalize()
        parts.append(
            sentence + rng.choice([". ", ", ", "; ", "!\n", ".\n\n", ".\n\n    ", "\t", "  "])
        )
        size += len(parts[-1])
    return "".join(parts)


TRAINING = [prose(30_000, seed) for seed in range(3)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(splitter=None, **settings) -> Tokenizer:
    backend = Tokenizer(models.BPE(**settings))
    backend.pre_tokenizer = splitter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    backend.add_tokens([AddedToken("[TOOL_CALLS]", special=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


def llama3_like() -> Tokenizer:
    backend = byte_level(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(LLAMA3, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    backend.normalizer = normalizers.NFC()
    return backend


def neox_like() -> Tokenizer:
    """Runs of white space are added tokens, outside the model's own vocabulary."""
    backend = byte_level()
    backend.add_tokens([AddedToken("\n\n"), *(AddedToken(" " * n) for n in (4, 3, 2))])
    return backend


def metaspace() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(TRAINING, trainer)
    return backend


def llama2_like() -> Tokenizer:
    """No splitter at all, a prefix by the normalizer, bytes for unknown characters."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=1100, special_tokens=SPECIAL + BYTES, limit_alphabet=60, show_progress=False
    )
    backend.train_from_iterator(TRAINING, trainer)
    state = json.loads(backend.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def unigram() -> Tokenizer:
    """Scored by counting: the library's trainer is slow, and gives other scores each time."""
    counts: Counter[str] = Counter()
    for word in "".join(TRAINING).split():
        word = f"▁{word}"
        counts.update(word)
        counts.update(
            word[i:j] for j in range(2, len(word) + 1) for i in range(max(0, j - 6), j - 1)
        )
    letters = sorted(piece for piece in counts if len(piece) == 1)
    pieces = dict.fromkeys([*letters, *(piece for piece, _ in counts.most_common(300))])
    total = counts.total()
    scored = [(piece, math.log(counts[piece] / total)) for piece in pieces]
    backend = Tokenizer(models.Unigram([*((name, 0.0) for name in SPECIAL), *scored], unk_id=0))
    backend.add_special_tokens(SPECIAL)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace()
    return backend


MAKERS = {
    make.__name__: make
    for make in (byte_level, llama3_like, neox_like, metaspace, llama2_like, unigram)
}


@functools.cache
def backend_of(kind: str) -> Tokenizer:
    return MAKERS[kind]()


kinds = pytest.mark.parametrize("kind", MAKERS)
