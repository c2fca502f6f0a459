"""What `check` runs: every kernel on ordinary sizes, with its twin, a tolerance and a floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .block_relevance import block_relevance_torch
from .dispatch import find
from .exact_lookup import exact_lookup_torch
from .floors import OF_BANDWIDTH, SCORED_MS
from .representative_scores import representative_scores_torch
from .segment_lookup import KeyTable, segment_lookup_torch
from .store_codec import (
    FULL,
    KINDS,
    Packed,
    pack_keys_torch,
    pack_values_torch,
    unpack_into_torch,
)
from .tiered_attention import Tiers, tiered_attention_torch

# Largest difference between a kernel and its twin, for outputs of order 1 and scores of about 10.
# Attention in 16 bits rounds keys, weights and outputs; a scan with few bfloat16 queries rounds
# each of its scores once in the twin.
ATTENTION, SCORES, EXACT = 3e-2, 6.3e-2, 0.0
MASS = 1e-2  # of the queries, whose masses add up to their number
RELEVANCE = 1e-3  # of the largest


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model and its memory; `stored` blocks are scanned, `known` ones have representatives."""

    heads: int
    kv_heads: int
    d: int
    block: int
    sinks: int
    blocks: int
    window: int
    chunk: int
    stored: int
    known: int


# A Llama-3.1-8B with 4,096 active tokens, 128K tokens stored and a million known.
ORDINARY = Sizes(32, 8, 128, 128, 64, 8, 3008, 512, 1024, 8000)
# Its launches with little data, for the compiler.
COMPILED = Sizes(32, 8, 128, 128, 64, 8, 1024, 512, 4, 64)
# For the interpreter.
SMALL = Sizes(4, 2, 64, 17, 3, 2, 33, 65, 5, 40)


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table.

    Attributes:
        kernel, what: its name, and on what.
        run, twin: the two forms.
        other: torch's own attention on the same numbers, joined already; None: there is none.
        tolerance: of the difference, absolute or of the largest number.
        relative: which of the two.
        bytes: that the kernel must read and write.
        floor_ms: what it may take at most; None: nothing was said.
        of_bandwidth: or as many times what the memory takes for the bytes.
    """

    kernel: str
    what: str
    run: Callable[[], Any]
    twin: Callable[[], Any]
    tolerance: float
    other: Callable[[], Any] | None = None
    relative: bool = False
    bytes: int = 0
    floor_ms: float | None = None
    of_bandwidth: float | None = None


class Cases:
    """All cases for a device and sizes."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers."""
        x = torch.randn(shape, generator=self.generator, device=self.device)
        return (x * scale).to(self.dtype)

    def all(self) -> Iterator[Case]:
        """One by one, so that the memory of one is free for the next."""
        yield from self.attention()
        yield from self.scans()
        yield from self.relevance()
        yield from self.codecs()

    def tiers(self) -> Tiers:
        """Sinks, blocks in slots, window."""
        s = self.sizes
        capacity = 2 * s.blocks
        lead = s.sinks + s.blocks * s.block
        turns = torch.arange(lead, device=self.device)[:, None] * 1e4 ** -torch.linspace(
            0, 1, s.d // 2, device=self.device
        )
        rows = torch.arange(s.kv_heads, device=self.device)[:, None] * capacity
        slots = rows + torch.arange(0, capacity, 2, device=self.device)
        return Tiers(
            self.draw(s.kv_heads, s.sinks, s.d),
            self.draw(s.kv_heads, s.sinks, s.d),
            self.draw(s.kv_heads * capacity, s.block, s.d),
            self.draw(s.kv_heads * capacity, s.block, s.d),
            slots.to(torch.int32),
            self.draw(s.kv_heads, s.window, s.d),
            self.draw(s.kv_heads, s.window, s.d),
            turns.cos(),
            turns.sin(),
        )

    def attention(self) -> Iterator[Case]:
        """`tiered_attention`: a token, a chunk, and what they draw."""
        s, tiers, scaling = self.sizes, self.tiers(), self.sizes.d**-0.5
        keys, values = tiers.joined()
        kernel = find("tiered_attention")
        for length in (1, s.chunk if s.chunk <= s.window else s.window):
            q = self.draw(s.heads, length, s.d)
            visible = None
            if length > 1:
                row = torch.arange(tiers.keys - length, tiers.keys, device=self.device)
                visible = torch.arange(tiers.keys, device=self.device)[None] <= row[:, None]

            def sdpa(q: Tensor = q, visible: Tensor | None = visible) -> Tensor:
                return F.scaled_dot_product_attention(
                    q[None], keys[None], values[None], attn_mask=visible, enable_gqa=True
                )

            moved = keys.nbytes + values.nbytes + 2 * q.nbytes
            yield Case(
                "tiered_attention",
                f"{length} of {tiers.keys} tokens",
                lambda q=q: kernel(q, tiers, scaling)[0],
                lambda q=q: tiered_attention_torch(q, tiers, scaling)[0],
                ATTENTION,
                sdpa,
                bytes=moved,
                of_bandwidth=OF_BANDWIDTH if length == 1 else None,
            )
            yield Case(
                "tiered_attention",
                f"{length}, mass of keys",
                lambda q=q: kernel(q, tiers, scaling, None, "keys")[1],
                lambda q=q: tiered_attention_torch(q, tiers, scaling, None, "keys")[1],
                MASS * length * (s.heads // s.kv_heads),
                bytes=moved + keys.nbytes,
            )

    def scans(self) -> Iterator[Case]:
        """`exact_lookup`, and `segment_lookup` of every kind."""
        s = self.sizes
        q = self.draw(s.kv_heads, s.heads // s.kv_heads, s.d, scale=3 * s.d**-0.5)
        keys = self.draw(s.kv_heads, s.stored, s.block, s.d)
        yield Case(
            "exact_lookup",
            f"{s.stored} blocks",
            lambda: find("exact_lookup")(q, keys, s.stored),
            lambda: exact_lookup_torch(q, keys, s.stored),
            SCORES,
            bytes=keys.nbytes,
        )
        for kind in KINDS:
            parts: list[tuple[Packed, range]] = []
            for first in range(0, s.stored, 64):
                part = keys[:, first : first + 64].contiguous()
                packed = Packed(FULL, s.d, part) if kind == FULL else pack_keys_torch(part, kind)
                parts.append((packed, range(first, first + part.shape[1])))
            table = KeyTable.of(parts)
            yield Case(
                "segment_lookup",
                f"{s.stored} blocks, {kind}",
                lambda t=table: find("segment_lookup")(q, [t], s.stored),
                lambda t=table: segment_lookup_torch(q, [t], s.stored),
                SCORES,
                bytes=sum(packed.nbytes for packed, _ in parts),
            )

    def relevance(self) -> Iterator[Case]:
        """`block_relevance` by every rule, `representative_scores`."""
        s = self.sizes
        per_block = 4
        sums = self.draw(s.kv_heads, s.known, 1, s.d).float()
        each = self.draw(s.kv_heads, s.known, per_block, s.d)
        one = self.draw(s.kv_heads, 1, s.d, scale=s.d**-0.5).float()
        many = self.draw(s.kv_heads, 64, s.d, scale=s.d**-0.5)
        for rule, q, keys in (("sum", one, sums), ("max", many, each), ("mass", many, each)):
            yield Case(
                "block_relevance",
                f"{s.known} blocks, {rule}",
                lambda r=rule, q=q, k=keys: find("block_relevance")(q, k, r),
                lambda r=rule, q=q, k=keys: block_relevance_torch(q, k, r),
                RELEVANCE,
                relative=True,
                bytes=keys.nbytes,
                floor_ms=SCORED_MS if rule == "sum" else None,
            )
        prefix = self.draw(s.kv_heads, s.window, s.d).float().cumsum(dim=1)
        tokens = min(s.chunk, s.window // 2)
        keys = self.draw(s.kv_heads, s.window, s.d)[:, :tokens]
        ahead = s.window - tokens
        yield Case(
            "representative_scores",
            f"{tokens} tokens",
            lambda: find("representative_scores")(prefix, keys, ahead),
            lambda: representative_scores_torch(prefix, keys, ahead),
            RELEVANCE,
            relative=True,
            bytes=keys.nbytes + 2 * 4 * keys.numel(),
        )

    def codecs(self) -> Iterator[Case]:
        """`store_codec`: a segment packed, the blocks of a step unpacked."""
        s = self.sizes
        segment = self.draw(s.kv_heads, min(64, s.stored), s.block, s.d)
        slots = torch.arange(s.kv_heads * s.blocks, device=self.device)
        out = self.draw(len(slots), s.block, s.d)
        twin_out = out.clone()
        for kind in KINDS[1:]:
            for name, twin in (("pack_keys", pack_keys_torch), ("pack_values", pack_values_torch)):
                yield Case(
                    f"store_codec.{name}",
                    f"a segment, {kind}",
                    lambda n=name, k=kind: _bytes(find(f"store_codec.{n}")(segment, k)),
                    lambda t=twin, k=kind: _bytes(t(segment, k)),
                    EXACT,
                    bytes=segment.nbytes,
                )
                some = twin(segment[:, : s.blocks].contiguous(), kind)
                if some.blocks * s.kv_heads != len(slots):
                    continue

                def run(p: Packed = some) -> Tensor:
                    find("store_codec.unpack_into")(p, out, slots)
                    return out

                def plain(p: Packed = some) -> Tensor:
                    unpack_into_torch(p, twin_out, slots)
                    return twin_out

                what = f"{s.blocks} blocks of {name.removeprefix('pack_')}, {kind}"
                name = "store_codec.unpack_into"
                yield Case(name, what, run, plain, EXACT, bytes=out.nbytes + some.nbytes)


def _bytes(packed: Packed) -> list[Tensor]:
    """What was packed, to be compared bit for bit."""
    return [tensor.view(torch.uint8) for tensor in packed.tensors().values()]


def difference(a: Any, b: Any, *, relative: bool) -> float:
    """Of results of one shape: the largest, or that over the largest number."""
    if isinstance(a, (tuple, list)):
        pairs = zip(a, b, strict=True)
        return max(difference(x, y, relative=relative) for x, y in pairs)
    x, y = a.double(), b.double()
    assert x.shape == y.shape
    same = (x == y) | (x.isnan() & y.isnan())
    if bool(same.all()):
        return 0.0
    found = float((x - y).abs().masked_fill(same, 0).max())
    return found / max(float(y.abs().max()), 1e-30) if relative else found
