"""The C functions, compiled once for all processes of a test run."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from infllm_cli.kernels.native.choice import NativeKernels
from infllm_cli.kernels.native.compiling import COMPILERS, library_in
from infllm_cli.kernels.native.library import Native

HAS_COMPILER = any(shutil.which(name) for name in COMPILERS)
FOLDER = Path(tempfile.gettempdir()) / "infllm-native-tests"


@functools.cache
def native() -> Native:
    return Native(library_in(FOLDER))


def kernels() -> NativeKernels:
    return NativeKernels(FOLDER)
