"""Compile every launch for a GPU that is not there, down to its machine code.

Triton's interpreter shows that a kernel computes the right numbers, but not that it compiles. The
compiler and the assembler come with Triton's package and need no device, so that much can be known
without one: inside `compiling_for`, launches are compiled with all their constants and not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


@dataclass
class Compiled:
    """What came of the launches.

    Attributes:
        shared: bytes of shared memory of each kernel, the most that a launch wants.
        spilled: registers that did not suffice: bytes of local memory per thread, where known.
        launches: how many were compiled.
    """

    shared: dict[str, int] = field(default_factory=dict)
    launches: int = 0


class _NoDriver:
    """Stands in for the driver of a device of some capability."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


@contextmanager
def compiling_for(capability: int) -> Iterator[Compiled]:
    """Inside, launches on CPU tensors are compiled for e.g. 90 (Hopper) or 89 (Ada)."""
    found = Compiled()
    run = JITFunction.run

    def compile_only(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        options["warmup"] = True
        kernel = run(self, *arguments, **options)
        name = self.fn.__name__
        shared = kernel.metadata.shared
        found.shared[name] = max(found.shared.get(name, 0), shared)
        found.launches += 1
        return kernel

    assert issubclass(JITFunction, triton.runtime.KernelInterface)
    before = driver._active
    driver.set_active(_NoDriver(capability))
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield found
    finally:
        driver._active = before
