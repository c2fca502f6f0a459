"""What a layer is made of, and what every way to keep its context implements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infllm_cli.memory.rotary import Rotary
from infllm_cli.memory.step import Step
from infllm_cli.memory.window import Window

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What a layer's attention is made of, as seen on a probe through the model."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    softcap: float | None
    sliding_window: int | None
    rotary: Rotary
    dtype: torch.dtype
    device: torch.device


class Layer(Protocol):
    """What every memory policy implements, so that one reader and one test matrix serve all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        ...

    def mark(self) -> None:
        """Remember this state: everything until `rollback` belongs to a question."""
        ...

    def rollback(self) -> None:
        """Return to the marked state."""
        ...

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens, so that growing need not copy."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes held on the layer's device."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes held in files that are mapped in."""
        ...


class OnDeviceOnly:
    """What layers share that keep nothing in host memory; most of them hold a fixed size."""

    def reserve(self, tokens: int) -> None:
        """Nothing grows with the document here."""

    @property
    def host_bytes(self) -> int:
        """Nothing is offloaded."""
        return 0

    @property
    def mapped_bytes(self) -> int:
        """Nothing is on disk."""
        return 0


def window_of(geometry: LayerGeometry) -> Window:
    """An empty window for a layer that keeps keys rotated only, and no slots before them."""
    g = geometry
    return Window(
        g.kv_heads,
        g.head_dim,
        g.value_dim,
        lead=0,
        dtype=g.dtype,
        device=g.device,
        keep_raw=False,
        keep_query_sums=False,
    )
