"""The first line on standard error: when it comes early, and when it must not."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from infllm_cli.first_line import ON_TERMINALS, say_first_line


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A configuration folder without a file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "infllm" / "config.toml"


@pytest.mark.parametrize("command", ["ask", "read"])
def test_a_command_that_takes_a_while_says_that_it_starts(settings, capsys, command):
    assert say_first_line([command, "book.txt", "What?", "-m", "quick", "--seed", "1"], {})
    assert capsys.readouterr().err == "infllm: starting\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plan", "book.txt"],
        ["--help"],
        ["ask", "--help"],
        ["ask", "book.txt", "What?", "--quiet"],
        ["ask", "book.txt", "What?", "-qm", "name"],
        ["read", "-h"],
    ],
)
def test_silence_help_and_quick_commands_have_no_such_line(settings, capsys, arguments):
    assert not say_first_line(arguments, {})
    assert capsys.readouterr().err == ""


def test_a_setting_may_ask_for_silence(settings, capsys):
    arguments = ["ask", "book.txt", "What?"]
    assert not say_first_line(arguments, {"INFLLM_QUIET": "1"})
    settings.parent.mkdir()
    settings.write_text("quiet = true")
    assert not say_first_line(arguments, {})
    assert capsys.readouterr().err == ""


def test_it_is_said_once_and_without_typer(settings):
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['infllm', 'ask', 'no', 'What?']\n"
        "from infllm_cli.__main__ import main\n"
        "try: main()\nexcept ImportError: pass"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.stderr == b"infllm: starting\n"
    command = [sys.executable, "-m", "infllm_cli", "ask", "no", "What?"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.stderr.count(b"starting") == 1


class Terminal(io.TextIOWrapper):
    """A terminal that takes what its encoding has."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


def test_a_terminal_is_told_at_once_and_the_display_takes_the_line_s_place(settings, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert not say_first_line(["ask", "book.txt", "What?"], {"TERM": "xterm"})
    assert terminal.shown() == ON_TERMINALS
    assert ON_TERMINALS.endswith("\r") and "\n" not in ON_TERMINALS


@pytest.mark.parametrize("arguments", [["ask", "--help"], ["plan", "x"], ["ask", "x", "-q"]])
def test_a_terminal_is_not_told_where_silence_may_be_wanted(settings, monkeypatch, arguments):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert not say_first_line(arguments, {"TERM": "xterm"})
    assert terminal.shown() == ""


def test_a_terminal_without_the_characters_is_told_later(settings, monkeypatch):
    terminal = Terminal("latin-1")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert not say_first_line(["ask", "book.txt", "What?"], {"TERM": "xterm"})
    assert terminal.shown() == ""


def test_a_dumb_terminal_gets_a_line(settings, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert say_first_line(["ask", "book.txt", "What?"], {"TERM": "dumb"})
    assert terminal.shown() == "infllm: starting\n"


def test_a_terminal_is_told_before_typer_is_imported(settings):
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['infllm', 'ask', 'no', 'What?']\n"
        "from infllm_cli.__main__ import main\n"
        "try: main()\nexcept ImportError: pass"
    )
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", code]
    subprocess.run(command, stderr=follower, env=environment, timeout=60)
    os.close(follower)
    assert os.read(leader, 1000).decode() == ON_TERMINALS
    os.close(leader)
