"""`infllm` and `python -m infllm_cli`: run the command line and turn failures into exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys

from infllm_cli import collector


def main() -> None:
    """Run the command line; exits with the documented codes."""
    _mend_streams()
    # Third parties' progress bars and advice are not for our users.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from infllm_cli.first_line import COMMANDS, say_first_line

    said = say_first_line(sys.argv[1:])
    loads = bool(COMMANDS & set(sys.argv[1:2]))  # a model, and then wakes the collector
    with collector.resting() if loads else contextlib.nullcontext():
        _run(said)


def _run(said: bool) -> None:
    from infllm_cli.cli import app
    from infllm_cli.errors import CapacityError, InfllmError, Interrupted, OutputClosed
    from infllm_cli.interrupts import two_stages

    try:
        with two_stages():
            app(obj=said)
    except InfllmError as error:
        _say(f"infllm: {error}")
        sys.exit(error.exit_code)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except OutputClosed as end:
        # Python would complain once more while closing the stream.
        _close_output()
        sys.exit(end.exit_code)
    except OSError as error:
        # What is not turned into an error where it happens: writing the answer, first of all.
        _close_output()
        what = error.filename or "the answer cannot be written"
        _say(f"infllm: {what}: {error.strerror or error}.")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        sys.exit(CapacityError.exit_code if full else InfllmError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _say(
            "infllm: out of memory. Choose a smaller --model, --window or --chunk; `infllm plan` "
            "tells what a document takes."
        )
        sys.exit(CapacityError.exit_code)


def _is_out_of_memory(error: Exception) -> bool:
    # torch has a kind of its own for GPUs, and none for processors.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "allocate memory" in str(error)


def _mend_streams() -> None:
    """Have three streams that can be used, whatever the parent process left of them."""
    for name, mode in (("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the parent (`>&-`)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123
    if hasattr(sys.stdout, "reconfigure"):
        # A character that the terminal's encoding does not have must not cost the answer.
        sys.stdout.reconfigure(errors="backslashreplace")


def _close_output() -> None:
    """Let nobody try to write what is left: Python would complain while closing the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str) -> None:
    from infllm_cli.wording import visible

    try:
        sys.stderr.write(visible(message) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
