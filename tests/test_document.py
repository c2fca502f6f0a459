from __future__ import annotations

import codecs
import hashlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infllm_cli.document import STDIN_NAME, decode_document, load_document
from infllm_cli.errors import DocumentError, InfllmError, UsageError

RUSSIAN = (
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива "
    "по-своему. Всё смешалось в доме Облонских. Жена узнала, что муж был в связи с бывшею в их "
    "доме француженкою-гувернанткой, и объявила мужу, что не может жить с ним в одном доме.\n"
)
FRENCH = (
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux "
    "se fermaient si vite que je n'avais pas le temps de me dire : « Je m'endors. » Et, une "
    "demi-heure après, la pensée qu'il était temps de chercher le sommeil m'éveillait.\n"
)
GERMAN = (
    "Als Gregor Samsa eines Morgens aus unruhigen Träumen erwachte, fand er sich in seinem Bett "
    "zu einem ungeheueren Ungeziefer verwandelt. Er lag auf seinem panzerartig harten Rücken und "
    "sah, wenn er den Kopf ein wenig hob, seinen gewölbten, braunen Bauch, auf dessen Höhe sich "
    "die Bettdecke, zum gänzlichen Niedergleiten bereit, kaum noch erhalten konnte.\n"
)
POLISH = (
    "Litwo! Ojczyzno moja! ty jesteś jak zdrowie; Ile cię trzeba cenić, ten tylko się dowie, "
    "Kto cię stracił. Dziś piękność twą w całej ozdobie Widzę i opisuję, bo tęsknię po tobie.\n"
)
ENGLISH = (
    "“It is a truth,” he said — “universally acknowledged, that a single man’s fortune must be "
    "in want of a wife…” However little known the feelings of such a man may be.\n"
)
CHINESE = "孔乙己是站着喝酒而穿长衫的唯一的人。他身材很高大；青白脸色，皱纹间时常夹些伤痕。\n"
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n"
ASCII = "The quick brown fox jumps over the lazy dog, and nothing else happens.\n"


def decode(data: bytes, encoding: str | None = None):
    return decode_document(data, "book.txt", encoding)


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [
        (RUSSIAN, "windows-1251", "cp1251"),
        (RUSSIAN, "koi8-r", "koi8-r"),
        (FRENCH, "latin-1", "cp1252"),
        (GERMAN, "latin-1", "cp1252"),
        (ENGLISH, "cp1252", "cp1252"),
        (POLISH, "cp1250", "cp1250"),
        (CHINESE, "gb18030", "gb18030"),
        (JAPANESE, "shift-jis", "cp932"),
    ],
)
def test_book_in_a_legacy_encoding_is_read_right(text, encoding, expected, times):
    document = decode((text * times).encode(encoding))
    assert document.text == text * times
    assert document.encoding == expected


@pytest.mark.parametrize("times", [1, 5, 50])
@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        (
            "cp1252",
            "L'été, j'ai passé mes vacances à la mer avec ma mère et mon frère. « Voilà ! » ",
        ),
        (
            "latin-1",
            "Le garçon rêvait déjà de Noël, où nous avons mangé des crêpes près de la forêt. ",
        ),
        ("cp1252", "A ação começou quando a irmã não voltou à cidade de São Paulo; o avô é bom. "),
        ("cp1252", "På ön växte små träd, och älgen åt grönt gräs. Åska hördes från väster. "),
        ("cp1252", "El niño soñó que volvía a España. ¿Cuándo vendrá mañana la señora Núñez? "),
        ("cp1252", "Der Mann ging über die Straße und hörte schöne Lieder für große Mädchen. "),
        (
            "cp1250",
            "Příliš žluťoučký kůň úpěl ďábelské ódy. Řeka tekla přes město a lidé šli domů. ",
        ),
        ("cp1250", "Zażółć gęślą jaźń. Łódź jest piękna, a źrebię śpi w stajni. "),
        ("cp1250", "A fiú elment a városba, és vett egy könyvet. Őszintén szólva, nem tudom. "),
        ("cp1254", "Bugün okula gittim ve güzel bir çocuk gördüm. Şimdi İstanbul'a gidiyorum. "),
        ("iso8859_2", "Zażółć gęślą jaźń. Łódź jest piękna, a źrebię śpi w stajni. "),
        ("cp1250", "Astăzi am mers la şcoală şi am văzut o fată frumoasă. Ţara este mare. "),
        ("cp1257", "Šiandien ėjau į mokyklą ir mačiau gražų žmogų. Jūs esate malonūs. "),
        ("koi8_r", "Все счастливые семьи похожи друг на друга. "),
        ("cp1251", "Все счастливые семьи похожи друг на друга. "),
    ],
)
def test_a_text_full_of_accents_is_read_right(encoding, text, times):
    data = (text * times).encode(encoding)
    assert decode_document(data, "book").text == text * times


def test_comments_of_another_script_in_ascii_code_are_read_right():
    text = "x = compute(y)  # of some kind\n" * 500 + f"# {RUSSIAN}"
    assert decode(text.encode("cp1251")).text == text


@pytest.mark.parametrize("where", ["start", "middle", "end"])
def test_one_copyright_sign_in_ascii_is_a_copyright_sign(where):
    lines = [ASCII] * 300
    lines.insert({"start": 0, "middle": 150, "end": 300}[where], "\xa9 1897\n")
    text = "".join(lines)
    document = decode(text.encode("latin-1"))
    assert document.text == text
    assert document.encoding == "cp1252"


def test_smart_quote_bytes_are_cp1252():
    document = decode(b"\x93It\x92s fine\x94 \x96 he said \x97 \x91yes\x92.\n")
    assert document.text == "“It’s fine” – he said — ‘yes’.\n"
    assert document.encoding == "cp1252"


def test_utf8_after_5000_ascii_bytes_is_utf8():
    text = "a" * 5000 + "é世😀"
    document = decode(text.encode())
    assert (document.text, document.encoding) == (text, "utf-8")


@pytest.mark.parametrize("offset", range(4))
def test_wide_characters_across_every_read_boundary_stay_intact(offset, tmp_path):
    text = "a" * offset + "é世😀\n" * 20_000
    (tmp_path / "wide.txt").write_text(text, encoding="utf-8")
    document = load_document(tmp_path / "wide.txt")
    assert document.text == text
    assert document.lines == 20_000


@pytest.mark.parametrize(
    ("mark", "codec", "expected"),
    [
        (codecs.BOM_UTF8, "utf-8", "utf-8-sig"),
        (codecs.BOM_UTF16_LE, "utf-16-le", "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be", "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le", "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be", "utf-32-be"),
    ],
)
def test_byte_order_mark_names_the_encoding_and_is_removed(mark, codec, expected):
    document = decode(mark + RUSSIAN.encode(codec))
    assert (document.text, document.encoding) == (RUSSIAN, expected)


def test_byte_order_mark_before_a_latin1_book_is_removed():
    document = decode(codecs.BOM_UTF8 + GERMAN.encode("latin-1"))
    assert (document.text, document.encoding) == (GERMAN, "cp1252")


@pytest.mark.parametrize("text", [ASCII, RUSSIAN, CHINESE])
@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_refused_naming_the_flag(codec, text):
    with pytest.raises(DocumentError, match=f"--encoding {codec}"):
        decode(text.encode(codec))
    assert decode(text.encode(codec), codec).text == text


@pytest.mark.parametrize("data", [FRENCH.encode()[:-1] + b"\xc3", GERMAN.encode() + b"\xff\n"])
def test_broken_utf8_is_refused_rather_than_garbled(data):
    with pytest.raises(DocumentError, match=r"book\.txt is UTF-8, but byte [\d,]+ .*iconv"):
        decode(data)


def test_byte_undefined_in_cp1252_falls_back_to_latin1():
    document = decode(ASCII.encode() * 9 + b"\x81\xe9\n")
    assert document.encoding == "latin-1"
    assert document.text.endswith("\x81é\n")


def test_noise_without_nul_bytes_is_refused():
    with pytest.raises(DocumentError, match="does not look like text"):
        decode(bytes(range(1, 256)) * 4)


def test_named_encoding_wins():
    data = RUSSIAN.encode("cp1251")
    assert decode(data, "windows-1251").text == RUSSIAN
    assert decode(data, "Windows_1251").encoding == "cp1251"
    assert decode(data, "latin-1").text == data.decode("latin-1")
    assert decode(data, "ISO-8859-1").encoding == "latin-1"
    assert decode(codecs.BOM_UTF8 + b"a", "utf-8").text == "a"
    assert decode("a\n".encode("utf-16"), "utf-16").text == "a\n"


@pytest.mark.parametrize("encoding", ["klingon", "rot13", "base64", "", "utf-8\0", "é"])
def test_unknown_encoding_is_a_usage_error(encoding):
    with pytest.raises(UsageError, match="--encoding"):
        decode(b"text", encoding)
    with pytest.raises(UsageError, match="--encoding"):
        load_document("never-opened.txt", encoding=encoding)


def test_bytes_invalid_in_the_named_encoding_give_the_offset():
    with pytest.raises(DocumentError, match=r"book\.txt: byte 4 \(ff\) is not valid utf-8"):
        decode(b"text\xff", "utf-8")
    with pytest.raises(DocumentError, match="undefined"):
        decode(b"text", "undefined")


# --- not documents ---------------------------------------------------------------------------


def test_big_binary_file_is_refused_before_it_is_read():
    class Stream(io.BytesIO):
        def read(self, size=-1):
            assert size > 0, "read to the end"
            return super().read(size)

    with pytest.raises(DocumentError, match="standard input is a PDF"):
        load_document("-", Stream(b"%PDF-1.7\n" * 100_000))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (codecs.BOM_UTF8, "only a byte order mark"),
        (codecs.BOM_UTF16_LE, "only a byte order mark"),
        (b" \r\n\t\n", "only white space"),
        ("\u3000\u00a0\n".encode(), "only white space"),
    ],
)
def test_nothing_to_read_is_an_error(data, message):
    with pytest.raises(DocumentError, match=message):
        decode(data)


def test_one_character_is_a_document():
    document = decode(b"x")
    assert (document.text, document.lines, document.size_bytes) == ("x", 1, 1)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", r"is a folder; .*`cat \./\*\.md \| infllm ask - "),
        ("gone.txt", r"gone\.txt: no such file"),
        ("", "path is empty"),
        ("a\0b", "cannot be read"),
        ("file/b", "cannot be read: Not a directory"),
    ],
)
def test_path_that_leads_to_no_file(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a")
    with pytest.raises(DocumentError, match=message):
        load_document(path)


def test_a_working_folder_that_is_gone_is_no_further_error(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(DocumentError, match=r"no such file.*has been removed"):
        load_document("book.txt")


def test_file_without_permission(tmp_path, monkeypatch):
    (tmp_path / "secret.txt").write_text("text")

    def refuse(path, *args, **kwargs):  # the system itself refuses root nothing
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DocumentError, match=r"secret\.txt: no permission .*`ls -l "):
        load_document(tmp_path / "secret.txt")


def test_error_while_reading_is_a_document_error():
    class Stream(io.BytesIO):
        def read(self, size=-1):
            raise OSError(5, "Input/output error")

    with pytest.raises(DocumentError, match="standard input cannot be read: Input/output error"):
        load_document("-", Stream())


# --- sources ---------------------------------------------------------------------------------


def test_same_bytes_by_file_and_by_standard_input(tmp_path):
    data = (ENGLISH + RUSSIAN).encode()
    (tmp_path / "a.txt").write_bytes(data)
    by_file = load_document(str(tmp_path / "a.txt"))
    by_pipe = load_document("-", io.BytesIO(data))
    assert by_file.text == by_pipe.text
    assert by_file.sha256 == by_pipe.sha256 == hashlib.sha256(data).hexdigest()
    assert by_file.size_bytes == by_pipe.size_bytes == len(data)
    assert by_file.name == str(tmp_path / "a.txt")
    assert by_pipe.name == STDIN_NAME == "standard input"


def test_closed_standard_input_is_an_error():
    with pytest.raises(DocumentError, match="standard input is closed"):
        load_document("-")


def test_named_pipe_is_read_once_to_the_end(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = RUSSIAN.encode() * 1000  # more than a pipe holds
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    document = load_document(pipe)
    writer.join()
    assert document.text == RUSSIAN * 1000


def test_process_substitution_is_read():
    read, write = os.pipe()
    os.write(write, b"one\ntwo\n")
    os.close(write)
    try:
        assert load_document(f"/dev/fd/{read}").text == "one\ntwo\n"
    finally:
        os.close(read)


def test_importing_it_loads_nothing_heavy():
    code = "import sys, infllm_cli.document; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "torch", "transformers", "charset_normalizer", "tokenizers"}
    assert not heavy & set(out.stdout.split())


# --- lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text", "starts"),
    [
        (b"a", "a", [0]),
        (b"a\n", "a\n", [0]),
        (b"a\nb", "a\nb", [0, 2]),
        (b"a\r\nb\r\n", "a\nb\n", [0, 2]),
        (b"a\rb\r", "a\nb\n", [0, 2]),
        (b"a\r\r\nb", "a\n\nb", [0, 2, 3]),
        (b"\n\na", "\n\na", [0, 1, 2]),
        ("é\u2028é\x0c\nb".encode(), "é\u2028é\x0c\nb", [0, 5]),
    ],
)
def test_line_ends_are_lf_and_lines_are_the_files_own(data, text, starts):
    document = decode(data)
    assert document.text == text
    assert document.line_starts.tolist() == starts
    assert document.line_starts.dtype == np.int64
    assert document.lines == len(starts)


def test_lf_and_crlf_give_the_same_text_and_lines():
    unix, dos = decode(RUSSIAN.encode() * 9), decode(RUSSIAN.replace("\n", "\r\n").encode() * 9)
    assert unix.text == dos.text
    assert np.array_equal(unix.line_starts, dos.line_starts)


def test_lines_of_a_span():
    document = decode(b"one\ntwo\nthree")
    assert [document.line_of(i) for i in (0, 3, 4, 7, 8, 12)] == [1, 1, 2, 2, 3, 3]
    assert document.lines_of(0, 4) == (1, 1)  # the line end is the line's own
    assert document.lines_of(0, 5) == (1, 2)
    assert document.lines_of(4, 13) == (2, 3)
    assert document.lines_of(4, 4) == (2, 2)
    assert document.lines_of(13, 13) == (3, 3)


def test_line_at_the_end_of_a_document_with_a_final_line_end():
    document = decode(b"one\ntwo\n")
    assert document.line_of(len(document.text)) == 2
    assert document.lines_of(4, 8) == (2, 2)


def test_line_table_across_its_own_pieces(monkeypatch):
    monkeypatch.setattr("infllm_cli.document._LINE_TABLE_CHARS", 7)
    text = "ab\n\nxyz\n" * 20
    expected = [0, *(i + 1 for i, c in enumerate(text[:-1]) if c == "\n")]
    assert decode(text.encode()).line_starts.tolist() == expected


# --- any bytes -------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.sampled_from([None, None, "utf-8", "utf-16", "cp1252", "utf-7"]))
def test_any_bytes_decode_or_are_refused(data, encoding):
    try:
        document = decode(data, encoding)
    except InfllmError as error:
        assert "book.txt" in str(error)
        return
    assert document.text.strip()
    assert "\r" not in document.text
    assert "\0" not in document.text
    document.text.encode()  # no half surrogate pairs
    lines = document.text.removesuffix("\n").split("\n")
    assert document.lines == len(lines)
    assert document.line_of(len(document.text) - 1) == document.lines


@given(st.text(min_size=1).filter(lambda text: text.strip() and "\0" not in text))
def test_any_text_as_utf8_comes_back(text):
    data = text.encode()
    try:
        document = decode(data)
    except DocumentError as error:
        assert "UTF" not in str(error)
        return
    expected = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    assert document.text == expected
