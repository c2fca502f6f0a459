"""Bytes of a file or of standard input to text with a line table.

Nothing is ever replaced or dropped: the bytes decode strictly and as a whole, or the document is
refused with the command that converts it. Numpy and the detector are imported when needed, so
that importing this module costs next to nothing.
"""

from __future__ import annotations

import codecs
import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from infllm_cli import alphabets
from infllm_cli.errors import DocumentError, EmptyDocument, UsageError
from infllm_cli.formats import (
    ASK,
    HEAD_BYTES,
    STDIN_NAME,
    in_command,
    odd_characters,
    refuse_formats,
    refuse_nul,
)

if TYPE_CHECKING:
    import numpy as np

_SAMPLE_BYTES = 1 << 17  # what the detector sees
_LINE_TABLE_CHARS = 1 << 20  # characters turned into 4-byte units at once

# Longer marks first: the UTF-32 LE mark begins with the UTF-16 LE one.
_BOMS = (
    (codecs.BOM_UTF8, "utf-8", "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32-le", "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be", "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le", "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be", "utf-16-be"),
)

# What the detector may answer. Left free, it names museum pieces (cp1006, hp_roman8, ptcp154)
# for ordinary text; none of those is worth a wrong guess.
_PLAUSIBLE = (
    *("cp1252", "cp1251", "koi8_r", "koi8_u", "cp866", "iso8859_5", "mac_cyrillic"),
    *("cp1250", "iso8859_2", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp874"),
    *("gb18030", "big5", "cp932", "euc_jp", "cp949"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a document that was joined from several.

    Attributes:
        name, encoding, size_bytes, sha256, lines: As of a `Document` of its own.
        heading: Where the file's heading begins in the joined text.
        start, end: The characters of the joined text that are the file's own.
    """

    name: str
    encoding: str
    size_bytes: int
    sha256: str
    lines: int
    heading: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Document:
    """A decoded document and where its lines are.

    Attributes:
        name: The path as given, or "standard input".
        text: The text; line ends are ``\\n`` only and there is no byte order mark.
        encoding: Canonical lower-case name, such as "utf-8", "utf-8-sig" (a mark was there),
            "cp1252" or "utf-16-le".
        size_bytes: Size before decoding.
        sha256: Hexadecimal digest of the bytes.
        line_starts: ``[lines]`` int64, the character where each line starts. CRLF, LF and a lone
            CR are one line end each, so line numbers are the file's own.
        parts: The files it was joined from, see `infllm_cli.files`; none for a single file.
    """

    name: str
    text: str
    encoding: str
    size_bytes: int
    sha256: str
    line_starts: np.ndarray
    parts: tuple[Part, ...] = ()

    @property
    def lines(self) -> int:
        """Number of lines; ``"a\\n"`` has 1, ``"a\\nb"`` has 2."""
        return len(self.line_starts)

    def line_of(self, char: int) -> int:
        """Return the 1-based line that holds character ``char``; a line end ends its own line."""
        return int(self.line_starts.searchsorted(min(max(char, 0), len(self.text)), side="right"))

    def lines_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and last line, 1-based and inclusive, of the characters [start, end)."""
        return self.line_of(start), self.line_of(max(start, end - 1))

    def own(self, start: int, end: int) -> tuple[Part | None, int, int]:
        """Cut the characters [start, end) down to one file's own text: no heading, no neighbour.

        Of a heading alone, the first line below it remains.
        """
        if not self.parts:
            return None, start, end
        part = max(self.parts, key=lambda p: min(end, p.end) - max(start, p.heading))
        low, high = max(start, part.start), min(end, part.end)
        if low >= high:
            low = part.start
            line_end = self.text.find("\n", low, part.end)
            high = part.end if line_end < 0 else line_end
        return part, low, high

    def place(self, start: int, end: int) -> tuple[str | None, tuple[int, int]]:
        """Return the file and its lines that hold [start, end); no file's name for a single one."""
        part, start, end = self.own(start, end)
        first, last = self.lines_of(start, end)
        if part is None:
            return None, (first, last)
        before = self.line_of(part.start) - 1
        return part.name, (first - before, last - before)


def load_document(
    path: str | Path, stdin: BinaryIO | None = None, encoding: str | None = None
) -> Document:
    """Read a file, a pipe or, for the path "-", ``stdin`` to its end, once, and decode it.

    Raises:
        DocumentError: It cannot be opened or read, or is not text; see `decode_document`.
        UsageError: ``encoding`` is no encoding's name.
    """
    if encoding is not None:
        _codec(encoding)  # a misspelled flag is reported before a long read
    if str(path) == "-":
        if stdin is None:
            raise DocumentError("standard input is closed; name a file, or pipe a document in")
        return decode_document(_read(stdin, STDIN_NAME), STDIN_NAME, encoding)
    name = str(path)
    if not name:
        raise DocumentError("the document's path is empty; name a file, or `-` for standard input")
    try:
        if Path(path).is_dir():
            files = f"{shlex.quote(name.rstrip('/') or '/')}/*.md"
            raise DocumentError(f"{name} is a folder; join its files: `cat {files} {ASK}`")
        with Path(path).open("rb") as stream:
            data = _read(stream, name)
    except FileNotFoundError:
        raise DocumentError(
            f"{name}: no such file; check the path (here: {_here()}), or use `-` for standard input"
        ) from None
    except PermissionError:
        raise DocumentError(
            f"{name}: no permission to read it; see `ls -l {shlex.quote(name)}`"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(f"{name} cannot be read: {reason}; check the path") from None
    return decode_document(data, name, encoding)


def decode_document(data: bytes, name: str, encoding: str | None = None) -> Document:
    """Decode a whole document strictly.

    Tried in order: ``encoding`` if given, a byte order mark, UTF-8, a detector on a bounded
    sample, cp1252, Latin-1.

    Raises:
        DocumentError: A known binary format, bytes that are not text, bytes invalid in the named
            encoding, or nothing but white space. The message names the document and the next
            step.
        UsageError: ``encoding`` is no encoding's name.
    """
    refuse_formats(data[:HEAD_BYTES], name)
    text, used = _decode(data, name, encoding)
    if not data:
        raise EmptyDocument(f"{name} is empty; there is nothing to read")
    if not text or text.isspace():
        what = "white space" if text else "a byte order mark"
        raise EmptyDocument(f"{name} holds only {what}; there is nothing to read")
    if "\0" in text:
        raise DocumentError(
            f"{name} has NUL characters ({used}), so it is not plain text; "
            f"to drop them: `tr -d '\\000' < {in_command(name)} {ASK}`"
        )
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return Document(
        name=name,
        text=text,
        encoding=used,
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        line_starts=find_lines(text, name, used),
    )


def _here() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return "a folder that has been removed"


def _read(stream: BinaryIO, name: str) -> bytes:
    """Read to the end, but refuse a known binary format after its first bytes."""
    try:
        head = stream.read(HEAD_BYTES)
        refuse_formats(head, name)
        if len(head) < HEAD_BYTES:
            return head  # asked once more, a terminal would want a second Ctrl-D
        return b"".join((head, stream.read()))
    except OSError as error:
        reason = error.strerror or str(error)
        raise DocumentError(f"{name} cannot be read: {reason}; try again from a copy") from None


# --- encodings -------------------------------------------------------------------------------


def _codec(encoding: str) -> codecs.CodecInfo:
    """Look a text encoding up, or raise UsageError."""
    try:
        codec = codecs.lookup(encoding)
        if not codec._is_text_encoding:  # base64, rot13 and the like
            raise LookupError(encoding)
    except (LookupError, ValueError):
        raise UsageError(
            f"--encoding {encoding!r} is not a known encoding; "
            "names look like utf-8, cp1252, latin-1, cp1251, utf-16-le, gb18030"
        ) from None
    return codec


def _canonical(encoding: str) -> str:
    name = codecs.lookup(encoding).name
    return {"iso8859-1": "latin-1"}.get(name, name).replace("_", "-")


def _decode(data: bytes, name: str, encoding: str | None) -> tuple[str, str]:
    """Return the text without its byte order mark, and the canonical name of the encoding."""
    if encoding is not None:
        return _decode_as(data, name, encoding)
    for mark, codec, shown in _BOMS:
        if not data.startswith(mark):
            continue
        try:
            return data.decode(codec).removeprefix("\ufeff"), shown
        except UnicodeDecodeError as error:
            if codec == "utf-32-le":
                continue  # UTF-16 whose first character is NUL: refused as such
            if codec == "utf-8":
                data = data[len(mark) :]  # a mark pasted before a file of another encoding
                break
            raise DocumentError(
                f"{name} begins with a {codec} byte order mark, but byte {error.start:,} "
                f"is not valid {codec}; if it is something else, name it with --encoding"
            ) from None
    if b"\0" in data:  # valid UTF-8, but never text
        refuse_nul(data, name)
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError as error:
        bad = error.start
    _refuse_broken_utf8(data, bad, name)
    return _guess(data, name)


def _decode_as(data: bytes, name: str, encoding: str) -> tuple[str, str]:
    codec = _codec(encoding)
    shown = _canonical(codec.name)
    try:
        text = data.decode(codec.name)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{name}: byte {error.start:,} ({data[error.start : error.start + 1].hex() or 'end'}) "
            f"is not valid {shown}; leave --encoding out to have it detected, or name another"
        ) from None
    except ValueError as error:
        raise DocumentError(
            f"{name} is not valid {shown} ({error}); leave --encoding out to have it detected"
        ) from None
    return text.removeprefix("\ufeff"), shown


def _refuse_broken_utf8(data: bytes, bad: int, name: str) -> None:
    """Raise DocumentError for UTF-8 with a few bad bytes: any other reading would garble it all."""
    low = max(0, bad - HEAD_BYTES)
    while low < bad and 0x80 <= data[low] < 0xC0:  # do not begin inside a character
        low += 1
    window = data[low : bad + HEAD_BYTES]
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(window, bad + 4 >= len(data))
    wrong = text.count("\ufffd")
    good = sum(character > "\x7f" for character in text) - wrong
    if good < 4 * max(wrong, 1):
        return
    raise DocumentError(
        f"{name} is UTF-8, but byte {bad:,} is not (cut off, or pasted from elsewhere); "
        f"drop such bytes: `iconv -c -f utf-8 -t utf-8 {in_command(name)} {ASK}`, "
        "or name its encoding with --encoding"
    )


def _guess(data: bytes, name: str) -> tuple[str, str]:
    """Decode text that is not UTF-8 by the likeliest single- or multi-byte encoding."""
    candidates = dict.fromkeys((*_likely(data), "cp1252", "latin-1"))
    # A stray control character does not make a text binary, but clean readings come first.
    for odd_share in (0.0, 0.02):
        for codec in candidates:
            try:
                text = data.decode(codec)
            except UnicodeDecodeError:
                continue
            if odd_characters(text) <= odd_share * len(text):
                return text, _canonical(codec)
    raise DocumentError(
        f"{name} does not look like text in any usual encoding; "
        "if it is text, name the encoding: `--encoding NAME`"
    )


def _likely(data: bytes) -> list[str]:
    """Return the encodings to try first, the likeliest first."""
    runs = re.findall(rb"[\x80-\xff]+", data[: 1 << 22]) or re.findall(rb"[\x80-\xff]+", data)
    high = sum(map(len, runs))
    long = sum(len(run) for run in runs if len(run) > 2)
    # Quotes, dashes, (c) and accents stand alone or in pairs; other scripts come in words.
    if high * 100 < min(len(data), 1 << 22) and long * 4 < high:
        return ["cp1252"]
    from charset_normalizer import from_bytes

    sample = _sample(data)
    matches = list(from_bytes(sample, cp_isolation=list(_PLAUSIBLE)))
    names = [match.encoding for match in matches]
    if not matches or {names[0], *matches[0].could_be_from_charset} & set(alphabets.ENCODINGS):
        fitting = alphabets.best_fit(sample)
        if fitting is not None:
            names.insert(0, fitting)
        elif matches and "cp1252" in matches[0].could_be_from_charset:
            names.insert(0, "cp1252")  # reads the sample alike, and is by far the more common
    return names


def _sample(data: bytes) -> bytes:
    """Return lines that hold bytes above 0x7f, up to a bounded size."""
    lines: list[bytes] = []
    size = 0
    for match in re.finditer(rb"[^\r\n]*[\x80-\xff][^\r\n]*[\r\n]*", data):
        lines.append(match[0][: _SAMPLE_BYTES - size])
        size += len(lines[-1])
        if size >= _SAMPLE_BYTES:
            break
    sample = b"".join(lines)
    # A cut must not split a multi-byte character; a byte below 0x30 is never part of one.
    cut = max(map(sample.rfind, (b"\n", b"\r", b" "))) + 1
    return sample[:cut] if size >= _SAMPLE_BYTES and cut else sample


# --- lines -----------------------------------------------------------------------------------


def find_lines(text: str, name: str, encoding: str) -> np.ndarray:
    """Return ``[lines]`` int64: where each line of ``text`` starts, in characters.

    Raises:
        DocumentError: Half a surrogate pair, which is no character.
    """
    import numpy as np

    starts = [np.zeros(1, np.int64)]
    for begin in range(0, len(text), _LINE_TABLE_CHARS):
        try:
            units = text[begin : begin + _LINE_TABLE_CHARS].encode("utf-32-le")
        except UnicodeEncodeError as error:
            raise DocumentError(
                f"{name} has half a surrogate pair at character {begin + error.start:,} "
                f"({encoding}), which is not text; name another --encoding"
            ) from None
        starts.append(np.flatnonzero(np.frombuffer(units, "<u4") == 10) + (begin + 1))
    table = np.concatenate(starts)
    return table[:-1] if table[-1] == len(text) else table
