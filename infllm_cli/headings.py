"""Where a document says itself that a part begins: files of a dump, chapters, headings.

Of several kinds the strongest one counts: the parts of a repository dump are its files, whatever
headings stand in them; the parts of a book are its chapters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from infllm_cli.document import Document


@dataclass(frozen=True, slots=True)
class Heading:
    """A part of the document begins.

    Attributes:
        start: the character where it begins, heading included.
        body: the character behind the heading.
        title: one line.
        is_file: the part is a file, and the title its name.
    """

    start: int
    body: int
    title: str
    is_file: bool = False


_NAME = r"[\w@+~.\-][\w@+~./\\ \-]*"
_RULE = r"[-=*#_]{3,}"
# Dumps of a repository in one file, as the usual tools write them.
_FILES = (
    re.compile(r"^==> (?P<name>[^\n]+) <==\n", re.M),
    re.compile(
        r"^(?P<rule>[-=*#/~])(?P=rule)+ ?(?:[Ff]ile(?:name)?|FILE|[Pp]ath)?:? ?"
        rf"(?P<name>{_NAME}?) ?(?P=rule){{2,}}\n",
        re.M,
    ),
    re.compile(
        rf"^{_RULE}\n(?:[Ff]ile(?:name)?|FILE|[Pp]ath):? ?(?P<name>{_NAME})\n(?:{_RULE}\n)?", re.M
    ),
    re.compile(rf"(?:\A|^{_RULE}\n)(?P<name>{_NAME})\n{_RULE}\n", re.M),
    re.compile(rf"^#+ (?:[Ff]ile|FILE):? `?(?P<name>{_NAME})`?\n", re.M),
    re.compile(
        r"^<(?:file|document)[^>\n]*?(?:path|name|source)=\"(?P<name>[^\"\n]+)\"[^>\n]*>\n", re.M
    ),
    re.compile(r"^diff --git a/(?P<name>\S+) b/[^\n]*\n", re.M),
)
_NUMERAL = r"(?:[IVXLCDM]+|\d+(?:\.\d+)*|[A-Z][a-z]+|[A-Z]+)"
_WORDS = (
    "chapter|book|part|letter|adventure|stave|canto|act|scene|section|article|appendix|volume|"
    "prologue|epilogue|preface|introduction|conclusion|foreword|abstract|"
    "kapitel|teil|buch|chapitre|livre|partie|cap[ií]tulo|capitolo|libro|hoofdstuk|"
    "глава|часть|том"
)
# A line of its own, a blank line before it; of two such lines the second is the title.
_CHAPTERS = re.compile(
    rf"(?:\A|(?<=\n\n))[ \t]*(?P<name>(?i:{_WORDS})\b(?:[ \t]+{_NUMERAL}\b)?[^\n]{{0,80}}"
    rf"|[IVXLC]+\.[ \t]+[A-ZÀ-Þ][^\n]{{2,70}})[ \t]*\n(?=[ \t]*\n|[^\n]{{1,70}}\n[ \t]*\n)"
)
_MARKDOWN = re.compile(r"^(?P<level>#{1,6})[ \t]+(?P<name>[^\n]+?)[ \t#]*\n", re.M)
_UNDERLINED = re.compile(r"(?:\A|(?<=\n\n))(?P<name>[^\n]{2,80})\n(?P<rule>([=~-])\3{2,})\n")
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1[ \t]*$", re.M | re.S)
_FEWEST = 2


def find_headings(document: Document) -> list[Heading]:
    """The headings of the strongest kind, in document order; none where there are none."""
    if document.parts:
        return [Heading(part.heading, part.start, part.name, True) for part in document.parts]
    text = document.text
    for pattern in _FILES:
        found = [_heading(m, m["name"], is_file=True) for m in pattern.finditer(text)]
        found = [heading for heading in found if _like_a_path(heading.title)]
        if len(found) >= _FEWEST:
            return found
    chapters = [_heading(m, _title(m)) for m in _CHAPTERS.finditer(text)]
    if len(chapters) >= _FEWEST:
        return chapters
    fenced = [m.span() for m in _FENCE.finditer(text)]
    marked = [m for m in _MARKDOWN.finditer(text) if not _inside(m.start(), fenced)]
    found = [_heading(m, m["name"]) for m in _strongest(marked)]
    if len(found) >= _FEWEST:
        return found
    underlined = [_heading(m, m["name"]) for m in _UNDERLINED.finditer(text)]
    return underlined if len(underlined) >= _FEWEST else []


def _heading(match: re.Match[str], title: str, *, is_file: bool = False) -> Heading:
    return Heading(match.start(), match.end(), " ".join(title.split()), is_file)


def _title(match: re.Match[str]) -> str:
    """A chapter's number, and its name where that stands on the next line."""
    name = match["name"].strip()
    bare = re.fullmatch(rf"(?i:{_WORDS})[ \t]+{_NUMERAL}\.?", name)
    line = match.string[match.end() : match.end() + 80].split("\n")[0].strip()
    return f"{name} {line}" if bare and line and len(line) <= 70 else name


def _like_a_path(name: str) -> bool:
    """Has an extension or a folder, or is one of the files that have neither."""
    last = re.split(r"[/\\]", name.strip())[-1]
    return bool(
        re.search(r"\w\.\w{1,12}$|^\.\w+", last)
        or re.search(r"[/\\]", name)
        or re.fullmatch(r"(?:[A-Z][A-Za-z]*file|[A-Z]+)(?:\.\w+)?", last)
    )


def _strongest(marked: list[re.Match[str]]) -> list[re.Match[str]]:
    """The highest levels that occur more than once: a lone title divides nothing."""
    levels = [len(match["level"]) for match in marked]
    for level in sorted(set(levels)):
        chosen = [m for m, own in zip(marked, levels, strict=True) if own <= level]
        if levels.count(level) >= _FEWEST:
            return chosen
    return []


def _inside(at: int, spans: list[tuple[int, int]]) -> bool:
    return any(first <= at < last for first, last in spans)
