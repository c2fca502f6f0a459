"""Several memories asked together: their documents as one, with each one's own lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from infllm_cli.document import Document, Part, find_lines
from infllm_cli.memory import join as tiers
from infllm_cli.memory.join import Place
from infllm_cli.passages import cut_passages
from infllm_cli.reader import Memory
from infllm_cli.tokens import Tokens


def join_memories(memories: Sequence[Memory], trained_length: int) -> Memory:
    """One memory of several that the same reader has read; they are not changed.

    Documents stand one behind the other as they were read: between them is no heading, which the
    model would have to read.
    """
    first = memories[0]
    prefix = first.prefix_tokens
    states = [memory.state for memory in memories]
    places = tiers.lay_out(states, prefix)
    document, starts = _join_documents([memory.document for memory in memories])
    tokens = _join_tokens(memories, places, starts)
    state = tiers.join(states, places, trained_length=trained_length)
    assert state.tokens == prefix + len(tokens), "every position is a token of the joined document"
    passages = cut_passages(document.text, tokens, [part.heading for part in document.parts])
    reused = len(tokens)
    return Memory(document, tokens, prefix, state, passages, whole=False, reused_tokens=reused)


def _join_documents(documents: Sequence[Document]) -> tuple[Document, list[int]]:
    """The documents as one, and the character where each of them begins."""
    pieces: list[str] = []
    parts: list[Part] = []
    starts: list[int] = []
    at = 0
    for document in documents:
        # A document begins on a line of its own.
        if pieces and not pieces[-1].endswith("\n"):
            pieces.append("\n")
            at += 1
        starts.append(at)
        pieces.append(document.text)
        parts += [_moved(part, at) for part in document.parts or [_as_part(document)]]
        at += len(document.text)
    text = "".join(pieces)
    encoding = ", ".join(dict.fromkeys(document.encoding for document in documents))
    name = ", ".join(document.name for document in documents)
    joined = Document(
        name=name,
        text=text,
        encoding=encoding,
        size_bytes=sum(document.size_bytes for document in documents),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        line_starts=find_lines(text, name, encoding),
        parts=tuple(parts),
    )
    return joined, starts


def _as_part(document: Document) -> Part:
    return Part(
        document.name,
        document.encoding,
        document.size_bytes,
        document.sha256,
        document.lines,
        heading=0,
        start=0,
        end=len(document.text),
    )


def _moved(part: Part, by: int) -> Part:
    return replace(part, heading=part.heading + by, start=part.start + by, end=part.end + by)


def _join_tokens(
    memories: Sequence[Memory], places: Sequence[Place], starts: Sequence[int]
) -> Tokens:
    """The token at every position behind the prefix.

    What stands twice, or is a prefix again, counts as the last token of the document before it.
    """
    ids: list[np.ndarray] = []
    spans: list[np.ndarray] = []
    end = memories[0].prefix_tokens
    for memory, place, start in zip(memories, places, starts, strict=True):
        between = place.offset + memory.prefix_tokens - end
        if between:
            ids.append(np.repeat(ids[-1][-1:], between))
            spans.append(np.repeat(spans[-1][-1:], between, axis=0))
        ids.append(memory.tokens.ids)
        spans.append(memory.tokens.spans + start)
        end = place.offset + memory.prefix_tokens + len(memory.tokens)
    return Tokens(np.concatenate(ids), np.concatenate(spans))
