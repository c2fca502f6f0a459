"""The scan of all segments in one launch: kernel and twin against unpacked keys, on odd sizes."""

from __future__ import annotations

import pytest
import torch
from infllm_cli.kernels.segment_lookup import KeyTable, segment_lookup_torch
from infllm_cli.kernels.segment_lookup_triton import segment_lookup_triton
from infllm_cli.kernels.store_codec import FP8, FULL, INT4, INT8, Packed, pack_keys, unpack
from torch import Tensor

# Largest difference from a float64 reference of the unpacked keys, for scores of about +-10.
TOLERANCE = 5e-5
FORMS = {"kernel": segment_lookup_triton, "twin": segment_lookup_torch}

# (kind, heads, Q, d, B, blocks of each segment, dtype)
CASES = [
    (FULL, 3, 1, 64, 32, (2, 1), torch.float32),
    (FULL, 1, 9, 96, 31, (1, 2), torch.bfloat16),
    (INT8, 3, 3, 64, 33, (2, 1), torch.bfloat16),
    (INT8, 1, 63, 128, 32, (1, 1), torch.float32),
    (INT8, 9, 1, 64, 16, (1,), torch.bfloat16),
    (FP8, 3, 3, 64, 33, (1, 1), torch.bfloat16),
    (FP8, 1, 9, 256, 16, (1, 1), torch.float32),
    (INT4, 3, 3, 64, 33, (2, 1), torch.bfloat16),
    (INT4, 1, 9, 96, 32, (1, 1), torch.float32),
    (INT4, 1, 3, 25, 16, (1, 1), torch.float32),
    (INT4, 1, 111, 128, 16, (2,), torch.float32),
    (FULL, 9, 1, 256, 17, (1, 1), torch.bfloat16),
    (FULL, 1, 63, 128, 129, (1,), torch.float32),
    (INT8, 3, 1, 256, 127, (1, 1), torch.bfloat16),
    (INT8, 1, 111, 96, 129, (1,), torch.bfloat16),
    (FP8, 9, 1, 96, 31, (1, 1), torch.float32),
    (FP8, 1, 63, 128, 17, (1,), torch.bfloat16),
    (INT4, 9, 1, 256, 31, (1, 1), torch.bfloat16),
    (INT4, 1, 63, 64, 127, (1,), torch.float32),
]
NAMES = ["{}-h{}-q{}-d{}-b{}-{}".format(*c[:5], str(c[6])[6:]) for c in CASES]


def make(kind: str, heads: int, rows: int, d: int, size: int, blocks, dtype):
    generator = torch.Generator().manual_seed(heads + rows + d + size)
    q = (torch.randn(heads, rows, d, generator=generator) * (3.0 / d**0.5)).to(dtype)
    parts = []
    for count in blocks:
        keys = torch.randn(heads, count, size, d, generator=generator)
        keys[..., 0] += 4  # a channel that is large in every token
        parts.append(pack_keys(keys.to(dtype), kind))
    return q, parts


def reference(q: Tensor, parts: list[Packed]) -> tuple[Tensor, Tensor]:
    keys = torch.cat([unpack(part, torch.float32) for part in parts], dim=1)
    s = torch.einsum("hqd,hnbd->hqnb", q.double(), keys.double())
    return torch.logsumexp(s, dim=-1), s.amax(dim=-1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_segments_are_scanned_where_they_lie(case, form: str) -> None:
    q, parts = make(*case)
    starts = [sum(case[5][:i]) for i in range(len(parts))]
    listed = [
        (part, range(start, start + part.blocks)) for part, start in zip(parts, starts, strict=True)
    ]
    count = sum(case[5])
    found = FORMS[form](q, [KeyTable.of(listed)], count)
    for actual, expected in zip(found, reference(q, parts), strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("form", FORMS)
def test_kinds_stand_beside_each_other_and_dropped_blocks_draw_nothing(form: str) -> None:
    q, (full,) = make(FULL, 2, 5, 32, 16, (3,), torch.float32)
    _, (packed,) = make(INT8, 2, 5, 32, 17, (2,), torch.float32)
    tables = [KeyTable.of([(full, [4, -1, 0])]), KeyTable.of([(packed, [1, 3])])]
    lse, peak = FORMS[form](q, tables, 5)
    assert torch.isneginf(lse[..., 2]).all() and torch.isneginf(peak[..., 2]).all()
    for part, inside, place in ((full, [0, 2], [4, 0]), (packed, [0, 1], [1, 3])):
        expected = reference(q, [part])
        for actual, wanted in zip((lse, peak), expected, strict=True):
            difference = actual[..., place].double() - wanted[..., inside]
            assert difference.abs().max() < TOLERANCE


def test_a_program_scans_several_blocks(monkeypatch) -> None:
    from infllm_cli.kernels import segment_lookup_triton as module

    monkeypatch.setattr(module, "GROUP_FROM", 2)
    q, parts = make(INT8, 1, 3, 32, 16, (5,), torch.float32)  # the last group is not full
    found = segment_lookup_triton(q, [KeyTable.of([(parts[0], range(5))])], 5)
    for actual, expected in zip(found, reference(q, parts), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE)
