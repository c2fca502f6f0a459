"""Attention over tiers: kernels and twin against the definition, on odd sizes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import pytest
import torch
from infllm_cli.kernels.tiered_attention import Tiers, tiered_attention_torch
from infllm_cli.kernels.tiered_attention_triton import tiered_attention_triton
from torch import Tensor

# Largest difference of outputs of order 1 from the definition in float64. In bfloat16 a rotated
# key is rounded once, and so are weights and outputs.
OUT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
# Of masses, which add up to the number of queries: a share of that number.
MASS_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    length: int
    window: int
    sinks: int
    blocks: int
    size: int
    d: int
    dv: int
    turned: int
    dtype: torch.dtype
    interleaved: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        return (
            f"h{self.heads}of{self.kv_heads}-l{self.length}-w{self.window}-s{self.sinks}"
            f"-b{self.blocks}x{self.size}-d{self.d}.{self.dv}-r{self.turned}-{str(self.dtype)[6:]}"
        )


F32, BF16 = torch.float32, torch.bfloat16
CASES = [
    Case(1, 1, 1, 63, 4, 2, 32, 64, 64, 64, BF16),  # one token: split
    Case(9, 3, 1, 111, 3, 3, 31, 64, 64, 64, F32),
    Case(9, 3, 1, 200, 64, 2, 33, 96, 96, 96, BF16),
    Case(3, 3, 1, 1, 0, 0, 32, 128, 128, 128, F32),  # the very first token
    Case(9, 3, 7, 64, 5, 1, 32, 64, 64, 64, F32),  # a few: still split
    Case(1, 1, 63, 63, 0, 0, 32, 64, 64, 64, F32),  # a first chunk: chunk
    Case(3, 1, 111, 130, 4, 2, 33, 64, 64, 64, BF16),
    Case(9, 3, 63, 111, 3, 1, 31, 96, 96, 96, F32),
    Case(3, 3, 111, 111, 4, 2, 32, 128, 128, 128, BF16),
    Case(1, 1, 65, 111, 4, 1, 33, 256, 256, 256, F32),
    Case(2, 1, 63, 70, 4, 2, 16, 20, 14, 16, F32),  # 4 of 20 dimensions do not turn
    Case(2, 1, 33, 40, 4, 1, 16, 32, 32, 32, F32, True),
    Case(4, 2, 33, 40, 4, 2, 16, 24, 24, 24, F32, False, 2.0),
    Case(4, 2, 1, 40, 4, 2, 16, 24, 24, 24, F32, False, 2.0),
    Case(2, 2, 1, 40, 4, 2, 16, 24, 24, 0, F32),  # no rotation
    Case(9, 9, 1, 129, 4, 2, 127, 128, 128, 128, BF16),
    Case(9, 3, 1, 63, 1, 1, 129, 256, 256, 256, BF16),
    Case(9, 1, 63, 127, 4, 1, 129, 128, 128, 128, F32),  # group 9
    Case(9, 9, 111, 129, 63, 1, 31, 64, 64, 64, BF16),
    Case(3, 1, 63, 63, 4, 2, 33, 256, 256, 256, BF16),
    Case(3, 1, 111, 128, 111, 1, 32, 96, 96, 96, BF16),
]


def make(case: Case) -> tuple[Tensor, Tiers, float]:
    generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(case.dtype)  # noqa: E731
    capacity = case.blocks * case.kv_heads + 3
    slots = torch.randperm(capacity, generator=generator)[: case.kv_heads * case.blocks]
    # The window is part of a larger buffer, as in memory; what lies around it must not be read.
    around = torch.full((case.kv_heads, case.window + 9, case.d), float("nan"), dtype=case.dtype)
    keys = around.clone()
    keys[:, 5 : 5 + case.window] = draw(case.kv_heads, case.window, case.d)
    values = around[..., :1].expand(-1, -1, case.dv).clone()
    values[:, 5 : 5 + case.window] = draw(case.kv_heads, case.window, case.dv)
    lead = case.sinks + case.blocks * case.size
    angles = torch.arange(7, 7 + lead)[:, None] * 30.0 ** -torch.linspace(0, 1, case.turned // 2)
    tiers = Tiers(
        sink_keys=draw(case.kv_heads, case.sinks, case.d),
        sink_values=draw(case.kv_heads, case.sinks, case.dv),
        slot_keys=draw(capacity, case.size, case.d),
        slot_values=draw(capacity, case.size, case.dv),
        slots=slots.view(case.kv_heads, case.blocks).to(torch.int32),
        window_keys=keys[:, 5 : 5 + case.window],
        window_values=values[:, 5 : 5 + case.window],
        cos=angles.cos(),
        sin=angles.sin(),
        interleaved=case.interleaved,
    )
    return draw(case.heads, case.length, case.d), tiers, 1.5 / case.d**0.5


def definition(q: Tensor, tiers: Tiers, scaling: float, softcap: float | None):
    """Head by head and block by block, in float64."""
    half = tiers.cos.shape[1]
    group = q.shape[0] // tiers.window_keys.shape[0]
    outs, masses = [], []
    for head in range(tiers.window_keys.shape[0]):
        lead = [tiers.sink_keys[head], *(tiers.slot_keys[s] for s in tiers.slots[head])]
        x = torch.cat(lead).double()
        if half:
            turned = x[:, : 2 * half]
            pairs = turned.unflatten(1, (half, 2) if tiers.interleaved else (2, half))
            a, b = pairs.unbind(-1 if tiers.interleaved else 1)
            z = torch.complex(a, b) * torch.complex(tiers.cos, tiers.sin).to(torch.complex128)
            pairs = torch.stack([z.real, z.imag], dim=-1 if tiers.interleaved else 1)
            x = torch.cat([pairs.flatten(1), x[:, 2 * half :]], dim=1)
        keys = torch.cat([x, tiers.window_keys[head].double()])
        values = [tiers.sink_values[head], *(tiers.slot_values[s] for s in tiers.slots[head])]
        values = torch.cat([*values, tiers.window_values[head]]).double()
        s = q[head * group : (head + 1) * group].double() @ keys.T * scaling
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        own = torch.arange(len(keys)) - (len(keys) - q.shape[1])
        s = s.masked_fill(own[None, :] > torch.arange(q.shape[1])[:, None], float("-inf"))
        weights = torch.softmax(s, dim=-1)
        outs.append(weights @ values)
        masses.append(weights.sum(dim=(0, 1)))
    return torch.cat(outs), torch.stack(masses)


FORMS = {"kernel": tiered_attention_triton, "twin": tiered_attention_torch}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_tiers_share_one_softmax(case: Case, form: str) -> None:
    q, tiers, scaling = make(case)
    out, mass = FORMS[form](q, tiers, scaling, case.softcap, "keys")
    expected, drawn = definition(q, tiers, scaling, case.softcap)
    assert out.dtype == case.dtype and mass.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=OUT_TOLERANCE[case.dtype])
    queries = case.heads // case.kv_heads * case.length
    atol = MASS_TOLERANCE[case.dtype] * queries
    torch.testing.assert_close(mass.double(), drawn, rtol=0, atol=atol)
    torch.testing.assert_close(mass.sum(1), torch.full((case.kv_heads,), float(queries)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=str)
def test_the_mass_of_blocks_is_that_of_their_keys_and_costs_no_output(case: Case, form: str):
    q, tiers, scaling = make(case)
    out, by_key = FORMS[form](q, tiers, scaling, None, "keys")
    same, by_block = FORMS[form](q, tiers, scaling, None, "blocks")
    alone, nothing = FORMS[form](q, tiers, scaling, None, "none")
    assert nothing is None and torch.equal(out, same) and torch.equal(out, alone)
    lead = by_key[:, case.sinks : tiers.lead].unflatten(1, (case.blocks, case.size))
    torch.testing.assert_close(by_block, lead.sum(-1))


def test_scores_far_from_zero_neither_overflow_nor_vanish() -> None:
    q, tiers, scaling = make(CASES[4])
    expected, _ = definition(q, tiers, 300 * scaling, None)
    for form in FORMS.values():
        out, _ = form(q, tiers, 300 * scaling)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)
