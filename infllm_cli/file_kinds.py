"""Is a file a memory or a document? Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infllm_cli.errors import UsageError

SUFFIX = ".infllm"
# How the header of a memory's file begins, behind its length in eight bytes.
MAGIC = b'{"__metadata__": {"infllm": '


def is_memory_file(path: Path) -> bool:
    """Whether a file begins as `infllm_cli.memory_file` writes it.

    Pipes and FIFOs are not looked into: what is read of them is gone.
    """
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(8 + len(MAGIC))[8:] == MAGIC
    except (OSError, ValueError):
        return False


def memory_files(files: Sequence[str]) -> list[Path]:
    """All of them, where they are memories; none, where they are documents.

    A name that ends in `.infllm` means a memory, even where the file is damaged.

    Raises:
        UsageError: some are this, some are that, or one is given twice.
    """
    found = [
        file
        for file in files
        if file != "-" and (is_memory_file(Path(file)) or _is_named_so(Path(file)))
    ]
    if not found:
        return []
    documents = [file for file in files if file not in found]
    if documents:
        raise UsageError(
            f"{found[0]} is a memory and {documents[0]} a document; make a memory of it first: "
            f"infllm read {documents[0]} -o {Path(documents[0]).stem}{SUFFIX}"
        )
    if len({Path(file).resolve() for file in found}) < len(found):
        raise UsageError("the same memory is given twice.")
    return [Path(file) for file in found]


def _is_named_so(path: Path) -> bool:
    return path.suffix == SUFFIX and path.is_file()
