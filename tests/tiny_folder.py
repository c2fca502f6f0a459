"""A model folder on disk: a tiny random Llama with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from tiny_models import build
from tiny_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def save_folder(folder: Path, *, chat: bool = True, **changes: object) -> Path:
    """Write a folder that `--model` takes."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    if chat:
        tokenizer.chat_template = CHATML
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 512,
        "eos_token_id": eos,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    model = build("llama", **{**settings, **changes})
    model.set_attn_implementation("eager")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
