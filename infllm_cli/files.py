"""Several files, read as one document with a heading line for each.

The heading is the one that `head` and `tail` print, so that the model and the passages' ranking
know the file's name. It belongs to no file: evidence names the file and its own lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

from infllm_cli.document import Document, Part, find_lines, load_document
from infllm_cli.errors import EmptyDocument, UsageError


def load_files(
    paths: Sequence[str],
    stdin: BinaryIO | None = None,
    encoding: str | None = None,
    note: Callable[[str], None] | None = None,
) -> Document:
    """Load one document from one file or several; "-" is ``stdin``.

    Args:
        note: Told of each file that holds no text, if others do: nothing of them is lost.

    Raises:
        DocumentError: A file cannot be read or is no text, or none of them holds any.
        UsageError: Standard input twice, or ``encoding`` is no encoding's name.
    """
    if list(paths).count("-") > 1:
        raise UsageError("`-` is given twice; standard input can be read once.")
    if len(paths) == 1:
        return load_document(paths[0], stdin, encoding)
    documents: list[Document] = []
    empty: list[EmptyDocument] = []
    for path in paths:
        try:
            documents.append(load_document(path, stdin, encoding))
        except EmptyDocument as error:
            empty.append(error)
    if not documents:
        raise EmptyDocument("; ".join(str(error).split(";")[0] for error in empty))
    for error in empty:
        if note is not None:
            note(f"{str(error).split(';')[0]}.")
    return join(documents)


def join(documents: Sequence[Document]) -> Document:
    """Return one document of several, each below its heading."""
    pieces: list[str] = []
    parts: list[Part] = []
    at = 0
    for document in documents:
        heading = f"==> {_as_text(document.name)} <==\n"
        if pieces:
            pieces.append("\n" if pieces[-1].endswith("\n") else "\n\n")
            at += len(pieces[-1])
        start = at + len(heading)
        parts.append(
            Part(
                document.name,
                document.encoding,
                document.size_bytes,
                document.sha256,
                document.lines,
                heading=at,
                start=start,
                end=start + len(document.text),
            )
        )
        pieces += [heading, document.text]
        at = parts[-1].end
    text = "".join(pieces)
    name = _name([part.name for part in parts])
    encoding = ", ".join(dict.fromkeys(part.encoding for part in parts))
    return Document(
        name=name,
        text=text,
        encoding=encoding,
        size_bytes=sum(part.size_bytes for part in parts),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        line_starts=find_lines(text, name, encoding),
        parts=tuple(parts),
    )


def _as_text(name: str) -> str:
    """A file's name on one line and in characters: a name may hold any bytes but NUL and "/"."""
    return " ".join(name.encode("utf-8", "replace").decode().splitlines())


def _name(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more files"
