"""What any question looks at in a document, kept beside its saved memory.

It is the same for all questions, and finding it takes as long as asking one: the first question to
a saved memory need not find it again. A file that is gone or broken costs that time, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from infllm_cli import __version__, recall
from infllm_cli.reader import Memory, Reader
from infllm_cli.recall import Impression
from infllm_cli.shelf import IMPRESSIONS

NAMES = ("profile", "asked", "closed")


def recall_neutral(folder: Path | None, reader: Reader, memory: Memory) -> bool:
    """Give the memory the impression that lies in its folder; whether there was one."""
    if folder is None:
        return False
    try:
        with np.load(_file(folder, reader), allow_pickle=False) as held:
            found = Impression(*(held[name] for name in NAMES))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return False
    if len(found.asked) != len(memory.tokens) or len(found.closed) != len(memory.tokens):
        return False
    memory.neutral = found
    return True


def keep_neutral(folder: Path | None, reader: Reader, memory: Memory) -> None:
    """Write the memory's impression into its folder, in one stroke; a full disk is no matter."""
    found = memory.neutral
    if folder is None or found is None:
        return
    path = _file(folder, reader)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        try:
            with partial.open("wb") as file:
                np.savez(file, **{name: getattr(found, name) for name in NAMES})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _file(folder: Path, reader: Reader) -> Path:
    """By what decides it besides the memory: the question, the prompt, how lookup answers."""
    prompt = reader.prompt
    ids = [prompt.turn, prompt.task_ids(), prompt.question_ids(recall.NEUTRAL_QUESTION)]
    facts = [
        __version__,
        [part.tolist() for part in (*ids, prompt.closing)],
        reader.config.answer_blocks,
        reader.config.answer_lookup.value,
    ]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return folder / f"{IMPRESSIONS}{digest}.npz"
