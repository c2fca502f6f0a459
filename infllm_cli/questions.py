"""What is asked: questions from the command line and from a file, one per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from infllm_cli.document import load_document
from infllm_cli.errors import DocumentError, UsageError


def gather_questions(
    arguments: Sequence[str],
    questions_file: str | None,
    files: Sequence[str],
    stdin: BinaryIO | None = None,
) -> list[str]:
    """Return the questions of the arguments, then those of the file, "-" being ``stdin``.

    Raises:
        UsageError: None at all, an empty one, a file without any or that cannot be read, standard
            input for two things, or file and question swapped.
    """
    _check_order(files, arguments)
    for question in arguments:
        if not question.strip():
            raise UsageError("a question is empty; give it after the file.")
        _check_text(question)
    _check_quotes(arguments, files[0])
    found = list(arguments)
    if questions_file is not None:
        if questions_file == "-" and "-" in files:
            raise UsageError(
                "standard input cannot be both the document and the --questions-file; "
                "name a file for one of them."
            )
        found += _from_file(questions_file, stdin)
    if not found:
        raise UsageError(
            'a QUESTION is missing: infllm ask FILE "QUESTION", or --questions-file FILE with one '
            "per line."
        )
    return found


def _check_quotes(questions: Sequence[str], file: str) -> None:
    """Refuse a question that the shell has cut into words: each would be asked for itself."""
    words = [question.strip() for question in questions]
    if len(words) >= 3 and not any(" " in w for w in words) and "?" not in "".join(words[:-1]):
        raise UsageError(
            f"{len(words)} questions of one word each; put a question in quotes: "
            f'infllm ask {file} "{" ".join(words)}".'
        )


def _from_file(path: str, stdin: BinaryIO | None) -> list[str]:
    try:
        text = load_document(path, stdin).text
    except DocumentError as error:
        raise UsageError(f"--questions-file: {error}") from None
    return [line.strip() for line in text.split("\n") if line.strip()]


def _check_order(files: Sequence[str], questions: Sequence[str]) -> None:
    first = files[0]
    if first == "-" or _exists(first):
        return
    swapped = next((question for question in questions if _is_file(question)), None)
    if swapped is not None:
        raise UsageError(
            f"did you swap file and question? There is no file {first!r}, but {swapped!r} is one. "
            'The file comes first: infllm ask FILE "QUESTION".'
        )
    if not questions and " " in first.strip():
        raise UsageError(
            f"{first!r} is not a file, and no QUESTION follows it. "
            'The file comes first: infllm ask FILE "QUESTION"; `-` is standard input.'
        )


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long for a path, or a NUL in it
        return False


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _check_text(question: str) -> None:
    try:
        question.encode()
    except UnicodeEncodeError:  # bytes of the command line that are no UTF-8
        raise UsageError(
            "a question holds bytes that are not UTF-8; put it into a file and give "
            "--questions-file."
        ) from None
