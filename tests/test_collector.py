"""The garbage collector rests while libraries are imported, and not a moment longer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
from tiny_folder import save_folder
from tiny_tokenizers import prose

from infllm_cli import collector


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()


def test_it_rests_until_it_is_woken():
    with collector.resting():
        assert not gc.isenabled()
        collector.wake()
        assert gc.isenabled() and not gc.get_freeze_count()
    assert gc.isenabled()


def test_it_works_again_at_the_end_at_the_latest():
    with pytest.raises(KeyError), collector.resting():
        raise KeyError
    assert gc.isenabled()


def test_whoever_switched_it_off_keeps_it_off():
    gc.disable()
    with collector.resting():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("command, rests", [("ask", True), ("plan", False)])
def test_only_commands_that_load_a_model_let_it_rest(command, rests):
    code = (
        "import sys, gc; import infllm_cli.__main__ as m;"
        "m._run = lambda said: print(gc.isenabled());"
        f"sys.argv = ['infllm', {command!r}]; m.main()"
    )
    env = {**os.environ, "INFLLM_QUIET": "1"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert run.stdout.strip() == str(not rests)


def test_a_process_that_ends_by_itself_says_nothing_of_what_is_left(tmp_path):
    save_folder(tmp_path / "model")
    (tmp_path / "book.txt").write_text(prose(3000))
    arguments = ["--model", tmp_path / "model", "--cache-dir", tmp_path / "cache", "--quiet"]
    run = subprocess.run(
        [sys.executable, "-m", "infllm_cli", "ask", tmp_path / "book.txt", "Who?", *arguments],
        capture_output=True,
    )
    assert run.returncode == 0 and run.stderr == b""
