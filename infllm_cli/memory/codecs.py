"""In how many bytes the keys and values of blocks are stored. Arithmetic, no tensors.

What the codecs do is in `infllm_cli.kernels.store_codec`.
"""

from __future__ import annotations

import enum


class Codec(enum.Enum):
    """How sealed blocks are stored; the tail that is still being filled is as the model made it."""

    FULL = "full"  # in the model's own precision
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


def block_bytes(
    codec: Codec, kv_heads: int, tokens: int, key_dim: int, value_dim: int, value_bytes: int
) -> int:
    """Bytes of a block of `tokens` tokens; `value_bytes` of a number of the model."""
    if codec is Codec.FULL:
        return kv_heads * tokens * (key_dim + value_dim) * value_bytes
    if codec is Codec.INT4:
        codes = (key_dim + 1) // 2 + (value_dim + 1) // 2
        # A scale and an offset per value's token, a step and a beginning per key's channel.
        return kv_heads * (tokens * (codes + 4) + 2 * key_dim)
    return kv_heads * tokens * (key_dim + value_dim + 2)  # a scale per value's token


def key_bytes(codec: Codec, kv_heads: int, tokens: int, key_dim: int, value_bytes: int) -> int:
    """The part of `block_bytes` that a scan reads."""
    if codec is Codec.FULL:
        return kv_heads * tokens * key_dim * value_bytes
    if codec is Codec.INT4:
        return kv_heads * (tokens * ((key_dim + 1) // 2) + 2 * key_dim)
    return kv_heads * tokens * key_dim


def segment_bytes(codec: Codec, kv_heads: int, key_dim: int) -> int:
    """Bytes that a segment takes besides its blocks: constants of the keys' channels."""
    constants = {Codec.FULL: 0, Codec.INT8: 2, Codec.FP8: 1, Codec.INT4: 2}[codec]
    return 4 * constants * kv_heads * key_dim
