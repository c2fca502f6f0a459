"""`infllm` and `python -m infllm_cli`: run the command line and turn failures into exit codes."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; exits with the documented codes."""
    # Third parties' progress bars and advice are not for our users.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from infllm_cli.cli import app
    from infllm_cli.errors import InfllmError, Interrupted

    try:
        app()
    except InfllmError as error:
        _say(f"infllm: {error}")
        sys.exit(error.exit_code)
    except Interrupted as stop:
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        _say("infllm: interrupted.")
        sys.exit(Interrupted.exit_code)
    except BrokenPipeError:
        # The reader of our output has what it wanted (`| head`). Python would complain once more
        # while closing the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except MemoryError:
        _say("infllm: out of memory. Choose a smaller --model or --window.")
        sys.exit(5)


def _say(message: str) -> None:
    try:
        sys.stderr.write(message + "\n")
        sys.stderr.flush()
    except (BrokenPipeError, ValueError):
        pass


if __name__ == "__main__":
    main()
