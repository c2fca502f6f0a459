"""All tasks of RULER that need no knowledge of the world: eleven of thirteen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infllm_cli.evaluate.tasks.base import Task
from infllm_cli.evaluate.tasks.haystack import Haystack
from infllm_cli.evaluate.tasks.ruler_needles import SHAPES, niah
from infllm_cli.evaluate.tasks.ruler_words import common_words, frequent_words, variable_tracking

OTHERS = {"vt": variable_tracking, "cwe": common_words, "fwe": frequent_words}
NAMES = (*SHAPES, *OTHERS)


def ruler(names: Sequence[str], document: Path | None = None) -> list[Task]:
    """Some of the tasks, by `NAMES`; the document is the haystack where RULER takes essays."""
    haystack = Haystack.load(document, one_line=True)
    return [niah(name, haystack) if name in SHAPES else OTHERS[name]() for name in names]
