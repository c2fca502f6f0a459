"""What does loading a model not need, though transformers imports it?

torch's compiler and its distributed tensors: a third of the time that a short command takes. The
command line compiles nothing and runs one process, so that it asks for them to be left out; who
uses this package as a library is never affected.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

_COMPILER = "torch._dynamo"
_wanted = False


def want() -> None:
    """From now on models are loaded without what is not needed, where that can be."""
    global _wanted
    _wanted = True


@contextlib.contextmanager
def lean() -> Iterator[None]:
    """Inside, torch says that it has no distributed part, and its compiler's decorators do nothing.

    Afterwards everything is as before: who wants to compile can. What transformers imported inside
    stays without distributed tensors, so all loading of a process has to happen inside. Where a
    version of transformers does not come along, it is imported as usual.
    """
    came_along = False
    if _wanted and _COMPILER not in sys.modules and not torch.cuda.is_available():
        with _stubbed():
            came_along = _import_library()
            if came_along:
                yield
    if not came_along:
        yield


@contextlib.contextmanager
def _stubbed() -> Iterator[None]:
    available = torch.distributed.is_available
    stubs = _stubs()
    sys.modules.update(stubs)
    torch._dynamo = stubs[_COMPILER]
    torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = available
        _remove_stubs()


def _import_library() -> bool:
    """Import what every model needs; False where that fails, and then nothing half-made stays."""
    known = set(sys.modules)
    try:
        import transformers.generation
        import transformers.masking_utils
        import transformers.modeling_utils  # noqa: F401
    except (ImportError, AttributeError, TypeError, NameError):
        for name in set(sys.modules) - known:
            if name.partition(".")[0] == "transformers":
                del sys.modules[name]
        return False
    return True


class _Stub(types.ModuleType):
    """A module of decorators that do nothing and of questions whose answer is no."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no if name.startswith("is_") else _same


def _stubs() -> dict[str, types.ModuleType]:
    masks = _Stub(f"{_COMPILER}._trace_wrapped_higher_order_op")
    masks.TransformGetItemToIndex = _index_transform  # type: ignore[attr-defined]
    compiler = _Stub(_COMPILER)
    compiler._trace_wrapped_higher_order_op = masks  # type: ignore[attr-defined]
    return {_COMPILER: compiler, masks.__name__: masks}


def _remove_stubs() -> None:
    vars(torch).pop("_dynamo", None)
    for name in [name for name, module in sys.modules.items() if type(module) is _Stub]:
        del sys.modules[name]


def _index_transform() -> Any:
    """The real one, for the few masks that are made by mapping a function."""
    _remove_stubs()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def _same(function: Any = None, *_: Any, **__: Any) -> Any:
    return function if callable(function) else _same


def _no(*_: Any, **__: Any) -> bool:
    return False
