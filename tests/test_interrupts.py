"""A Ctrl-C is not lost where Python swallows what is raised."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, signal, time
from infllm_cli.interrupts import two_stages

class Ending:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

signal.signal(signal.SIGINT, signal.default_int_handler)
with two_stages():
    try:
        ending = Ending()
        del ending
        time.sleep(5)
        print("lost")
    except KeyboardInterrupt:
        print("stopped")
"""


def test_an_interrupt_while_an_object_ends_comes_a_moment_later() -> None:
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("stopped\n", "")
