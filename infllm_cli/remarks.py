"""What source code says of itself: docstrings, comments, and the names that it defines."""

from __future__ import annotations

import re

from infllm_cli.sentences import Sentence, split_sentences

_EXTENSIONS = (
    "py|pyi|js|jsx|mjs|ts|tsx|c|h|cc|cpp|hpp|cu|java|kt|scala|go|rs|rb|php|pl|swift|cs|lua|r|jl|sh|"
    "bash|zsh|ps1|sql|hs|ml|ex|exs|clj|lisp|el|vim|toml|ini|cfg|conf|yaml|yml|json|xml|cmake|mk|"
    "gradle|tf|proto|css|scss"
)
_CODE_FILE = re.compile(rf"(?:\.(?:{_EXTENSIONS})|(?:^|/)(?:Makefile|Dockerfile))$", re.IGNORECASE)
_COMMENT = re.compile(
    r'(?:"""|\'\'\')(?P<doc>.*?)(?:"""|\'\'\')'
    r"|/\*+(?P<block>.*?)\*/"
    r"|(?P<lines>(?:^[^\S\n]*(?:#(?!!)|//+|--|;;+)[^\n]*\n?)+)",
    re.M | re.S,
)
_LEADERS = re.compile(r"^[^\S\n]*(?:#+|//+!?|--|;;+|\*+)[^\S\n]?", re.M)
_DEFINES = re.compile(
    r"^[^\S\n]{0,4}(?:export |pub |public |private |protected |static |async |default |final )*"
    r"(?:def|class|func|function|fn|struct|enum|trait|interface|type|module|defmodule)\s+"
    r"(?:\([^)]*\)\s*)?(?P<name>[A-Za-z_]\w*)",
    re.M,
)
_MOST_NAMES = 6


def is_code(file: str | None) -> bool:
    """Whether a file's name is that of a program or of a configuration."""
    return file is not None and bool(_CODE_FILE.search(file.strip()))


def remarks(text: str, start: int, end: int) -> list[Sentence]:
    """The sentences of docstrings and comments in the characters [start, end)."""
    found = []
    for match in _COMMENT.finditer(text, start, end):
        kind = match.lastgroup
        low, high = match.span(kind)
        body = match[kind]
        if kind != "doc":
            # Blanked in place, so that what is left stands where it stood.
            body = _LEADERS.sub(lambda m: " " * len(m[0]), body)
        for sentence in split_sentences(body):
            plain = Sentence(low + sentence.start, low + sentence.end, sentence.text)
            if any(letter.isalpha() for letter in sentence.text) and sentence.words > 1:
                found.append(plain)
        assert high <= end
    return found


def definitions(text: str, start: int, end: int) -> Sentence | None:
    """A line that names what the characters [start, end) define, or None."""
    found = list(_DEFINES.finditer(text, start, end))
    names = list(dict.fromkeys(m["name"] for m in found if not m["name"].startswith("_")))
    if not names:
        return None
    first = found[0]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    listed = ", ".join(names[:_MOST_NAMES])
    return Sentence(first.start("name"), first.end(), f"Defines {listed}{more}.")
