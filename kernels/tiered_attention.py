"""One softmax over sinks, loaded blocks and local window, each read where it lies.

The tiers of a step (InfLLM, arXiv 2402.04617) lie in three places: sinks in a tensor of their own,
loaded blocks in slots of a cache on the device, the window in its buffer. A slot table says which
slot holds which block, so nothing is concatenated. Sinks and slots hold un-rotated keys, which are
rotated when they are loaded, to the positions that the step gives them; the window's are rotated
already.

This file holds the plain torch form, which the CPU runs, and the choice of form; the Triton form
is its neighbour `tiered_attention_triton`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import kernels_for

Mass = Literal["none", "blocks", "keys"]


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a step attends, in the order of its positions: sinks, blocks, window.

    Attributes:
        sink_keys, sink_values: `[H_kv, S, d]`, `[H_kv, S, d_v]`, keys un-rotated; S may be 0.
        slot_keys, slot_values: `[C, B, d]`, `[C, B, d_v]`, keys un-rotated; a slot holds one block
            of one KV head.
        slots: `[H_kv, n]` int32, the slot of each loaded block, in document order; n may be 0.
        window_keys, window_values: `[H_kv, W, d]`, `[H_kv, W, d_v]`, keys rotated; the last of
            them belong to the step's own tokens.
        cos, sin: `[S + n * B, r / 2]` float32, the positions of sinks and blocks; r of the d
            dimensions turn, r = 0: none.
        interleaved: whether pairs of dimensions are neighbours (GLM) or halves apart (Llama).
    """

    sink_keys: Tensor
    sink_values: Tensor
    slot_keys: Tensor
    slot_values: Tensor
    slots: Tensor
    window_keys: Tensor
    window_values: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @property
    def block_tokens(self) -> int:
        """B."""
        return self.slot_keys.shape[1]

    @property
    def lead(self) -> int:
        """Keys before the window: S + n * B."""
        return self.sink_keys.shape[1] + self.slots.shape[1] * self.block_tokens

    @property
    def keys(self) -> int:
        """All keys, T."""
        return self.lead + self.window_keys.shape[1]

    def check(self, q: Tensor) -> None:
        """Assert what every form relies on."""
        kv_heads, window, d = self.window_keys.shape
        d_v = self.window_values.shape[-1]
        assert q.ndim == 3 and q.shape[2] == d and q.shape[0] % kv_heads == 0, q.shape
        assert window >= q.shape[1] >= 1, "the step's own tokens are the window's last"
        assert self.sink_keys.shape == (kv_heads, self.sink_keys.shape[1], d)
        assert self.sink_values.shape == (kv_heads, self.sink_keys.shape[1], d_v)
        assert self.slot_keys.shape[2] == d and self.slot_values.shape[2] == d_v
        assert self.slots.shape[0] == kv_heads and self.slots.dtype == torch.int32
        assert self.cos.shape == self.sin.shape and self.cos.shape[0] == self.lead
        own = (getattr(self, name) for name in self.__slots__)
        devices = {x.device for x in (q, *own) if isinstance(x, Tensor)}
        assert len(devices) == 1, devices  # torch would take indices of the host's, a kernel not

    def joined(self) -> tuple[Tensor, Tensor]:
        """Keys `[H_kv, T, d]`, all rotated, and values `[H_kv, T, d_v]`, copied together."""
        kv_heads, _, d = self.window_keys.shape
        chosen = self.slots.long()
        lead = torch.cat([self.sink_keys, self.slot_keys[chosen].reshape(kv_heads, -1, d)], dim=1)
        values = self.slot_values[chosen].reshape(kv_heads, -1, self.window_values.shape[-1])
        return (
            torch.cat([_rotate(lead, self.cos, self.sin, self.interleaved), self.window_keys], 1),
            torch.cat([self.sink_values, values, self.window_values], dim=1),
        )


def tiered_attention(
    q: Tensor, tiers: Tiers, scaling: float, softcap: float | None = None, mass: Mass = "none"
) -> tuple[Tensor, Tensor | None]:
    """Attend all tiers at once: `softmax(cap(scaling * q k^T)) v`, causal among the step's tokens.

    Args:
        q: `[H, L, d]`, rotated; the query heads of a KV head stand one after the other.
        tiers: what is attended.
        scaling: of the scores.
        softcap: c turns a score s into `c * tanh(s / c)` (Gemma-2).
        mass: also return the attention that keys draw from all queries of their KV head together:
            "keys" of each key, "blocks" of each loaded block.

    Returns:
        `(out, mass)`: `[H, L, d_v]` in the dtype of `q`, and float32 `[H_kv, T]`, `[H_kv, n]` or
        None.
    """
    twin = tiered_attention_torch
    arguments = (q, tiers, scaling, softcap, mass)
    return kernels_for(q.device.type).run("tiered_attention", twin, *arguments)


def tiered_attention_torch(
    q: Tensor, tiers: Tiers, scaling: float, softcap: float | None = None, mass: Mass = "none"
) -> tuple[Tensor, Tensor | None]:
    """Do the same in plain torch: the kernel's twin."""
    tiers.check(q)
    keys, values = tiers.joined()
    heads, length, d = q.shape
    kv_heads, total = keys.shape[:2]
    hidden = None
    if length > 1:
        row = torch.arange(total - length, total, device=q.device)[:, None]
        hidden = torch.arange(total, device=q.device)[None, :] > row
    out = None
    if softcap is None:  # whatever else is asked for, so that it does not change a bit of this
        visible = None if hidden is None else ~hidden
        out = F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=visible, scale=scaling, enable_gqa=True
        )[0]
        if mass == "none":
            return out, None
    folded = q.reshape(kv_heads, -1, d)
    scores = torch.matmul(folded, keys.transpose(1, 2)).float() * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores.view(kv_heads, -1, length, total).masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if out is None:
        out = torch.matmul(weights.to(values.dtype), values).view(heads, length, -1)
    if mass == "none":
        return out, None
    drawn = weights.sum(dim=1)  # [H_kv, T]
    return out, drawn if mass == "keys" else block_sums(drawn, tiers)


def block_sums(drawn: Tensor, tiers: Tiers) -> Tensor:
    """The mass of keys `[H_kv, T]` -> of loaded blocks `[H_kv, n]`."""
    blocks = drawn[:, tiers.sink_keys.shape[1] : tiers.lead]
    return blocks.unflatten(1, (tiers.slots.shape[1], tiers.block_tokens)).sum(dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x `[.., n, d]`; products in float32 whatever x is, rounded once at the end."""
    half = cos.shape[-1]
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    out = x.clone()
    a, b = x[..., first], x[..., second]
    out[..., first] = torch.addcmul(a * cos, b, sin, value=-1).to(x.dtype)
    out[..., second] = torch.addcmul(b * cos, a, sin).to(x.dtype)
    return out
