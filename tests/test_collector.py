"""The garbage collector rests while libraries are imported, and not a moment longer."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from infllm_cli import collector


@pytest.fixture(autouse=True)
def _as_before():
    yield
    gc.enable()
    gc.unfreeze()


def test_it_rests_until_it_is_woken():
    with collector.resting():
        assert not gc.isenabled()
        collector.wake()
        assert gc.isenabled() and gc.get_freeze_count()
        gc.unfreeze()
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


def test_waking_what_does_not_rest_changes_nothing():
    collector.wake()
    assert gc.isenabled() and not gc.get_freeze_count()


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
