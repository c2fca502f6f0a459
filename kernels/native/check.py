"""Do the C functions give what their twins give, on sizes that fit no vector?

Tried in every process before they are used, in a few milliseconds: a compiler or a processor of a
kind that nobody here has seen may have its own idea of them.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import torch
from torch import Tensor

from ..host_gather import host_gather, host_gather_plain
from ..store_codec import FULL, INT8, Packed
from .library import Native, PartArgument, parts_argument, work_floats
from .twins import Case, attend_torch, choose_torch, load_torch, note_torch, scan_torch, turn

CASES = (
    Case(),
    Case(
        kv_heads=1,
        group=5,
        dim=72,
        value_dim=40,
        half=20,
        interleaved=True,
        block_tokens=33,
        parts=((3, FULL), (2, INT8)),
        keeps_sums=False,
    ),
)
# Largest difference, of the largest number: of sums in another order, with another exponential; of
# what is rounded to bfloat16; of what follows from scores that are rounded to it.
EXACT, ROUNDED, BEHIND_ROUNDED = 3e-5, 2**-7, 2**-5

Pair = tuple[Tensor, Tensor]  # what a function gives, and what its twin does


def differences(native: Native, cases: tuple[Case, ...] = CASES) -> list[str]:
    """The functions whose results differ from their twins' by more than rounding."""
    wrong = set()
    for case in cases:
        for name, (ours, twin) in results(native, case).items():
            if name.startswith(("scan", "attend")):
                limit = BEHIND_ROUNDED
            else:
                limit = ROUNDED if twin.dtype is torch.bfloat16 else EXACT
            if not difference(ours, twin) <= limit:  # also catches NaN
                wrong.add(name)
    return sorted(wrong)


def difference(ours: Tensor, twin: Tensor) -> float:
    """The largest, of the largest number there."""
    ours, twin = ours.double(), twin.double()
    return float((ours - twin).abs().max() / twin.abs().max().clamp(min=1e-30))


@torch.inference_mode()
def results(native: Native, case: Case) -> dict[str, Pair]:
    """What each function and its twin give, by name; each is given what the twin before it gave."""
    case.restart()
    found: dict[str, Pair] = {}
    size, lead, last = case.block_tokens, case.lead, case.lead + case.held - 1
    layer = native.layer(
        (case.heads, case.kv_heads, case.dim, case.value_dim),
        half=case.half,
        interleaved=case.interleaved,
        block_tokens=size,
        scaling=case.scaling,
    )
    slots = lead + case.held + 2
    rotated, values, raw = (
        case.numbers(case.kv_heads, slots, dim) for dim in (case.dim, case.value_dim, case.dim)
    )
    sums = case.numbers(case.kv_heads, slots, case.dim, dtype=torch.float32)
    native.place(layer, rotated, values, raw, sums if case.keeps_sums else None)

    # One token, two places apart from head to head, as one of two that a model computes at once.
    q, k, v = (
        case.numbers(heads, 2, dim)[:, 0]
        for heads, dim in (
            (case.heads, case.dim),
            (case.kv_heads, case.dim),
            (case.kv_heads, case.value_dim),
        )
    )
    at, far = case.angles(1), case.angles(1)
    own, folded = (torch.empty(case.heads, case.dim, dtype=q.dtype) for _ in range(2))
    before = sums[:, last - 1].clone()
    native.begin(
        byref(layer),
        last,
        lead,
        *(part for x in (q, k, v) for part in (x.data_ptr(), x.stride(0))),
        *(x.data_ptr() for x in (*at, *far)),
        own.data_ptr(),
        folded.data_ptr(),
    )
    turned = turn(q, *at, case.interleaved)
    scaled = (turn(q, *far, case.interleaved).float() * case.scaling).bfloat16()
    found["begin: queries"] = own, turned
    found["begin: lookup"] = folded, scaled
    found["begin: key"] = rotated[:, last].clone(), turn(k, *at, case.interleaved)
    found["begin: value"] = values[:, last].clone(), v
    found["begin: raw key"] = raw[:, last].clone(), k
    if case.keeps_sums:
        total = before + turned.float().unflatten(0, (case.kv_heads, -1)).sum(dim=1)
        found["begin: sums"] = sums[:, last].clone(), total

    stored = case.stored()
    table = parts_argument(stored)
    grouped = scaled.unflatten(0, (case.kv_heads, -1)).contiguous()
    lse, peak = torch.empty(2, case.kv_heads, case.group, case.blocks).unbind()
    for first in range(len(stored)):  # in several calls, as of mapped files
        native.scan(
            byref(layer),
            byref(table, first * sizeof(PartArgument)),
            1,
            grouped.data_ptr(),
            case.group,
            sum(count for count, _ in case.parts[:first]),
            case.blocks,
            lse.data_ptr(),
            peak.data_ptr(),
        )
    twin_lse, twin_peak = scan_torch(grouped, stored)
    found["scan: lse"], found["scan: peak"] = (lse, twin_lse), (peak, twin_peak)

    listed = torch.arange(case.blocks).flip(0)[: case.blocks - 1].repeat(case.kv_heads, 1)
    listed[-1] = listed[-1].roll(1)  # each head has its own
    some_lse, some_peak = torch.empty(2, case.kv_heads, case.group, listed.shape[1]).unbind()
    native.scan_listed(
        byref(layer),
        table,
        len(stored),
        listed.data_ptr(),
        listed.shape[1],
        grouped.data_ptr(),
        case.group,
        some_lse.data_ptr(),
        some_peak.data_ptr(),
    )
    where = listed[:, None].expand(-1, case.group, -1)
    found["scan listed: lse"] = some_lse, twin_lse.gather(2, where)
    found["scan listed: peak"] = some_peak, twin_peak.gather(2, where)

    mass = torch.empty(case.kv_heads, case.blocks)
    blocks = torch.empty(case.kv_heads, case.chosen, dtype=torch.int64)
    used = twin_lse.clone().contiguous()
    counts = (case.group, case.blocks, case.chosen)
    native.choose(byref(layer), used.data_ptr(), *counts, mass.data_ptr(), blocks.data_ptr())
    twin_mass, twin_blocks = choose_torch(twin_lse, case.chosen)
    found["choose: mass"], found["choose: blocks"] = (mass, twin_mass), (blocks, twin_blocks)

    places = case.angles(case.chosen * size)
    there = twin_blocks.clone()
    there[0, 0] = there[-1, -1] = -1  # those two are missing
    twin_keys, twin_values = load_torch(case, stored, twin_blocks, *places)
    context = slice(case.sink_tokens, lead)
    rotated[:, context], values[:, context] = twin_keys, twin_values
    gone = twin_blocks != there
    for tensor in (rotated, values):
        tensor[:, context].unflatten(1, (case.chosen, size))[gone] = 7
    native.load(
        byref(layer),
        table,
        len(stored),
        twin_blocks.data_ptr(),
        there.data_ptr(),
        case.chosen,
        lead,
        *(x.data_ptr() for x in places),
    )
    found["load: keys"] = rotated[:, context].clone(), twin_keys
    found["load: values"] = values[:, context].clone(), twin_values

    keys = last + 1
    out = torch.empty(case.heads, case.value_dim, dtype=torch.bfloat16)
    per_key = torch.empty(case.kv_heads, keys)
    work = torch.empty(work_floats(case.heads, keys, case.value_dim))
    pointers = (out.data_ptr(), per_key.data_ptr(), work.data_ptr())
    native.attend(byref(layer), turned.contiguous().data_ptr(), 0, keys, *pointers)
    twin_out, twin_per_key = attend_torch(
        turned, rotated[:, :keys], values[:, :keys], case.scaling, bool(layer.rounds)
    )
    found["attend: out"], found["attend: keys"] = (out, twin_out), (per_key, twin_per_key)

    start = case.sink_tokens + case.blocks * size
    drawn = case.numbers(start + case.held, dtype=torch.float32)
    twin_drawn = note_torch(case, twin_per_key, twin_blocks, start, drawn)
    given = twin_per_key.contiguous()
    tiers = (twin_blocks.data_ptr(), case.chosen, case.sink_tokens, start)
    native.note(byref(layer), given.data_ptr(), keys, *tiers, drawn.data_ptr())
    found["note"] = drawn, twin_drawn
    found["gather"] = _gathered(native, stored, case)
    return found


def _gathered(native: Native, stored: list[tuple[Packed, Packed]], case: Case) -> Pair:
    """Blocks of the last part, and single tokens of them, behind each other."""
    keys, values = (packed.codes for packed in stored[-1])
    pieces = [keys[:, 0], keys[:, -1], values[:, -1, :1]]
    addresses = torch.tensor([[head.data_ptr() for head in piece] for piece in pieces])
    sizes = [piece[0].nbytes for piece in pieces]
    offsets = [case.kv_heads * sum(sizes[:kind]) + 3 * kind for kind in range(len(sizes))]
    ours = torch.zeros(case.kv_heads * sum(sizes) + 3 * len(sizes), dtype=torch.uint8)
    twin = ours.clone()
    host_gather(addresses, sizes, offsets, ours, native)
    host_gather_plain(addresses, sizes, offsets, twin)
    return ours, twin
