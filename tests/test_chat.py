"""`infllm chat` as a user runs it: by pipe, at a terminal, with Ctrl-C."""

from __future__ import annotations

import json

import pytest
from terminals import on_terminal
from tiny_folder import save_folder
from tiny_tokenizers import prose

ANSWER = "It is the boat."
QUESTIONS = b"What is it?\n\n/evidence 2\nAnd where?\n/stats\n/quit\nNever asked?\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def chat(place, *more):
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    common += ["--quote", "never"]  # what is tested is the course of a conversation
    return ["chat", place / "book.txt", *more, *common]


def test_a_pipe_has_a_question_on_each_line_and_commands(server, place):
    done = server.run(chat(place), input=QUESTIONS, answer=ANSWER)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == f"{ANSWER}\n\n{ANSWER}\n"
    error = done.stderr.decode()
    assert error.count("infllm: evidence line") == 2
    assert "infllm: 2 turns, " in error
    assert b"\x1b" not in done.stdout + done.stderr


def test_json_is_a_line_for_each_answer(server, place):
    done = server.run(chat(place, "--json", "-q"), input=QUESTIONS, answer=ANSWER)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["question"] for answer in told] == ["What is it?", "And where?"]
    assert all(answer["answer"] == ANSWER and answer["evidence"] for answer in told)
    assert done.stderr == b""


def test_a_conversation_is_saved_once_and_never_over_a_file(server, place, tmp_path):
    path = tmp_path / "talk.md"
    typed = f"/evidence\n/save {path}\nWhat?\n/save\n/save {path}\n/nonsense\n/help\n".encode()
    path.write_text("mine")
    done = server.run(chat(place), input=typed, answer=ANSWER)
    error = done.stderr.decode()
    assert "nothing has been asked yet" in error and "exists; choose another" in error
    assert "give a file" in error and "/nonsense is no command" in error and "/quit" in error
    assert path.read_text() == "mine"
    other = tmp_path / "other.md"
    server.run(chat(place), input=f"What?\n/save {other}\n".encode(), answer=ANSWER)
    assert f"**What?**\n\n{ANSWER}\n" in other.read_text()


def test_at_a_terminal_ctrl_c_stops_an_answer_and_not_the_conversation(server, place, tmp_path):
    typed: list[bytes] = []

    def start(tty):
        environment = {"TERM": "xterm", "XDG_STATE_HOME": str(tmp_path)}
        return server.start(
            chat(place), (tty, tty, tty), env=environment, answer="word " * 400, delay=0.005
        )

    def typing(seen, child, keys):
        stage = len(typed)
        if stage == 0 and b"has been read" in seen:
            typed.append(b"1")
            keys(b"What is it?\n")
        elif stage == 1 and seen.count(b"word word") > 2:
            typed.append(b"2")
            child.interrupt()
        elif stage == 2 and seen.count(b"interrupted; the answer") == 1:
            typed.append(b"3")
            keys(b"And where?\n")
        elif stage == 3 and seen[seen.rfind(b"And where?") :].count(b"word word") > 2:
            typed.append(b"4")
            child.interrupt()
        elif stage == 4 and seen.count(b"interrupted; the answer") == 2:
            typed.append(b"5")
            keys(b"/stats\n/quit\n")

    session = on_terminal(start, typing=typing)
    assert session.code == 0
    shown = "\n".join(session.lines(100, 30))
    assert "2 turns, " in shown
    history = tmp_path / "infllm" / "history"
    assert "What is it?" in history.read_text() and "And where?" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["--answering", "passages"], 2, "chat needs both or memory"),
        (["-f", "-"], 2, "name the document's file"),
        (["--evidence", "-1"], 2, "--evidence"),
        (["--max-tokens", "0"], 2, "--max-tokens"),
    ],
)
def test_what_cannot_work_says_why(server, place, more, code, says):
    done = server.run(chat(place, *more))
    assert done.returncode == code
    assert says in done.stderr.decode() and b"Traceback" not in done.stderr
