"""Which bytes are no text, and what would turn them into text?

The bytes of a known binary format, and bytes with NULs, are refused with the command that converts
them.
"""

from __future__ import annotations

import codecs
import re
import shlex

from infllm_cli.errors import DocumentError

STDIN_NAME = "standard input"
ASK = "| infllm ask - ..."
HEAD_BYTES = 1 << 16  # enough to name any container: a ZIP lists its first members there

_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", "tesseract {file} -"),
    (b"\xff\xd8\xff", "a JPEG picture", "tesseract {file} -"),
    (b"II*\0", "a TIFF picture", "tesseract {file} -"),
    (b"MM\0*", "a TIFF picture", "tesseract {file} -"),
    (b"\x7fELF", "an executable (ELF)", ""),
    (b"\xcf\xfa\xed\xfe", "an executable (Mach-O)", ""),
    (b"\xce\xfa\xed\xfe", "an executable (Mach-O)", ""),
    (b"\xca\xfe\xba\xbe", "an executable (Mach-O or Java class)", ""),
    (b"\0asm", "an executable (WebAssembly)", ""),
    (b"SQLite format 3\0", "an SQLite database", "sqlite3 {file} .dump"),
    (b"\x1f\x8b", "compressed (gzip)", "zcat {file}"),
    (b"\xfd7zXZ\0", "compressed (xz)", "xzcat {file}"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd)", "zstdcat {file}"),
    *((b"BZh%d1AY&SY" % level, "compressed (bzip2)", "bzcat {file}") for level in range(1, 10)),
    (b"\x04\x22\x4d\x18", "compressed (lz4)", "lz4cat {file}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so {file}"),
    (b"Rar!\x1a\x07", "a RAR archive", "unrar p -inul {file}"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file", "antiword {file}"),
    (b"ID3\x03", "a media file (MP3)", ""),
    (b"ID3\x04", "a media file (MP3)", ""),
    (b"OggS\0", "a media file (Ogg)", ""),
    (b"fLaC\0", "a media file (FLAC)", ""),
    (b"GGUF\x02\0\0\0", "a model file (GGUF)", ""),
    (b"GGUF\x03\0\0\0", "a model file (GGUF)", ""),
)


def refuse_formats(head: bytes, name: str) -> None:
    """Raise DocumentError if the first bytes are those of a known binary format."""
    found = _format(head)
    if found is None:
        return
    what, command = found
    if command:
        step = f"convert it: `{command.format(file=in_command(name))} {ASK}`"
        if name == STDIN_NAME:
            step += ", with FILE a saved copy"
    else:
        step = "infllm reads text only"
    raise DocumentError(f"{name} is {what}, not text; {step}")


def _format(head: bytes) -> tuple[str, str] | None:
    """Return a binary format's name and the command that turns `{file}` into text, if known."""
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:5] == b"%PDF-":
        return "a PDF", "pdftotext {file} -"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06", b"PK\x07\x08"):
        return _zip_kind(head)
    for magic, what, command in _MAGIC:
        if head.startswith(magic):
            return what, command
    if head[257:262] == b"ustar":
        return "a tar archive", "tar -xOf {file}"
    if head[:4] == b"RIFF" and head[8:12] in (b"WEBP", b"WAVE", b"AVI "):
        return "a media file (RIFF)", ""
    if head[4:8] == b"ftyp" and b"\0" in head[:4]:
        return "a media file (MP4)", ""
    if b"\0" in head[:64]:  # letters alone could begin a text
        for magic, what in ((b"MZ", "an executable"), (b"BM", "a BMP picture"), (b"GIF8", "a GIF")):
            if head.startswith(magic):
                return what, ""
    return None


def _zip_kind(head: bytes) -> tuple[str, str]:
    if b"application/epub+zip" in head:
        return "an EPUB book", "pandoc -f epub -t plain {file}"
    if b"application/vnd.oasis.opendocument.text" in head:
        return "an ODT document", "pandoc -f odt -t plain {file}"
    if b"[Content_Types].xml" in head or b"_rels/.rels" in head:
        if b"xl/" in head or b"ppt/" in head:
            return "an Office file (ZIP)", "soffice --headless --cat {file}"
        return "a DOCX document", "pandoc -f docx -t plain {file}"
    return "a ZIP archive", "unzip -p {file}"


def refuse_nul(data: bytes, name: str) -> None:
    """Raise DocumentError for bytes with NULs, naming UTF-16 or UTF-32 where it looks like it."""
    sample = data[:HEAD_BYTES]
    sample = sample[: len(sample) // 4 * 4]
    for codec in ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be"):
        try:
            text = codecs.getincrementaldecoder(codec)().decode(sample)
        except UnicodeDecodeError:
            continue
        # In the wrong byte order a space is U+2000 and a line end U+0A00.
        spaces = sum(map(text.count, (" ", "\n", "\u3000", "\u3002", "\uff0c")))
        if spaces * 100 > len(text) and odd_characters(text) == 0:
            raise DocumentError(
                f"{name} has NUL bytes, like {codec} text without a byte order mark; "
                f"if it is, say so: `--encoding {codec}`"
            )
    raise DocumentError(
        f"{name} has NUL bytes (the first at {data.index(0):,}), so it is not plain text; "
        f"convert it first, or read what is readable: `strings {in_command(name)} {ASK}`"
    )


_ODD = re.compile("[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff\ufffe\uffff]")


def odd_characters(text: str) -> int:
    """Count the characters that text does not have: controls, private use, non-characters."""
    return sum(1 for _ in _ODD.finditer(text))


def in_command(name: str) -> str:
    """Return how a command line would name the document."""
    return "FILE" if name == STDIN_NAME else shlex.quote(name)
