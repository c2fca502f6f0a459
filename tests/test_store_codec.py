"""Keys and values in fewer bytes: how near they come back, and that a scan needs no unpacking."""

from __future__ import annotations

import itertools

import pytest
import torch
from infllm_cli.kernels import packed_lookup as module
from infllm_cli.kernels.packed_lookup import packed_lookup, packed_lookup_torch
from infllm_cli.kernels.store_codec import (
    FP8,
    FULL,
    INT4,
    INT8,
    KINDS,
    pack_keys,
    pack_values,
    pick,
    unpack,
    widen_fp8,
    widen_fp8_torch,
)

# Least signal to noise, in decibels, of normally distributed numbers.
KEYS_DB = {INT8: 38, FP8: 28, INT4: 17}
VALUES_DB = {INT8: 40, FP8: 28, INT4: 18}
# Of scores of about +-10, against the unpacked keys: queries have 15 bits, with fp8 those of the
# model's dtype.
SCORE_TOLERANCE = {FULL: 2e-5, INT8: 2e-3, INT4: 2e-3, FP8: 1.2e-1}

# (heads, queries, d, tokens per block, blocks)
SIZES = [(1, 1, 64, 128, 3), (3, 3, 40, 33, 5), (2, 7, 33, 16, 1), (2, 63, 96, 17, 9)]


def numbers(heads, blocks, size, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(heads + blocks + size + d)
    x = torch.randn(heads, blocks, size, d, generator=generator)
    # Channels of keys differ in size and in where they lie.
    spread = torch.linspace(0.2, 3, d)
    return (x * spread + spread.flip(0)).to(dtype)


def decibels(x, y):
    x, y = x.double(), y.double()
    centered = x - x.mean(dim=(1, 2), keepdim=True)
    return float(10 * torch.log10(centered.square().mean() / (x - y).square().mean()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_packed_comes_back_as_near_as_the_codec_promises(kind, dtype, size):
    heads, _, d, tokens, blocks = size
    x = numbers(heads, blocks, tokens, d, dtype)
    for pack, promised in ((pack_keys, KEYS_DB), (pack_values, VALUES_DB)):
        packed = pack(x, kind)
        y = unpack(packed, dtype)
        assert y.shape == x.shape and y.dtype == dtype and packed.blocks == blocks
        if kind == FULL:
            assert torch.equal(x, y)
        else:
            assert decibels(x, y) > promised[kind]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_channels_that_are_all_the_same_zero_or_huge_come_back(kind):
    x = numbers(2, 3, 16, 8)
    x[..., 0], x[..., 1], x[..., 2] = 0.0, -3.5, 1e4
    x[0, 1] = 0.0
    for pack in (pack_keys, pack_values):
        y = unpack(pack(x, kind), torch.float32)
        assert torch.isfinite(y).all()
        assert ((x - y).abs() <= 0.1 * x.abs().amax(dim=(1, 2), keepdim=True) + 700).all()
    y = unpack(pack_keys(x, kind), torch.float32)
    assert y[1, :, :, 1].allclose(torch.tensor(-3.5), rtol=1e-5)


def test_a_step_of_int4_never_leaves_the_grid():
    """A code that is rounded up past the end of the grid would begin anew at its other end."""
    x = torch.linspace(-1, 1, 256).repeat(4, 1)  # four channels over the whole grid
    x = torch.stack([x, x.flip(1), x[:, :1].expand(-1, 256), x * 0.97]).transpose(1, 2)[None]
    y = unpack(pack_keys(x, INT4), torch.float32)
    assert (x - y).abs().max() < 2 / 15


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_scan_of_codes_equals_its_twin(kind, size):
    heads, n_rows, d, tokens, blocks = size
    keys = pack_keys(numbers(heads, blocks, tokens, d), kind)
    q = torch.randn(heads, n_rows, d, generator=torch.Generator().manual_seed(d)) / d**0.5
    ours, twins = packed_lookup(q, keys), packed_lookup_torch(q, keys)
    for a, b in zip(ours, twins, strict=True):
        assert a.shape == (heads, n_rows, blocks) and a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=SCORE_TOLERANCE[kind])
    scores = torch.einsum("hqd,hnbd->hqnb", q.double(), unpack(keys, torch.float64))
    for a, b in zip(twins, (scores.logsumexp(-1), scores.amax(-1)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=SCORE_TOLERANCE[FULL])


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_a_scan_holds_across_tile_seams_and_without_products_of_integers(monkeypatch, kind):
    keys = pack_keys(numbers(3, 7, 16, 24), kind)
    q = torch.randn(3, 9, 24, generator=torch.Generator().manual_seed(1)) / 5
    expected = packed_lookup_torch(q, keys)
    monkeypatch.setattr(module, "CPU_TILE_SCORES", 700)
    for a, b in zip(packed_lookup(q, keys), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=SCORE_TOLERANCE[kind])
    monkeypatch.setattr(module, "multiplies_integers", lambda: False)
    for a, b in zip(packed_lookup(q, keys), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_the_kernel_scans_codes_as_they_are(kind):
    from infllm_cli.kernels.exact_lookup_triton import exact_lookup_triton
    from infllm_cli.kernels.store_codec import grid_codes

    keys = pack_keys(numbers(2, 5, 33, 40), kind)
    q = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(2)) / 6
    codes = keys.codes if kind == INT8 else grid_codes(keys)
    lse, peak = exact_lookup_triton(q * keys.scale[:, 0], codes, 5)
    shift = (q * keys.low[:, 0]).sum(dim=-1, keepdim=True)
    for a, b in zip((lse + shift, peak + shift), packed_lookup_torch(q, keys), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_every_fp8_number_is_widened_exactly():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = torch.isfinite(codes.float())
    assert torch.equal(widen_fp8(codes)[finite], widen_fp8_torch(codes)[finite])
    assert int(finite.sum()) == 254  # the other two are never written: nothing is infinite


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_cut_and_picked_without_changing(kind):
    x = numbers(3, 6, 16, 10)
    for pack in (pack_keys, pack_values):
        packed = pack(x, kind)
        whole = unpack(packed, torch.float32)
        cut = packed.cut(slice(2, 5))
        assert torch.equal(unpack(cut, torch.float32), whole[:, 2:5])
        where = list(itertools.product(range(3), (0, 5)))
        picked = pick([(packed, head, block) for head, block in where])
        for found, (head, block) in zip(unpack(picked, torch.float32), where, strict=True):
            assert torch.equal(found[0], whole[head, block])
