"""Relevance and representative scores: kernels and twins against their definitions."""

from __future__ import annotations

import pytest
import torch
from infllm_cli.kernels.block_relevance import block_relevance_torch, relevant_blocks
from infllm_cli.kernels.block_relevance_triton import block_relevance_triton
from infllm_cli.kernels.representative_scores import representative_scores_torch
from infllm_cli.kernels.representative_scores_triton import representative_scores_triton

# Largest difference from float64, as a share of the number of products that are added up.
TOLERANCE = 2e-6
FORMS = {"kernel": block_relevance_triton, "twin": block_relevance_torch}

# (heads, Q, N, R, d, dtype of queries, of keys)
CASES = [
    (1, 1, 1, 1, 64, torch.float32, torch.float32),
    (3, 63, 111, 4, 64, torch.bfloat16, torch.bfloat16),
    (9, 3, 17, 1, 96, torch.bfloat16, torch.float32),
    (3, 111, 16, 3, 128, torch.float32, torch.float32),
    (1, 65, 15, 16, 256, torch.float32, torch.bfloat16),
    (9, 1, 129, 4, 128, torch.bfloat16, torch.bfloat16),
    (1, 1, 127, 4, 256, torch.bfloat16, torch.float32),
]
NAMES = ["h{}-q{}-n{}-r{}-d{}-{}-{}".format(*map(str, c)).replace("torch.", "") for c in CASES]


def make(heads, rows, blocks, per_block, d, q_type, k_type):
    generator = torch.Generator().manual_seed(heads + rows + blocks + d)
    q = torch.randn(heads, rows, d, generator=generator) * (2.0 / d**0.5)
    keys = torch.randn(heads, blocks, per_block, d, generator=generator)
    missing = torch.rand(blocks, generator=generator) < 0.3
    missing[0] = False
    return q.to(q_type), keys.to(k_type), missing


def definition(q, keys, rule, missing):
    s = torch.einsum("hqd,hnrd->hqnr", q.double(), keys.double())
    if missing is not None and rule == "mass":
        s = s.masked_fill(missing[:, None], float("-inf"))
    if rule == "sum":
        found = s.sum(dim=(1, 3))
    elif rule == "max":
        found = s.amax(dim=3).sum(dim=1)
    else:
        found = torch.softmax(s.flatten(2), dim=-1).view(s.shape).sum(dim=(1, 3))
    return found if missing is None else found.masked_fill(missing, float("-inf"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", ["sum", "max", "mass"])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_relevance_follows_its_definition(case, rule: str, form: str) -> None:
    q, keys, missing = make(*case)
    for gone in (None, missing):
        found = FORMS[form](q, keys, rule, gone)
        assert found.dtype == torch.float32
        atol = TOLERANCE * max(16, q.shape[1] * keys.shape[2])
        expected = definition(q, keys, rule, gone)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=atol)


def test_the_most_relevant_blocks_come_best_first() -> None:
    q, keys, missing = make(*CASES[1])
    blocks, relevance = relevant_blocks(q, keys, "mass", 5, missing)
    assert blocks.shape == (3, 5)
    found = relevance.gather(1, blocks)
    assert torch.equal(found, relevance.sort(dim=1, descending=True).values[:, :5])
    assert relevant_blocks(q, keys, "max", 500)[0].shape == (3, 111)


@pytest.mark.parametrize(
    ("heads", "tokens", "ahead", "d", "dtype"),
    [
        (1, 1, 1, 64, torch.float32),
        (3, 63, 111, 96, torch.bfloat16),
        (9, 129, 7, 64, torch.bfloat16),
        (1, 33, 64, 256, torch.float32),
        (3, 127, 63, 128, torch.bfloat16),
        (9, 1, 111, 128, torch.float32),
    ],
)
def test_running_sums_give_the_paper_s_score(heads, tokens, ahead, d, dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    queries = torch.randn(heads, tokens + ahead, d, generator=generator)
    window = torch.randn(heads, tokens + 9, d, generator=generator).to(dtype)
    keys = window[:, 5 : 5 + tokens]  # part of a larger buffer
    prefix = queries.cumsum(dim=1)
    expected = torch.stack(
        [
            (queries[:, m + 1 : m + 1 + ahead].double() * keys[:, m, None].double()).sum((1, 2))
            for m in range(tokens)
        ],
        dim=1,
    )
    for form in (representative_scores_triton, representative_scores_torch):
        found = form(prefix, keys, ahead)
        torch.testing.assert_close(found.double(), expected / ahead, rtol=0, atol=1e-4)
