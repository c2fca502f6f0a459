"""Questions from arguments and from a file."""

from __future__ import annotations

import io

import pytest

from infllm_cli.errors import UsageError
from infllm_cli.questions import gather_questions

BOOK = "book.txt"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / BOOK).write_text("text")
    return tmp_path


def test_arguments_come_first_then_the_lines_of_the_file(here):
    (here / "q.txt").write_bytes("\ufeffOne?\r\n\r\n  Two?  \n\t\nThree — é?".encode())
    assert gather_questions(["Zero?"], "q.txt", [BOOK]) == ["Zero?", "One?", "Two?", "Three — é?"]
    assert gather_questions([], "q.txt", [BOOK])[0] == "One?"


def test_questions_by_standard_input(here):
    assert gather_questions([], "-", [BOOK], io.BytesIO(b"One?\n")) == ["One?"]
    with pytest.raises(UsageError, match="both the document and the --questions-file"):
        gather_questions([], "-", [BOOK, "-"], io.BytesIO(b"One?\n"))


@pytest.mark.parametrize("question", ["", "  ", "\n\t"])
def test_an_empty_question_is_refused(question):
    with pytest.raises(UsageError, match="a question is empty"):
        gather_questions(["What?", question], None, [BOOK])


def test_no_question_at_all_is_refused():
    with pytest.raises(UsageError, match="QUESTION is missing"):
        gather_questions([], None, [BOOK])


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\x89PNG\r\n\x1a\n\0\0"])
def test_a_questions_file_without_questions_is_refused_by_its_flag(here, content):
    (here / "q.txt").write_bytes(content)
    with pytest.raises(UsageError, match=r"--questions-file: q\.txt"):
        gather_questions(["What?"], "q.txt", [BOOK])


def test_a_questions_file_that_is_not_there_is_refused_by_its_flag():
    with pytest.raises(UsageError, match=r"--questions-file: none\.txt: no such file"):
        gather_questions([], "none.txt", [BOOK])


def test_swapped_file_and_question_are_seen():
    with pytest.raises(UsageError, match="did you swap file and question"):
        gather_questions([BOOK], None, ["What is it?"])
    with pytest.raises(UsageError, match="did you swap file and question"):
        gather_questions(["And this?", BOOK], None, ["What is it?"])
    with pytest.raises(UsageError, match="is not a file, and no QUESTION"):
        gather_questions([], None, ["What is it?"])
    # A question that happens to name a file, after a file, is a question.
    assert gather_questions([BOOK], None, [BOOK]) == [BOOK]
    assert gather_questions(["x" * 5000], None, ["y" * 5000]) == ["x" * 5000]


def test_a_question_without_quotes_is_seen():
    with pytest.raises(UsageError, match=r'in quotes: infllm ask book.txt "Who is Ahab\?"'):
        gather_questions(["Who", "is", "Ahab?"], None, [BOOK])
    for asked in (["Ahab?", "Starbuck?", "Queequeg?"], ["Ahab", "Starbuck"], ["a b", "c", "d"]):
        assert gather_questions(asked, None, [BOOK]) == asked


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UsageError, match="not UTF-8"):
        gather_questions([b"caf\xe9?".decode("utf-8", "surrogateescape")], None, [BOOK])
