"""Which form of a kernel runs: Triton on a CUDA device, its plain torch twin elsewhere.

A kernel that cannot be imported, compiled or launched is replaced by its twin for the rest of the
process, with one warning that names it: slower is told, never silent. Errors that mean something
else (memory that runs out) pass through.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None


class Kernels:
    """The forms that run on one kind of device.

    Args:
        triton: whether to try the Triton form at all.

    Attributes:
        failed: kernels that have given way to their twins, with the first line of the error.
    """

    def __init__(self, *, triton: bool) -> None:
        self.triton = triton
        self.failed: dict[str, str] = {}

    def run(self, name: str, twin: Callable[..., Any], *arguments: Any) -> Any:
        """Call the Triton form of a kernel, or its twin, with the arguments.

        Args:
            name: "file" or "file.function": `infllm_cli.kernels.{file}_triton` has the function
                `{function}_triton`, by default named as the file.
            twin: the plain form, of the same signature.
            arguments: of either.
        """
        if not self.triton or name in self.failed:
            return twin(*arguments)
        device = next((x.device for x in arguments if isinstance(x, torch.Tensor)), None)
        # Triton launches on the current device, which need not be the one of this layer.
        here = torch.cuda.device(device) if device and device.type == "cuda" else nullcontext()
        try:
            with here:
                return find(name)(*arguments)
        except (torch.OutOfMemoryError, AssertionError, KeyboardInterrupt):
            raise
        except Exception as error:  # Triton, its compiler and the driver have kinds of their own
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
            self.failed[name] = reason
            warnings.warn(
                f"the kernel {name} does not run here ({reason}); plain torch does its work, "
                "more slowly.",
                RuntimeWarning,
                stacklevel=2,
            )
            return twin(*arguments)


@functools.cache
def find(name: str) -> Callable[..., Any]:
    """The Triton form. Importing it imports Triton, which is slow and not possible everywhere."""
    file, _, function = name.partition(".")
    module = importlib.import_module(f"infllm_cli.kernels.{file}_triton")
    return getattr(module, f"{function or file}_triton")


@functools.cache
def kernels_for(kind: str) -> Kernels:
    """The forms for a kind of device ("cuda", "cpu", ...); one object per process and kind."""
    return Kernels(triton=kind == "cuda" and HAS_TRITON)


def replaced(kind: str) -> dict[str, str]:
    """What has given way to its twin, and why, on a kind of device and on the host beside it."""
    return {**kernels_for("cpu").failed, **kernels_for(kind).failed}
