"""Keys and values in fewer bytes than the model's own, and back.

A codec turns what a segment holds, `[H_kv, N, B, d]`, into codes and a few constants:

* **keys** `x = code * scale + low` with one scale and one offset per channel (they have channels
  that are large in every token; KIVI, arXiv 2402.02750). The constants hold for all N blocks of the
  segment, so that a scan multiplies the codes as they are and folds the constants into the query:
  one product per segment. With an offset, 256 levels over 64 blocks are finer (41.6 dB on a novel)
  than 255 levels around zero over a single block (40.8 dB).
* **values** with a scale (`int4`: and an offset) per token.

`int4` keys are codes of 4 bits on the grid of an `int8` codec: each block has, per channel, the
grid's point where it begins and how many points a code stands for. Codes become points of the grid
in wrapping byte arithmetic, and are scanned like `int8`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .dispatch import kernels_for

FULL, INT8, FP8, INT4 = "full", "int8", "fp8", "int4"
KINDS = (FULL, INT8, FP8, INT4)
FP8_MOST = 448.0  # float8_e4m3fn
_TINY = 1e-30  # for channels that are all the same
_NIBBLES = 15


@dataclass(frozen=True, slots=True)
class Packed:
    """What a codec stores of keys or values `[H_kv, N, B, d]`.

    Attributes:
        kind: of `KINDS`.
        dim: d.
        codes: `[H_kv, N, B, d]`: the numbers themselves, int8 or float8; of int4 `[.., d / 2]`
            bytes, the first half of the channels in the low bits.
        scale, low: keys `[H_kv, 1, 1, d]` float32, values `[H_kv, N, B, 1]` bfloat16.
        step, base: of int4 keys, `[H_kv, N, 1, d]` uint8: a code's step and where it begins, in
            points of the grid (modulo 256).
    """

    kind: str
    dim: int
    codes: Tensor
    scale: Tensor | None = None
    low: Tensor | None = None
    step: Tensor | None = None
    base: Tensor | None = None

    @property
    def blocks(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and constants."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Packed:
        """The same with each tensor changed."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def cut(self, blocks: slice) -> Packed:
        """Some of the blocks, not copied."""
        return self.map(lambda tensor: tensor if _is_shared(self, tensor) else tensor[:, blocks])

    def take(self, blocks: Tensor) -> Packed:
        """Blocks by their indices, copied."""
        return self.map(lambda t: t if _is_shared(self, t) else t.index_select(1, blocks))


def _is_shared(packed: Packed, tensor: Tensor) -> bool:
    """Whether a constant holds for all blocks."""
    return tensor.shape[1] == 1 and packed.blocks != 1


Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]


def pick(packed: list[tuple[Packed, int, int]], empty: Empty | None = None) -> Packed:
    """Blocks (head, index) of several of one kind `[m]` -> one of `[m, 1, B, d]`, copied.

    `empty` gives the memory that they are copied into.
    """
    first = packed[0][0]
    found: dict[str, Tensor] = {}
    for name in first.tensors():
        rows = []
        for source, head, index in packed:
            tensor = getattr(source, name)
            rows.append(tensor[head, 0 if tensor.shape[1] == 1 else index])
        if empty is None:
            found[name] = torch.stack(rows)[:, None]
        else:
            into = empty((len(rows), *rows[0].shape), rows[0].dtype)
            found[name] = torch.stack(rows, out=into)[:, None]
    return replace(first, **found)


# --- packing -------------------------------------------------------------------------------------


def pack_keys(keys: Tensor, kind: str) -> Packed:
    """Keys `[H_kv, N, B, d]`, per channel."""
    if kind == FULL:
        return Packed(FULL, keys.shape[-1], keys)
    run = kernels_for(keys.device.type).run
    return run("store_codec.pack_keys", pack_keys_torch, keys, kind)


def pack_keys_torch(keys: Tensor, kind: str) -> Packed:
    """Do the same in plain torch: the kernel's twin."""
    dim = keys.shape[-1]
    x = keys.float()
    if kind == FP8:
        scale = _positive(x.abs().amax(dim=(1, 2), keepdim=True) / FP8_MOST)
        return Packed(FP8, dim, (x / scale).to(torch.float8_e4m3fn), scale)
    low = x.amin(dim=(1, 2), keepdim=True)
    scale = _positive((x.amax(dim=(1, 2), keepdim=True) - low) / 255)
    grid = ((x - low) / scale).round_().clamp_(0, 255)
    low = low + 128 * scale  # codes are signed
    if kind == INT8:
        return Packed(INT8, dim, (grid - 128).to(torch.int8), scale, low)
    base = grid.amin(dim=2, keepdim=True)
    step = ((grid.amax(dim=2, keepdim=True) - base) / _NIBBLES).ceil_().clamp_(min=1)
    # A code that is rounded up must not leave the grid: it would begin anew.
    codes = torch.minimum(((grid - base) / step).round_(), ((255 - base) / step).floor_())
    codes = _to_nibbles(codes.to(torch.uint8))
    # The first point of the signed grid is -128: 128 in a byte.
    base = (base.to(torch.int16) + 128).remainder_(256).to(torch.uint8)
    return Packed(INT4, dim, codes, scale, low, step.to(torch.uint8), base)


def pack_values(values: Tensor, kind: str) -> Packed:
    """Values `[H_kv, N, B, d]`, per token."""
    if kind == FULL:
        return Packed(FULL, values.shape[-1], values)
    run = kernels_for(values.device.type).run
    return run("store_codec.pack_values", pack_values_torch, values, kind)


def pack_values_torch(values: Tensor, kind: str) -> Packed:
    """Do the same in plain torch: the kernel's twin."""
    dim = values.shape[-1]
    x = values.float()
    if kind == INT4:
        low = x.amin(dim=-1, keepdim=True).bfloat16()
        scale = _positive((x.amax(dim=-1, keepdim=True) - low.float()) / _NIBBLES).bfloat16()
        codes = ((x - low.float()) / scale.float()).round_().clamp_(0, _NIBBLES)
        return Packed(INT4, dim, _to_nibbles(codes.to(torch.uint8)), scale, low)
    most = 127.0 if kind == INT8 else FP8_MOST
    scale = _positive(x.abs().amax(dim=-1, keepdim=True) / most).bfloat16()
    # The scale was rounded: the largest number may lie just above the largest code.
    codes = (x / scale.float()).clamp_(-most, most)
    if kind == INT8:
        return Packed(INT8, dim, codes.round_().to(torch.int8), scale)
    return Packed(FP8, dim, codes.to(torch.float8_e4m3fn), scale)


def _positive(scale: Tensor) -> Tensor:
    return scale.clamp_(min=_TINY)


def _to_nibbles(codes: Tensor) -> Tensor:
    """Codes `[.., d]` uint8 of 4 bits -> `[.., ceil(d / 2)]`."""
    half = (codes.shape[-1] + 1) // 2
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[-1] - half] |= codes[..., half:] << 4
    return packed


# --- unpacking -----------------------------------------------------------------------------------


def unpack(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The numbers `[H_kv, N, B, d]`, as near as the codec keeps them."""
    if packed.kind == FULL:
        return packed.codes.to(dtype)
    assert packed.scale is not None
    if packed.kind == FP8:
        numbers = widen_fp8(packed.codes).float()
    elif packed.step is not None:
        numbers = grid_codes(packed).float()
    elif packed.kind == INT4:
        numbers = _from_nibbles(packed.codes, packed.dim).float()
    else:
        numbers = packed.codes.float()
    numbers.mul_(packed.scale)
    if packed.low is not None:
        numbers.add_(packed.low)
    return numbers.to(dtype)


def unpack_into(packed: Packed, out: Tensor, slots: Tensor) -> None:
    """Write blocks to slots.

    Args:
        packed: `[H, N, B, d]`, contiguous.
        out: `[C, B, d]` in the dtype that is wanted, contiguous; slots that are not named stay.
        slots: `[H * N]` int64, where each block goes; no two the same.
    """
    run = kernels_for(out.device.type).run
    run("store_codec.unpack_into", unpack_into_torch, packed, out, slots)


def unpack_into_torch(packed: Packed, out: Tensor, slots: Tensor) -> None:
    """Do the same in plain torch: the kernel's twin."""
    out.index_copy_(0, slots, unpack(packed, out.dtype).flatten(0, 1))


def _from_nibbles(packed: Tensor, dim: int) -> Tensor:
    """`[.., ceil(d / 2)]` -> codes `[.., d]` uint8."""
    half = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], dim)
    codes[..., :half] = packed & _NIBBLES
    codes[..., half:] = packed[..., : dim - half] >> 4
    return codes


def grid_codes(packed: Packed) -> Tensor:
    """Int4 keys as codes `[H_kv, N, B, d]` int8 of the grid that they lie on."""
    assert packed.step is not None and packed.base is not None
    codes = _from_nibbles(packed.codes, packed.dim)
    # Bytes wrap around, which is what makes points of a signed grid of them.
    return codes.mul_(packed.step).add_(packed.base).view(torch.int8)


def widen_fp8(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> bfloat16, exactly: eight times as fast as the conversion of torch.

    Sign, exponent and mantissa are moved to where bfloat16 has them, which gives the number times
    2^-120; so do subnormal numbers.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign is extended
    bits.bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
    return bits.view(torch.bfloat16).mul_(2.0**120)


def widen_fp8_torch(codes: Tensor) -> Tensor:
    """Do the same plainly: the twin."""
    return codes.to(torch.bfloat16)
