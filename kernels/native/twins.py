"""What each C function computes, in plain torch, on the tensors of a `Case`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..block_mass import block_mass
from ..packed_lookup import packed_lookup
from ..store_codec import FULL, INT8, Packed, pack_keys, pack_values, unpack


@dataclass(frozen=True, slots=True)
class Case:
    """Sizes of a layer, of one token's step, and random numbers for them.

    Attributes:
        group: query heads of a KV head.
        half: dimensions that turn, divided by two.
        parts: blocks and kind of each part.
        chosen: blocks that are loaded.
        held: tokens in the window, the last one new.
    """

    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    value_dim: int = 64
    half: int = 32
    interleaved: bool = False
    block_tokens: int = 17
    sink_tokens: int = 3
    parts: tuple[tuple[int, str], ...] = ((4, INT8), (1, INT8), (2, FULL))
    chosen: int = 3
    held: int = 5
    scaling: float = 0.125
    keeps_sums: bool = True
    seed: int = 0
    _random: torch.Generator = field(default_factory=torch.Generator, init=False, compare=False)

    def numbers(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Others at every call, the same in every process."""
        return torch.randn(*shape, generator=self._random).to(dtype)

    def restart(self) -> None:
        """Begin with the first numbers again."""
        self._random.manual_seed(self.seed)

    @property
    def heads(self) -> int:
        """H."""
        return self.kv_heads * self.group

    @property
    def blocks(self) -> int:
        """N."""
        return sum(count for count, _ in self.parts)

    @property
    def lead(self) -> int:
        """Slots of sinks and loaded blocks."""
        return self.sink_tokens + self.chosen * self.block_tokens

    def stored(self) -> list[tuple[Packed, Packed]]:
        """Keys and values of the parts; those of the last one have room for more blocks."""
        found = []
        for index, (count, kind) in enumerate(self.parts):
            room = count + (index + 1 == len(self.parts) and kind == FULL)
            shape = (self.kv_heads, room, self.block_tokens)
            keys = pack_keys(2 * self.numbers(*shape, self.dim), kind)
            values = pack_values(self.numbers(*shape, self.value_dim), kind)
            found.append((keys.cut(slice(count)), values.cut(slice(count))))
        return found

    def angles(self, positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [positions, half]."""
        angles = 3 * self.numbers(positions, self.half, dtype=torch.float32)
        return angles.cos(), angles.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [.., n, d] turned by cosines and sines [n, half]; as `Rotary.rotate` of the memory."""
    half, out = cos.shape[-1], x.clone()
    if interleaved:
        pair = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    else:
        pair = (slice(0, half), slice(half, 2 * half))
    a, b = x[..., pair[0]], x[..., pair[1]]
    out[..., pair[0]] = torch.addcmul(a * cos, b, sin, value=-1).to(x.dtype)
    out[..., pair[1]] = torch.addcmul(b * cos, a, sin).to(x.dtype)
    return out


def scan_torch(q: Tensor, stored: list[tuple[Packed, Packed]]) -> tuple[Tensor, Tensor]:
    """lse and peak [H_kv, Q, N] of queries [H_kv, Q, d], scaled."""
    found = [packed_lookup(q, keys) for keys, _ in stored]
    lse, peak = (torch.cat(pieces, dim=-1) for pieces in zip(*found, strict=True))
    return lse, peak


def choose_torch(lse: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Mass [H_kv, N] of lse [H_kv, Q, N], and the blocks of the greatest in document order."""
    mass = block_mass(lse)
    return mass, mass.topk(chosen, dim=1).indices.sort(dim=1).values


def load_torch(
    case: Case, stored: list[tuple[Packed, Packed]], blocks: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Blocks [H_kv, n] unpacked, keys turned to their places: [H_kv, n * B, d] each."""
    keys, values = (
        torch.cat([unpack(pair[which], torch.bfloat16) for pair in stored], dim=1)
        for which in (0, 1)
    )
    heads = torch.arange(case.kv_heads)[:, None]
    raw = keys[heads, blocks].flatten(1, 2)
    return turn(raw, cos, sin, case.interleaved), values[heads, blocks].flatten(1, 2)


def attend_torch(
    q: Tensor, keys: Tensor, values: Tensor, scaling: float, rounds: bool
) -> tuple[Tensor, Tensor]:
    """Attention of q [H, d] over keys, values [H_kv, T, d] -> [H, d_v], and [H_kv, T] of each key.

    As `attend_weights` of the memory for one token; `rounds`: scores are bfloat16 first.
    """
    folded = q.unflatten(0, (len(keys), -1)).float()
    scores = torch.matmul(folded, keys.float().transpose(1, 2))
    scores = (scores.bfloat16().float() if rounds else scores) * scaling
    weights = torch.softmax(scores, dim=-1)
    out = torch.matmul(weights.bfloat16().float(), values.float()).bfloat16()
    return out.flatten(0, 1), weights.sum(dim=1)


def note_torch(case: Case, per_key: Tensor, blocks: Tensor, start: int, mass: Tensor) -> Tensor:
    """Mass by absolute position with per_key [H_kv, T] added; as `note_tiers` of the memory."""
    size, sinks = case.block_tokens, case.sink_tokens
    mass = mass.clone()
    mass[:sinks] += per_key[:, :sinks].sum(dim=0)
    window = per_key[:, case.lead :].sum(dim=0)
    mass[start : start + len(window)] += window
    positions = sinks + blocks[..., None] * size + torch.arange(size)
    return mass.index_add_(0, positions.flatten(), per_key[:, sinks : case.lead].flatten())
