"""Readers around tiny random models, with a tokenizer and a chat template."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import build
from tiny_tokenizers import backend_of
from tokenizers import Tokenizer

from infllm_cli.document import decode_document
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.models.loading import LoadedModel
from infllm_cli.models.probe import probe_layers
from infllm_cli.reader import Memory, Reader

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRAINED = 2048
SMALL = MemoryConfig(
    sink_tokens=4,
    window_tokens=48,
    block_tokens=16,
    chunk_tokens=32,
    read_blocks=1,
    answer_blocks=2,
    representatives_per_block=2,
    codec=Codec.FULL,
)


def chat_tokenizer(
    template: str | None = CHATML, *, adds_bos: bool = False, kind: str = "byte_level", **names: str
) -> Any:
    """A transformers tokenizer; `adds_bos`: it puts `<s>` before a text by itself."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(backend_of(kind).to_str())
    if adds_bos:
        names.setdefault("bos_token", "<s>")
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=True)
    names.setdefault("eos_token", "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = template
    return tokenizer


def make_reader(
    dtype: torch.dtype = torch.float32,
    tokenizer: Any = None,
    *,
    kind: str = "llama",
    config: MemoryConfig = SMALL,
    **changes: Any,
) -> Reader:
    """A reader whose model answers nonsense, always the same."""
    tokenizer = tokenizer or chat_tokenizer()
    settings = {"vocab_size": len(tokenizer), "max_position_embeddings": TRAINED, **changes}
    model = build(kind, **settings).to(dtype)
    loaded = LoadedModel("tiny", model, tokenizer, TRAINED, probe_layers(model))
    return Reader(loaded, config)


def read_text(reader: Reader, text: str, *, whole: bool = False) -> Memory:
    """A text as a memory, through the tiers unless `whole`."""
    memory = reader.open(decode_document(text.encode(), "text"), allow_whole=whole)
    for _ in reader.read_steps(memory):
        pass
    return memory


def memory_contents(memory: Memory) -> list[Any]:
    """Copies of everything that a read document holds."""
    state = memory.state
    held: list[Any] = [memory.read_tokens, state.tokens, state.blocks]
    for layer in state.layers:
        window = layer.window
        slots = slice(window.first, window.last)
        held += [window.start, window.end]
        tensors = [window.rotated, window.values, window.raw, window.query_sums]
        held += [t[:, slots].clone() for t in tensors if t is not None]
    for layer in state.tiered:
        n = layer.arena.count
        held += [n, layer.representatives.count, layer.whole_tokens, layer.sinks is None]
        held += layer.arena.stretch(0, n * layer.arena.block_tokens)
        kept = layer.representatives
        held += [kept.chosen[:, :n].clone(), kept.key_sum[:, :n].clone()]
        held += [sink.clone() for sink in layer.sinks or ()]
    return held


def same_contents(a: list[Any], b: list[Any]) -> bool:
    """Whether two results of `memory_contents` are equal bit for bit."""
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )
