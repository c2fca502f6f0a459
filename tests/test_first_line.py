"""The first line on standard error: when it comes early, and when it must not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from infllm_cli.first_line import say_first_line


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
