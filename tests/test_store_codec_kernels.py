"""Packing and unpacking kernels agree with their twins bit for bit, on odd sizes."""

from __future__ import annotations

import pytest
import torch
from infllm_cli.kernels.store_codec import (
    FP8,
    FULL,
    INT4,
    INT8,
    pack_keys,
    pack_keys_torch,
    pack_values_torch,
    unpack,
    unpack_into_torch,
)
from infllm_cli.kernels.store_codec_triton import (
    pack_keys_triton,
    pack_values_triton,
    unpack_into_triton,
)

PACKED = [INT8, FP8, INT4]
# (heads, blocks, tokens, d, dtype)
SHAPES = [
    (3, 2, 33, 64, torch.bfloat16),
    (1, 1, 1, 96, torch.float32),
    (2, 3, 31, 25, torch.float32),
    (1, 2, 63, 128, torch.bfloat16),
    (9, 1, 17, 256, torch.float32),
    (3, 1, 111, 96, torch.bfloat16),
    (1, 2, 127, 64, torch.float32),
    (1, 1, 129, 128, torch.bfloat16),
]
NAMES = ["h{}-n{}-b{}-d{}-{}".format(*s[:4], str(s[4])[6:]) for s in SHAPES]


def draw(heads, blocks, size, d, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed + size + d)
    x = torch.randn(heads, blocks, size, d, generator=generator)
    x[..., 0] = 7.0  # a channel that is the same in every token
    if size > 2:
        x[:, :, 1] = 0.0  # a token of nothing
        x[:, :, 2, 3:9] *= 1e-4  # subnormal in float8
        x[:, :, 2, 9] = 1e4
    return x.to(dtype)


def assert_same(a, b):
    assert (a.kind, a.dim) == (b.kind, b.dim)
    assert a.tensors().keys() == b.tensors().keys()
    for name, tensor in a.tensors().items():
        other = b.tensors()[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, name
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_packing_gives_the_same_bits(shape, kind: str) -> None:
    x = draw(*shape)
    assert_same(pack_keys_triton(x, kind), pack_keys_torch(x, kind))
    assert_same(pack_values_triton(x, kind), pack_values_torch(x, kind))


@pytest.mark.parametrize("kind", [*PACKED, FULL])
@pytest.mark.parametrize("shape", SHAPES, ids=NAMES)
def test_unpacking_writes_the_same_bits_to_slots(shape, kind: str) -> None:
    heads, blocks, size, d, dtype = shape
    x = draw(*shape)
    for packed in (
        (pack_keys(x, kind), pack_values_torch(x, kind)) if kind != FULL else (pack_keys(x, FULL),)
    ):
        order = torch.randperm(heads * blocks + 2)[: heads * blocks]
        before = torch.full((heads * blocks + 2, size, d), 5.0, dtype=dtype)
        out, twin = before.clone(), before.clone()
        unpack_into_triton(packed, out, order)
        unpack_into_torch(packed, twin, order)
        # A product and a sum are rounded once each.
        assert torch.equal(out, twin)
        assert torch.equal(out[order], unpack(packed, dtype).flatten(0, 1))
        untouched = [i for i in range(len(out)) if i not in order.tolist()]
        assert (out[untouched] == 5.0).all()


def test_every_float8_survives() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]  # NaN
    x = codes.view(torch.float8_e4m3fn).float().view(1, 1, 1, -1)
    packed = pack_keys_torch(x, FP8)
    assert torch.equal(packed.scale, torch.where(x == 0, 1e-30, x.abs() / 448.0))
    whole = torch.cat([x, torch.full_like(x, 448.0)], dim=2)  # scale 1
    assert_same(pack_keys_triton(whole, FP8), pack_keys_torch(whole, FP8))
    between = torch.cat([(x[..., :-1] + x[..., 1:]) / 2, torch.full_like(x[..., 1:], 448.0)], 2)
    assert_same(pack_keys_triton(between, FP8), pack_keys_torch(between, FP8))
