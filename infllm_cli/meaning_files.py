"""The vectors of a document's sentences, kept beside its saved memory.

A file that is gone or broken costs the time of encoding them again, nothing else.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from pathlib import Path

import numpy as np

from infllm_cli.meaning import Meanings
from infllm_cli.quoting import Sentence
from infllm_cli.shelf import MEANINGS


def recall_meanings(
    folder: Path | None, encoder: str, sentences: list[Sentence], width: int
) -> Meanings | None:
    """Those that an encoder made of these sentences before."""
    if folder is None:
        return None
    try:
        with np.load(_file(folder, encoder), allow_pickle=False) as held:
            vectors = held["vectors"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if vectors.shape != (len(sentences), width) or vectors.dtype != np.float16:
        return None
    return Meanings(sentences, vectors, encoder)


def keep_meanings(folder: Path | None, meanings: Meanings | None) -> None:
    """Write them into a memory's folder, in one stroke; a full disk is no matter."""
    if folder is None or meanings is None:
        return
    path = _file(folder, meanings.encoder)
    if path.exists():
        return
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        try:
            with partial.open("wb") as file:
                np.savez(file, vectors=meanings.vectors)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _file(folder: Path, encoder: str) -> Path:
    return folder / f"{MEANINGS}{encoder}.npz"
