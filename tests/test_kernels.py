"""The exact lookup: kernel, twin and mass against a naive reference on odd sizes."""

import itertools
import subprocess
import sys

import pytest
import torch
from infllm_cli.kernels import exact_lookup as module
from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.exact_lookup import exact_lookup, exact_lookup_parts, exact_lookup_torch

# Largest difference from a float64 reference of the same (already rounded) operands, for scores
# of about +-10. In bfloat16 the CPU may round each score once: half of 2^-7 of 8 to 16.
SCORE_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6.3e-2}
# The kernel, and the twin with many queries, add up in float32 whatever the operands.
EXACT_TOLERANCE = 2e-5
MASS_TOLERANCE = 1e-5  # of the number of queries

# (heads, Q, d, B, n_blocks, N_cap, dtype): every size at least once, dtypes alternating.
CASES = [
    (1, 1, 64, 128, 17, 19, torch.bfloat16),
    (3, 3, 64, 32, 17, 18, torch.float32),
    (3, 1, 96, 48, 3, 4, torch.float32),
    (1, 9, 128, 48, 17, 20, torch.bfloat16),
    (3, 63, 64, 128, 3, 5, torch.bfloat16),
    (1, 111, 256, 48, 3, 4, torch.float32),
    (1, 111, 96, 128, 1, 2, torch.bfloat16),
    (3, 9, 256, 32, 1, 3, torch.bfloat16),
    (1, 63, 128, 32, 1, 1, torch.float32),
    (9, 1, 64, 127, 3, 4, torch.bfloat16),  # a token less than a block, and one more
    (9, 63, 96, 129, 2, 3, torch.float32),
    (1, 111, 128, 33, 3, 3, torch.bfloat16),
    (3, 1, 256, 31, 3, 4, torch.bfloat16),
]
NAMES = ["h{}-q{}-d{}-b{}-n{}of{}-{}".format(*c[:6], str(c[6])[6:]) for c in CASES]


def make_inputs(heads, n_rows, d, size, n_blocks, capacity, dtype):
    generator = torch.Generator().manual_seed(heads * n_rows + d + size + n_blocks)
    q = torch.randn(heads, n_rows, d, generator=generator) * (3.0 / d**0.5)
    keys = torch.randn(heads, capacity, size, d, generator=generator)
    keys[:, n_blocks:] = float("nan")  # what lies behind the valid blocks must never be read
    return q.to(dtype), keys.to(dtype), n_blocks


def naive(q, keys, n_blocks):
    """What is asked for, in float64 and in one piece."""
    s = torch.einsum("hqd,hnbd->hqnb", q.double(), keys[:, :n_blocks].double())
    return torch.logsumexp(s, dim=-1), s.amax(dim=-1)


def assert_near(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_keys_in_several_parts_are_scored_as_in_one(case):
    q, keys, n_blocks = make_inputs(*case)
    cuts = sorted({0, n_blocks // 3, n_blocks - 1, n_blocks})
    parts = [keys[:, start:stop] for start, stop in itertools.pairwise(cuts)]
    expected = naive(q, keys, n_blocks)
    assert_near(exact_lookup_parts(q, parts), expected, SCORE_TOLERANCE[case[-1]])
    lse, peak = exact_lookup_parts(q, parts, want_lse=False)
    assert lse is None and torch.equal(peak, exact_lookup_parts(q, parts)[1])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_twin_equals_naive(case):
    inputs = make_inputs(*case)
    assert_near(exact_lookup_torch(*inputs), naive(*inputs), SCORE_TOLERANCE[case[-1]])


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_kernel_equals_naive_and_twin(case):
    from infllm_cli.kernels.exact_lookup_triton import exact_lookup_triton

    inputs = make_inputs(*case)
    actual = exact_lookup_triton(*inputs)
    assert_near(actual, naive(*inputs), EXACT_TOLERANCE)
    assert_near(actual, exact_lookup_torch(*inputs), SCORE_TOLERANCE[case[-1]])


def test_kernel_groups_blocks_and_leaves_out_the_sum(monkeypatch):
    from infllm_cli.kernels import exact_lookup_triton as kernel_module

    exact_lookup_triton = kernel_module.exact_lookup_triton
    monkeypatch.setattr(kernel_module, "GROUP_FROM", 2)
    inputs = make_inputs(2, 67, 16, 16, 6, 7, torch.float32)  # the last group is half full
    assert_near(exact_lookup_triton(*inputs), naive(*inputs), EXACT_TOLERANCE)
    lse, peak = exact_lookup_triton(*inputs, want_lse=False)
    assert lse is None
    assert_near([peak], naive(*inputs)[1:], EXACT_TOLERANCE)


def test_kernel_takes_strided_keys_and_mixed_dtypes():
    from infllm_cli.kernels.exact_lookup_triton import exact_lookup_triton

    q, keys, n_blocks = make_inputs(3, 5, 24, 48, 3, 4, torch.bfloat16)
    strided = keys.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    inputs = (q.float(), strided, n_blocks)
    assert_near(exact_lookup_triton(*inputs), naive(q, keys, n_blocks), EXACT_TOLERANCE)


@pytest.mark.parametrize("native", [False, True], ids=["widened", "native"])
@pytest.mark.parametrize("n_rows", [2, 7, 33])
def test_twin_holds_across_tile_seams(monkeypatch, native, n_rows):
    monkeypatch.setattr(module, "CPU_TILE_SCORES", 2048)
    monkeypatch.setattr(module, "MAX_TILE_ROWS", 6)
    monkeypatch.setattr(module, "FEW_ROWS", 99)
    monkeypatch.setattr(module, "multiplies_natively", lambda q: native)
    inputs = make_inputs(2, n_rows, 40, 48, 17, 20, torch.bfloat16)
    tolerance = SCORE_TOLERANCE[torch.bfloat16] if native else EXACT_TOLERANCE
    assert_near(exact_lookup_torch(*inputs), naive(*inputs), tolerance)


def test_twin_is_exact_for_many_bfloat16_queries():
    inputs = make_inputs(1, 63, 64, 128, 17, 18, torch.bfloat16)
    assert_near(exact_lookup_torch(*inputs), naive(*inputs), EXACT_TOLERANCE)


def test_twin_takes_keys_of_any_strides():
    q, keys, n_blocks = make_inputs(3, 5, 64, 48, 3, 4, torch.float32)
    for strided in (
        keys.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
        keys.transpose(2, 3).contiguous().transpose(2, 3),
        torch.cat([keys, keys], dim=1)[:, : keys.shape[1]],
    ):
        actual = exact_lookup_torch(q, strided, n_blocks)
        assert_near(actual, naive(q, keys, n_blocks), SCORE_TOLERANCE[torch.float32])


def test_large_scores_neither_overflow_nor_vanish():
    q, keys, n_blocks = make_inputs(1, 3, 64, 32, 5, 6, torch.float32)
    q = q * 1000  # scores of some thousands: exp overflows at 89
    lse, peak = exact_lookup_torch(q, keys, n_blocks)
    expected = naive(q, keys, n_blocks)
    torch.testing.assert_close(lse.double(), expected[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(peak.double(), expected[1], rtol=1e-5, atol=0)


def test_peak_alone_is_the_same_peak():
    inputs = make_inputs(3, 9, 64, 48, 3, 4, torch.float32)
    lse, peak = exact_lookup_torch(*inputs, want_lse=False)
    assert lse is None
    assert torch.equal(peak, exact_lookup_torch(*inputs)[1])


def test_no_blocks_give_empty_results():
    q, keys, _ = make_inputs(3, 9, 64, 48, 0, 4, torch.float32)
    lse, peak = exact_lookup(q, keys, 0)
    assert lse.shape == peak.shape == (3, 9, 0)
    assert block_mass(lse).shape == (3, 0)


def test_scores_held_at_once_are_bounded():
    # 20,000 queries x 64 keys: all at once they would take 5 MB a block.
    q, keys, n_blocks = make_inputs(1, 20_000, 8, 64, 20, 20, torch.float32)
    tile = module._WideScores(module.MAX_TILE_ROWS, 8, keys)
    assert tile.scores.numel() <= module.CPU_TILE_SCORES
    assert 4 * max(module.CPU_TILE_SCORES, module.DEVICE_TILE_SCORES) <= 32 * 2**20
    actual = exact_lookup_torch(q, keys, n_blocks)
    assert_near(actual, naive(q, keys, n_blocks), SCORE_TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 63])
def test_masses_add_up_to_the_queries_and_follow_the_softmax(dtype, n_rows):
    inputs = make_inputs(3, n_rows, 64, 48, 17, 20, dtype)
    mass = block_mass(exact_lookup(*inputs)[0])
    assert mass.shape == (3, 17)
    total = torch.full((3,), float(n_rows))
    torch.testing.assert_close(mass.sum(-1), total, rtol=MASS_TOLERANCE, atol=0)
    # One softmax over every stored key, summed per block: the definition.
    s = torch.einsum("hqd,hnbd->hqnb", inputs[0].double(), inputs[1][:, :17].double())
    expected = torch.softmax(s.flatten(2), dim=-1).view(s.shape).sum(dim=(1, 3))
    tolerance = SCORE_TOLERANCE[dtype] * n_rows
    torch.testing.assert_close(mass.double(), expected, rtol=0, atol=tolerance)


def test_the_import_leaves_triton_alone():
    code = "import sys, infllm_cli.kernels.exact_lookup\nsys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
