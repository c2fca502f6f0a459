"""Whether the C functions run here: compiled when first wanted, and tried against their twins."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from ..dispatch import kernels_for
from .check import differences
from .compiling import NativeError, library_in
from .library import Native

NAME = "native"  # among the kernels that have given way to their twins


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The functions of a folder; nothing happens before they are wanted.

    Attributes:
        folder: where the library is kept.
    """

    folder: Path

    def get(self) -> Native | None:
        """The functions; None: torch does their work, `kernels_for("cpu").failed` tells why."""
        return _in_folder(self.folder)


@functools.cache
def _in_folder(folder: Path) -> Native | None:
    try:
        native = Native(library_in(folder))
        if wrong := differences(native):
            raise NativeError(f"differs from torch: {', '.join(wrong)}")
    except NativeError as error:
        kernels_for("cpu").failed[NAME] = str(error)
        return None
    return native
