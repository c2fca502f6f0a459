"""Several files as one document: headings between them, and every file's own lines."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_readers import make_reader
from tiny_tokenizers import prose

from infllm_cli.document import decode_document
from infllm_cli.errors import DocumentError, UsageError
from infllm_cli.files import join, load_files
from infllm_cli.sampling import AnswerOptions


def joined(*texts: str, names: str = "abcdefgh"):
    return join(
        [decode_document(text.encode(), name) for name, text in zip(names, texts, strict=False)]
    )


def test_a_single_file_has_no_heading(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    document = load_files([str(tmp_path / "a.txt")])
    assert document.text == "one\ntwo" and document.parts == ()
    assert document.place(4, 7) == (None, (2, 2))


def test_files_stand_below_headings_whole_and_in_order(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.md").write_bytes(b"caf\xe9\r\n")
    names = [str(tmp_path / "a.txt"), "-", str(tmp_path / "b.md")]
    document = load_files(names, io.BytesIO(b"piped\n"))
    assert document.text == (
        f"==> {names[0]} <==\none\ntwo\n\n==> standard input <==\npiped\n"
        f"\n==> {names[2]} <==\ncafé\n"
    )
    assert [part.name for part in document.parts] == [names[0], "standard input", names[2]]
    assert [part.encoding for part in document.parts] == ["utf-8", "utf-8", "cp1252"]
    assert document.encoding == "utf-8, cp1252"
    assert document.size_bytes == 7 + 6 + 6
    for part, text in zip(document.parts, ("one\ntwo", "piped\n", "café\n"), strict=True):
        assert document.text[part.start : part.end] == text


def test_the_name_of_many_files_is_short():
    assert joined("x", "y").name == "a, b"
    assert joined("x", "y", "z", "w").name == "a and 3 more files"


def test_a_line_break_in_a_files_name_makes_no_line():
    document = join([decode_document(b"x", "a\nb"), decode_document(b"y", "c")])
    assert document.text.startswith("==> a b <==\nx\n\n==> c <==")
    assert document.place(document.parts[1].start, document.parts[1].end) == ("c", (1, 1))


texts = st.lists(
    st.text(alphabet="ab \n", min_size=1, max_size=30).filter(str.strip), min_size=2, max_size=5
)


@given(texts)
@settings(max_examples=200, deadline=None)
def test_every_line_of_every_file_is_found_under_its_own_number(files):
    document = joined(*files)
    for part, text in zip(document.parts, files, strict=True):
        at = part.start
        lines = text.split("\n")
        for number, line in enumerate(lines, start=1):
            if line:
                assert document.place(at, at + len(line)) == (part.name, (number, number))
            at += len(line) + 1


@given(texts, st.data())
@settings(max_examples=200, deadline=None)
def test_any_span_is_cut_down_to_the_text_of_one_file(files, data):
    document = joined(*files)
    start = data.draw(st.integers(0, len(document.text) - 1))
    end = data.draw(st.integers(start + 1, len(document.text)))
    part, low, high = document.own(start, end)
    assert part.start <= low <= high <= part.end
    name, (first, last) = document.place(start, end)
    assert name == part.name and 1 <= first <= last <= part.lines
    own = files[document.parts.index(part)].split("\n")
    assert document.text[low:high].strip("\n") in "\n".join(own[first - 1 : last])


def test_empty_files_among_others_are_named_and_left_out(tmp_path):
    for name, text in (("a", ""), ("b", "b"), ("c", " \n")):
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in "abc"]
    notes: list[str] = []
    document = load_files(paths, note=notes.append)
    assert [part.name for part in document.parts] == [paths[1]]
    assert len(notes) == 2 and "a is empty" in notes[0] and "only white space" in notes[1]
    with pytest.raises(DocumentError, match=r"a is empty; .*c holds only white space"):
        load_files([paths[0], paths[2]])


def test_one_bad_file_refuses_them_all(tmp_path):
    (tmp_path / "a").write_text("text")
    with pytest.raises(DocumentError, match="no such file"):
        load_files([str(tmp_path / "a"), str(tmp_path / "missing")])
    (tmp_path / "b").write_bytes(b"%PDF-1.7")
    with pytest.raises(DocumentError, match="is a PDF"):
        load_files([str(tmp_path / "a"), str(tmp_path / "b")])


def test_standard_input_is_read_once():
    with pytest.raises(UsageError, match="given twice"):
        load_files(["-", "-"], io.BytesIO(b"text"))


def test_evidence_names_the_file_and_its_line():
    reader = make_reader()
    files = {name: prose(900, seed) for seed, name in enumerate("abc")}
    document = joined(*files.values())
    memory = reader.open(document, allow_whole=False)
    for _ in reader.read_steps(memory):
        pass
    answer = reader.ask(memory, "Who said 12 to captain Ahab?", AnswerOptions(max_tokens=8))
    passages = [*answer.evidence, *answer.reread]
    assert passages
    # No passage reaches from one file into the next.
    starts = memory.tokens.spans[:, 0]
    for part in document.parts[1:]:
        border = memory.passages.borders.tolist()
        assert any(i < len(starts) and starts[i] in range(part.heading, part.start) for i in border)
    for passage in passages:
        lines = files[passage.file].split("\n")
        first, last = passage.lines
        assert passage.text and passage.text in "\n".join(lines[first - 1 : last])
        assert "==>" not in passage.text
