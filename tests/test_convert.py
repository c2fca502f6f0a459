"""GGUF files of two random layers, converted and loaded back."""

from __future__ import annotations

import pytest
from model_folders import left_in

from infllm_cli.errors import ModelError
from infllm_cli.models import catalog


def write_tiny_gguf(path, *, rope_freqs=False, tied=True):
    """A two-layer Llama with a byte-level vocabulary, written with the gguf package."""
    import numpy as np
    from gguf import GGUFWriter
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    random = np.random.default_rng(0)
    tokens = [*bytes_to_unicode().values(), "ab", "abc", "<|begin|>", "<|end|>", "<|im_end|>"]
    hidden, inner, vocabulary = 32, 64, len(tokens)
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (vocabulary - 3) + [3, 3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(vocabulary - 3)
    writer.add_pad_token_id(vocabulary - 1)
    writer.add_eos_token_id(vocabulary - 2)
    writer.add_eot_token_id(vocabulary - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0]['content'] }}")

    def tensor(name, *shape):
        writer.add_tensor(name, random.normal(0, 0.1, shape).astype(np.float32))

    tensor("token_embd.weight", vocabulary, hidden)
    tensor("output_norm.weight", hidden)
    if not tied:
        tensor("output.weight", vocabulary, hidden)
    if rope_freqs:
        tensor("rope_freqs.weight", 4)
    for layer in range(2):
        block = f"blk.{layer}"
        tensor(f"{block}.attn_norm.weight", hidden)
        tensor(f"{block}.ffn_norm.weight", hidden)
        tensor(f"{block}.attn_q.weight", hidden, hidden)
        tensor(f"{block}.attn_k.weight", hidden // 2, hidden)
        tensor(f"{block}.attn_v.weight", hidden // 2, hidden)
        tensor(f"{block}.attn_output.weight", hidden, hidden)
        tensor(f"{block}.ffn_gate.weight", inner, hidden)
        tensor(f"{block}.ffn_up.weight", inner, hidden)
        tensor(f"{block}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_gguf_loads_back_whole(tmp_path, cache, capfd, tied):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    gguf = tmp_path / "tiny.gguf"
    vocabulary = write_tiny_gguf(gguf, tied=tied)
    # Another model's file beside it must not leak into the conversion.
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "wrong", "model_max_length": 5}')
    settings = logging.get_verbosity(), logging.is_progress_bar_enabled()
    capfd.readouterr()
    steps = []
    found = catalog.resolve(str(gguf), cache, lambda *event: steps.append(event))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == settings
    assert any(stage == "converting the weights" and total for stage, _, total in steps)

    model = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.bfloat16)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.generation_config.eos_token_id == [vocabulary - 2, vocabulary - 1]
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    text = "ab é , n't<|end|>"  # spaces that a clean-up would take
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    special = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token
    assert special == ("<|begin|>", "<|end|>", "<|im_end|>")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    facts = catalog.describe(str(gguf), cache)
    assert (facts["layers"], facts["kv_heads"], facts["trained_length"]) == (2, 2, 512)
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "cache",
        "tiny.gguf",
        "tokenizer_config.json",
    ]


def test_a_rotary_scaling_that_would_be_lost_is_refused(tmp_path, cache):
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, rope_freqs=True)
    with pytest.raises(ModelError, match="rotary scaling would be lost"):
        catalog.resolve(str(gguf), cache)
    assert left_in(cache) == []
