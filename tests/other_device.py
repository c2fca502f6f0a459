"""A device with memory of its own, on a machine that has none: what is mixed up is found.

Tensors of torch's device "meta" are given numbers, which lie on the CPU, and every operation is
looked at: one that mixes tensors of both devices in a way that a GPU refuses raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

THERE = torch.device("meta")
CPU = torch.device("cpu")
aten = torch.ops.aten
# From one device to another; in inference mode the second one stands for the first.
MOVED = (aten._to_copy, aten.to)
# Their indices may lie on the CPU, if the tensor that they choose from does not.
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)


class Held(Tensor):
    """A tensor on that device, its numbers in `inner`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Held:
        found = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=THERE,
        )
        found.inner = inner
        return found

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} outside `OtherDevice`")


class OtherDevice(TorchDispatchMode):
    """Inside, the device exists.

    Attributes:
        crossings: copies from one to the other, by the direction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.crossings = {"there": 0, "back": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs: dict[str, Any] | None = None):
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        held = [x for x in tensors if isinstance(x, Held)]
        self._refuse(function, args, tensors, held)
        there = bool(held)
        if kwargs.get("device") is not None:
            there = torch.device(kwargs.pop("device")) == THERE
            kwargs.pop("pin_memory", None)
            if function.overloadpacket in MOVED and there != bool(held):
                self.crossings["there" if there else "back"] += 1
                inner = args[0].inner if held else args[0]
                copied = inner.to(kwargs.get("dtype") or inner.dtype, copy=True)
                return Held(copied) if there else copied
            if function.overloadpacket not in MOVED:
                kwargs["device"] = CPU
        if function is aten.copy_.default and len(held) == 1:
            self.crossings["there" if isinstance(args[0], Held) else "back"] += 1
            there = isinstance(args[0], Held)
        plain_args, plain_kwargs = tree_map(
            lambda x: x.inner if isinstance(x, Held) else x, (args, kwargs)
        )
        found = function(*plain_args, **plain_kwargs)
        if not there:
            return found
        by_inner = {id(x.inner): x for x in held}  # what was changed in place stays itself

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return by_inner[id(x)] if id(x) in by_inner else Held(x)

        return tree_map(wrap, found)

    @staticmethod
    def _refuse(function, args, tensors: list[Tensor], held: list[Held]) -> None:
        if not held or function is aten.copy_.default:
            return
        if function in INDEXED and isinstance(args[0], Held):
            tensors = [args[0], *(args[2:3] if len(args) > 2 else ())]
        mixed = [x for x in tensors if not isinstance(x, Held) and x.dim() > 0]
        assert not mixed, f"{function} of tensors on two devices"
