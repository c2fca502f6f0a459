"""The C functions, compiled once for all processes of a test run."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from infllm_cli.kernels.native.choice import NativeKernels
from infllm_cli.kernels.native.compiling import library_in
from infllm_cli.kernels.native.library import Native

FOLDER = Path(tempfile.gettempdir()) / "infllm-native-tests"


@functools.cache
def native() -> Native:
    return Native(library_in(FOLDER))


def kernels() -> NativeKernels:
    return NativeKernels(FOLDER)
