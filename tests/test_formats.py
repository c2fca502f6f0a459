from __future__ import annotations

import gzip
import io
import zipfile

import pytest

from infllm_cli.document import decode_document, load_document
from infllm_cli.errors import DocumentError


def zipped(*names: str, first: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, first if name == "mimetype" else b"content of it")
    return buffer.getvalue()


BINARIES = [
    ("a.pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", "pdftotext a.pdf - | infllm ask - "),
    ("b.epub", zipped("mimetype", first=b"application/epub+zip"), "pandoc -f epub .* b.epub"),
    ("c.docx", zipped("[Content_Types].xml", "word/document.xml"), "pandoc -f docx .* c.docx"),
    ("d.xlsx", zipped("[Content_Types].xml", "xl/workbook.xml"), "soffice .* d.xlsx"),
    ("e.zip", zipped("notes.txt"), "unzip -p e.zip"),
    ("f.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "PNG"),
    ("g.jpg", b"\xff\xd8\xff\xe0\0\x10JFIF\0", "JPEG"),
    ("h.gif", b"GIF89a\x01\0\x01\0\0\0\0", "GIF"),
    ("i", b"\x7fELF\x02\x01\x01\0\0\0", "ELF"),
    ("j.exe", b"MZ\x90\0\x03\0\0\0", "executable"),
    ("k.db", b"SQLite format 3\0\x10\0", "sqlite3 k.db .dump"),
    ("l.gz", gzip.compress(b"text"), "zcat l.gz"),
    ("m.xz", b"\xfd7zXZ\0\0\x04", "xzcat m.xz"),
    ("n.zst", b"\x28\xb5\x2f\xfd\x04", "zstdcat n.zst"),
    ("o.bz2", b"BZh91AY&SY\0", "bzcat o.bz2"),
    ("p.txt", b"some text\0 and a NUL", "NUL"),
    ("q r.pdf", b"%PDF-1.4\n", "pdftotext 'q r.pdf' -"),
]


@pytest.mark.parametrize(("name", "data", "message"), BINARIES, ids=[row[0] for row in BINARIES])
def test_binary_file_is_refused_with_the_next_step(name, data, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(data)
    for encoding in (None, "latin-1"):  # naming an encoding does not make it text
        with pytest.raises(DocumentError, match=message) as caught:
            load_document(name, encoding=encoding)
        assert str(caught.value).startswith(name)
        assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "text",
    ["MZ is a prefix", "BM25 ranks", "GIF89a is a version", "GGUF files", "PK, he said"],
)
def test_text_that_begins_with_a_magic_number_of_letters_is_text(text):
    assert decode_document(text.encode(), "book.txt").text == text
