"""The functions of the library, called with tensors. Shapes are the caller's business here.

What is passed is addresses: every tensor must be on the CPU, and contiguous but for the stride
from head to head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..exact_lookup import multiplies_natively
from ..store_codec import FULL, INT8, Packed

PIECE = 256  # keys, as in attend.c
MOST_DIM = 1024  # as in native.h
KINDS = (FULL, INT8)


class PartArgument(ctypes.Structure):
    """`part_t` of native.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("scale", c_void_p),
        ("low", c_void_p),
        ("values", c_void_p),
        ("by_token", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("token_stride", c_int64),
        ("blocks", c_int64),
        ("packed", c_int64),
    )


class LayerArgument(ctypes.Structure):
    """`layer_t` of native.h."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("value_dim", c_int64),
        ("half", c_int64),
        ("interleaved", c_int64),
        ("block_tokens", c_int64),
        ("rounds", c_int64),
        ("threads", c_int64),
        ("scaling", c_float),
        ("capacity", c_int64),
        ("rotated", c_void_p),
        ("values", c_void_p),
        ("raw", c_void_p),
        ("query_sums", c_void_p),
    )


P, N = c_void_p, c_int64
ARGUMENTS = {
    "infllm_scan": (P, P, N, P, N, N, N, P, P),
    "infllm_scan_listed": (P, P, N, P, N, P, N, P, P),
    "infllm_choose": (P, P, N, N, N, P, P),
    "infllm_begin": (P, N, N, P, N, P, N, P, N, P, P, P, P, P, P),
    "infllm_load": (P, P, N, P, P, N, N, P, P),
    "infllm_attend": (P, P, N, N, P, P, P),
    "infllm_note": (P, P, N, P, N, N, N, P),
    "infllm_gather": (P, N, N, P, P, P, N),
}


class Native:
    """The functions, bound.

    Args:
        library: see `compiling.library_in`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds, None
            setattr(self, name.removeprefix("infllm_"), function)

    def layer(
        self,
        shape: tuple[int, int, int, int],
        *,
        half: int,
        interleaved: bool,
        block_tokens: int,
        scaling: float,
    ) -> LayerArgument:
        """A layer of (heads, kv_heads, dim, value_dim); `place` says where its window is."""
        rounds = multiplies_natively(torch.empty(0, dtype=torch.bfloat16))
        sizes = (half, interleaved, block_tokens, rounds, torch.get_num_threads())
        return LayerArgument(*shape, *sizes, scaling)

    @staticmethod
    def place(
        layer: LayerArgument, rotated: Tensor, values: Tensor, raw: Tensor, sums: Tensor | None
    ) -> None:
        """The buffers of a window, `[H_kv, capacity, d]` each."""
        layer.capacity = rotated.shape[1]
        layer.rotated, layer.values = rotated.data_ptr(), values.data_ptr()
        layer.raw = raw.data_ptr()
        layer.query_sums = None if sums is None else sums.data_ptr()


def parts_argument(parts: Sequence[tuple[Packed, Packed]]) -> ctypes.Array[PartArgument]:
    """Keys and values `[H_kv, n, B, d]` of parts, as an array; valid as long as these live."""
    array = (PartArgument * len(parts))()
    for argument, (keys, values) in zip(array, parts, strict=True):
        assert keys.kind == values.kind
        argument.keys, argument.key_stride = keys.codes.data_ptr(), keys.codes.stride(0)
        argument.values, argument.value_stride = values.codes.data_ptr(), values.codes.stride(0)
        argument.blocks, argument.packed = keys.blocks, keys.kind == INT8
        if keys.kind == INT8:
            assert keys.scale is not None and keys.low is not None and values.scale is not None
            argument.scale, argument.low = keys.scale.data_ptr(), keys.low.data_ptr()
            argument.by_token = values.scale.data_ptr()
            argument.token_stride = values.scale.stride(0)
    return array


def can_serve(packed: Packed, *, are_keys: bool = False) -> bool:
    """Whether the functions know how this is stored, and can walk through it.

    Args:
        are_keys: the constants hold for all blocks.
    """
    if packed.kind not in KINDS or packed.dim > MOST_DIM or packed.codes.device.type != "cpu":
        return False
    if packed.kind == FULL:
        return packed.codes.dtype is torch.bfloat16 and packed.codes[0].is_contiguous()
    fixed = [packed.scale, packed.low] if are_keys else [packed.scale[0]]
    return all(tensor.is_contiguous() for tensor in [packed.codes[0], *fixed])


def work_floats(heads: int, keys: int, value_dim: int) -> int:
    """Floats that `attend` works in."""
    pieces = -(-keys // PIECE)
    return heads * (keys + pieces * (2 + value_dim))
