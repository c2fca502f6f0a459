"""What the launches of all Triton kernels have in common. Importing this file imports Triton.

Every kernel converts to float32 directly after each load and rounds before each store: Triton's
interpreter cannot compute with bfloat16. `tl.dot` then takes operands of the type that the launch
chooses: the tensors' own where tensor cores multiply it, float32 in the interpreter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

OPERANDS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel was defined under TRITON_INTERPRET=1."""
    return not isinstance(kernel, triton.JITFunction)


def operand_of(dtype: torch.dtype, kernel: Any) -> Any:
    """The type in which `tl.dot` multiplies."""
    return tl.float32 if is_interpreted(kernel) else OPERANDS[dtype]


def pad(size: int) -> int:
    """The next power of two, 16 at least: what `tl.dot` takes along each side."""
    return max(16, triton.next_power_of_2(max(1, size)))


def programs_wanted(device: torch.device) -> int:
    """Programs of a small kernel that fill a device: two for each of its processors."""
    return 2 * _properties(device).multi_processor_count if device.type == "cuda" else 8


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    if device.type != "cuda":
        return 96 * 1024
    found = _properties(device)
    return getattr(found, "shared_memory_per_block_optin", 96 * 1024)


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
