"""Packed matrices give the bits that plain ones give."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build
from torch import nn

from infllm_cli.models import packed
from infllm_cli.models.packed import PackedLinear, can_pack, count_parameters, pack_linears


def model(dtype=torch.bfloat16, kind="llama", **changes):
    made = build(kind, **changes).to(dtype)
    made.set_attn_implementation("sdpa")
    return made


@pytest.fixture
def packs(monkeypatch):
    """Where the processor has no such products, plain ones stand in for them."""
    if not can_pack(model()):
        monkeypatch.setattr(packed, "pack", lambda weight: weight.clone())
        monkeypatch.setattr(packed, "_product", F.linear)
        monkeypatch.setattr(packed, "can_pack", lambda model: True)


@pytest.mark.parametrize("tokens", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_matrix_gives_the_same_bits(packs, tokens, bias):
    linear = nn.Linear(51, 37, bias=bias).bfloat16()
    x = torch.randn(2, tokens, 51).bfloat16()
    with torch.no_grad():
        assert torch.equal(PackedLinear(linear)(x), linear(x))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_a_packed_model_gives_the_same_logits(packs, kind):
    plain = model(kind=kind)
    fast = copy.deepcopy(plain)
    assert pack_linears(fast) > 0
    assert not [m for m in fast.modules() if type(m) is nn.Linear]
    with torch.inference_mode():
        for tokens in (1, 7):
            ids = torch.arange(3, 3 + tokens)[None]
            expected = plain(input_ids=ids, use_cache=False).logits
            assert torch.equal(fast(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
def test_packing_changes_no_count_and_no_weight(packs, tied):
    plain = model(tie_word_embeddings=tied)
    before = sum(parameter.numel() for parameter in plain.parameters())
    weight = plain.get_output_embeddings().weight.detach().clone()
    assert count_parameters(plain) == before
    pack_linears(plain)
    assert count_parameters(plain) == before
    packed_head = plain.get_output_embeddings()
    assert isinstance(packed_head, PackedLinear)
    if hasattr(packed_head.packed, "layout") and packed_head.packed.layout is not torch.strided:
        assert torch.equal(packed_head.weight, weight)


def test_other_dtypes_and_kinds_of_matrices_stay(packs):
    class Adapted(nn.Linear):
        pass

    full = model(torch.float32)
    assert pack_linears(full) == 0
    half = model()
    layer = half.model.layers[0].mlp
    layer.up_proj = Adapted(*reversed(layer.up_proj.weight.shape), bias=False).bfloat16()
    pack_linears(half)
    assert type(layer.up_proj) is Adapted and isinstance(layer.gate_proj, PackedLinear)


def test_where_torch_has_no_such_products_weights_stay(monkeypatch):
    def gone(*_):
        raise AttributeError("no such operation")

    monkeypatch.setattr(packed, "pack", gone)
    plain = model()
    assert pack_linears(plain) == 0
    monkeypatch.setattr(packed, "pack", lambda weight: weight + 1)
    monkeypatch.setattr(packed, "_product", F.linear)
    assert pack_linears(plain) == 0, "a trial that gives other numbers is not trusted"
