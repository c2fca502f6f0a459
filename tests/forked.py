"""The command in a process of its own, without the seconds that importing torch takes.

A server imports everything once; each run is a fork of it with its own streams, environment and
interrupts. What depends on a fresh interpreter is tested with a real process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass
class Done:
    """As of `subprocess.run`."""

    returncode: int
    stdout: bytes
    stderr: bytes


class Child:
    """A running command."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it without mercy."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60) -> int:
        """Its exit code."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            return self.server.tell({"wait": self.pid})["code"]
        finally:
            timer.cancel()


class Server:
    """Forks commands."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
        )
        theirs.close()

    def close(self) -> None:
        """End the server."""
        self.socket.close()
        self.process.wait(10)

    def tell(self, request: dict[str, Any], fds: Iterable[int] = ()) -> dict[str, Any]:
        """Send a request, wait for the answer."""
        socket.send_fds(self.socket, [json.dumps(request).encode()], list(fds))
        return json.loads(self.socket.recv(1 << 20))

    def start(
        self,
        arguments: Iterable[object],
        streams: tuple[int, int, int],
        *,
        answer: str | None = None,
        delay: float = 0.0,
        env: dict[str, str] | None = None,
        setup: str = "",
    ) -> Child:
        """Start a command on the given streams (-1: closed).

        Args:
            answer: what the model says, whatever it is asked.
            delay: seconds that each pass through the model takes more.
            setup: statements to run before.
        """
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            told = self.tell(
                {
                    "argv": ["infllm", *map(str, arguments)],
                    "closed": [stream == -1 for stream in streams],
                    "answer": answer,
                    "delay": delay,
                    "env": env or {},
                    "setup": setup,
                },
                [nothing if stream == -1 else stream for stream in streams],
            )
        finally:
            os.close(nothing)
        return Child(self, told["pid"])

    def run(
        self, arguments: Iterable[object], *, input: bytes = b"", closed: int = -1, **how: Any
    ) -> Done:
        """Run a command to its end; `input` comes through a pipe."""
        read, write = os.pipe()

        def feed() -> None:
            with contextlib.suppress(BrokenPipeError), os.fdopen(write, "wb") as pipe:
                pipe.write(input)

        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = [read, out.fileno(), err.fileno()]
            if closed >= 0:
                streams[closed] = -1
            child = self.start(arguments, tuple(streams), **how)
            os.close(read)
            feeder = threading.Thread(target=feed)
            feeder.start()
            code = child.wait()
            feeder.join()
            out.seek(0)
            err.seek(0)
            return Done(code, out.read(), err.read())


# --- in the server -------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Fork a command per request."""
    import scripted  # imports torch and everything else
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    while True:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not data:
            return
        request = json.loads(data)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            told = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if pid == 0:
                connection.close()
                become(request, fds, scripted)
            for fd in fds:
                os.close(fd)
            told = {"pid": pid}
        connection.send(json.dumps(told).encode())


def become(request: dict[str, Any], fds: list[int], scripted: Any) -> NoReturn:
    """Be the command, as a fresh interpreter would be."""
    os.setsid()
    os.environ.update(request["env"])
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    kinds = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
    for number, (name, mode) in enumerate(kinds):
        stream = None
        if request["closed"][number]:
            os.close(number)
        else:
            errors = "backslashreplace" if name == "stderr" else "strict"
            encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
            buffering = 1 if name == "stderr" or os.isatty(number) else -1
            stream = open(number, mode, buffering, encoding, errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = request["argv"]
    code: object = 0
    try:
        exec(request["setup"], {})
        scripted.command(request["answer"], request["delay"])
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:
        sys.stdout.flush()
    except OSError as error:
        os.write(2, f"Exception ignored: {error}\n".encode())
        code = 120
    os._exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(socket.socket(fileno=int(sys.argv[1])))
