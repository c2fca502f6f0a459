"""Read documents of any length with a frozen language model on bounded device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from infllm_cli.document import Document, load_document
    from infllm_cli.events import Answer
    from infllm_cli.memory.config import MemoryConfig
    from infllm_cli.reader import Memory, Reader
    from infllm_cli.sampling import AnswerOptions
    from infllm_cli.summary_options import SummaryOptions

__all__ = [
    "Answer",
    "AnswerOptions",
    "Document",
    "Memory",
    "MemoryConfig",
    "Reader",
    "SummaryOptions",
    "load_document",
]

_HOMES = {
    "Answer": "events",
    "AnswerOptions": "sampling",
    "Document": "document",
    "Memory": "reader",
    "MemoryConfig": "memory.config",
    "Reader": "reader",
    "SummaryOptions": "summary_options",
    "load_document": "document",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `infllm --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
