"""Attention in tiles against attention at once, and both against float32."""

from __future__ import annotations

import pytest
import torch

from infllm_cli.memory import softmax
from infllm_cli.memory.softmax import (
    attend,
    attend_mass,
    attend_mass_tiles,
    attend_tiles,
    attend_weights,
)

# Relative to the whole: rounding of scores and weights to bfloat16 (2^-9 each).
TOLERANCE = 0.01


def parts(length, keys, group, kv_heads=2, dim=24, value_dim=20, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def made(heads, tokens, d):
        return torch.randn(heads, tokens, d, generator=generator).bfloat16()

    # Keys and values are slots of larger buffers.
    k = made(kv_heads, keys + 9, dim)[:, 4 : 4 + keys]
    v = made(kv_heads, keys + 9, value_dim)[:, 4 : 4 + keys]
    return made(kv_heads * group, length, dim), k, v


def mask_of(length, keys, sliding=None):
    column = torch.arange(keys)[None]
    row = torch.arange(keys - length, keys)[:, None]
    hidden = column > row
    if sliding is not None:
        hidden |= column <= row - sliding
    return torch.zeros(length, keys).bfloat16().masked_fill_(hidden, float("-inf"))


def exact(q, k, v, mask, scaling):
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = q.double() @ k.transpose(1, 2) * scaling
    if mask is not None:
        scores = scores + mask.double()
    return torch.softmax(scores, -1) @ v


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("length", "keys"), [(32, 32), (33, 97), (127, 500), (128, 128), (129, 300), (300, 301)]
)
def test_tiles_give_what_attention_at_once_gives(length, keys, group):
    q, k, v = parts(length, keys, group)
    mask = mask_of(length, keys)
    expected = exact(q, k, v, mask, 0.3)
    assert error(attend_tiles(q, k, v, mask, 0.3, causal=True), expected) < TOLERANCE
    # Told or not that nothing else is hidden, the same bits.
    assert torch.equal(
        attend_tiles(q, k, v, mask, 0.3, causal=True),
        attend_tiles(q, k, v, mask, 0.3, causal=False),
    )


@pytest.mark.parametrize(("length", "keys", "sliding"), [(40, 90, 17), (200, 400, 130)])
def test_tiles_honour_a_sliding_mask(length, keys, sliding):
    q, k, v = parts(length, keys, 2)
    mask = mask_of(length, keys, sliding)
    expected = exact(q, k, v, mask, 0.25)
    assert error(attend_tiles(q, k, v, mask, 0.25, causal=False), expected) < TOLERANCE


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("length", [1, 5, 31, 32, 65])
def test_whichever_form_is_chosen_the_result_is_attention(monkeypatch, native, length):
    monkeypatch.setattr(softmax, "multiplies_natively", lambda q: native)
    q, k, v = parts(length, 150, 3)
    mask = mask_of(length, 150) if length > 1 else None
    expected = exact(q, k, v, mask, 0.2)
    assert error(attend(q, k, v, mask, 0.2, None, causal=True), expected) < TOLERANCE


@pytest.mark.parametrize("group", [1, 3, 20])
@pytest.mark.parametrize("keys", [1, 7, 513])
def test_keys_first_or_last_gives_the_same_weights(monkeypatch, group, keys):
    q, k, v = parts(1, keys, group)
    found = []
    for native in (True, False):
        monkeypatch.setattr(softmax, "multiplies_natively", lambda q, native=native: native)
        found.append(attend_weights(q, k, v, None, 0.3, None))
    assert torch.allclose(found[0][1], found[1][1], atol=2e-3)
    assert error(found[0][0], exact(q, k, v, None, 0.3)) < TOLERANCE
    assert found[0][1].shape == (2, group, keys)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(
    ("length", "keys", "sliding"),
    [(32, 32, None), (33, 97, None), (63, 500, None), (65, 300, None), (300, 301, 130)],
)
def test_tiles_draw_the_mass_that_attention_at_once_draws(length, keys, sliding, group):
    q, k, v = parts(length, keys, group)
    mask = mask_of(length, keys, sliding)
    once, weights = attend_weights(q, k, v, mask, 0.3, None)
    expected = weights.view(q.shape[0], length, keys).sum(dim=1)
    out, drawn = attend_mass_tiles(q, k, v, mask, 0.3, causal=sliding is None)
    assert error(out, once.double()) < TOLERANCE
    assert drawn.dtype == torch.float32 and drawn.shape == (q.shape[0], keys)
    # Every query spends 1; a key's share is right up to the rounding of scores.
    assert torch.allclose(drawn.sum(dim=1), torch.full((q.shape[0],), float(length)), rtol=1e-4)
    assert error(drawn, expected.double()) < TOLERANCE


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("length", [1, 31, 32])
def test_whichever_form_is_chosen_the_mass_is_that_of_attention(monkeypatch, native, length):
    monkeypatch.setattr(softmax, "multiplies_natively", lambda q: native)
    q, k, v = parts(length, 150, 3)
    mask = mask_of(length, 150) if length > 1 else None
    out, drawn = attend_mass(q, k, v, mask, 0.2, None, causal=True)
    assert error(out, exact(q, k, v, mask, 0.2)) < TOLERANCE
    seen = exact(q, k, torch.eye(150).expand(2, -1, -1), mask, 0.2).sum(dim=1)
    assert error(drawn, seen) < TOLERANCE
