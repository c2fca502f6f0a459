"""Where does the time of a step go? Timers around its parts, there only while they are wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from infllm_cli.bench.floor import now
from infllm_cli.memory import layer_memory as layer_module
from infllm_cli.memory import sliding as sliding_module
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.native_layer import NativeLayer
from infllm_cli.memory.tiered_store import TieredStore
from infllm_cli.models.packed import PackedLinear

PROJECTIONS = "projections"
NORMS = "norms and activations"
ATTENTION = "attention"
LOOKUP = "lookup"
LOADING = "loading blocks"
SEALING = "sealing and window"
ROTATION = "rotation and the rest of a layer's memory"
REST = "Python and small operations"
PARTS = (PROJECTIONS, NORMS, ATTENTION, LOOKUP, LOADING, SEALING, ROTATION, REST)

# (owner, name of what is timed, part)
_TIMED: tuple[tuple[Any, str, str], ...] = (
    (layer_module, "attend", ATTENTION),
    (layer_module, "attend_mass", ATTENTION),
    (sliding_module, "attend", ATTENTION),
    (LayerMemory, "attend", ROTATION),
    (LayerMemory, "_lookup", LOOKUP),
    (LayerMemory, "_place", LOADING),
    (NativeLayer, "attend", ROTATION),
    (NativeLayer, "_look", LOOKUP),
    (NativeLayer, "_load_changed", LOADING),
    (NativeLayer, "_attend_slots", ATTENTION),
    (TieredStore, "_make_room", SEALING),
    (TieredStore, "_evict", SEALING),
)


class Stopwatch:
    """Time per part, each second counted once: what runs inside a part belongs to the inner one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def enter(self, part: str) -> None:
        """A part begins."""
        at = now(self.device)
        if self._open:
            self.seconds[self._open[-1]] += at - self._since
        self._open.append(part)
        self._since = at

    def leave(self) -> None:
        """The innermost part ends."""
        at = now(self.device)
        self.seconds[self._open.pop()] += at - self._since
        self._since = at

    @contextlib.contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Time what passes through `model` and the memory inside."""
        with contextlib.ExitStack() as stack:
            for owner, name, part in _TIMED:
                stack.enter_context(self._wrapped(owner, name, part))
            for module in model.modules():
                if next(module.children(), None) is None:
                    part = PROJECTIONS if is_projection(module) else NORMS
                    stack.callback(module.register_forward_pre_hook(self._begins(part)).remove)
                    stack.callback(module.register_forward_hook(self._ends).remove)
            self.enter(REST)
            try:
                yield
            finally:
                while self._open:
                    self.leave()

    @contextlib.contextmanager
    def _wrapped(self, owner: Any, name: str, part: str) -> Iterator[None]:
        plain: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return plain(*arguments, **named)
            finally:
                self.leave()

        setattr(owner, name, timed)
        try:
            yield
        finally:
            setattr(owner, name, plain)

    def _begins(self, part: str) -> Callable[..., None]:
        def begin(*_: Any) -> None:
            self.enter(part)

        return begin

    def _ends(self, *_: Any) -> None:
        self.leave()


def is_projection(module: nn.Module) -> bool:
    """Whether a leaf of a model is a matrix that tokens are multiplied by."""
    return isinstance(module, (nn.Linear, PackedLinear))
