"""How C becomes a library in the cache folder: the system's compiler, once per machine and source.

A library is kept under a name made of everything that it depends on, with a digest beside it, so
that a file cut off or altered is compiled again instead of loaded. It is written under a name of
its own and then renamed: processes that compile at once do not see each other's halves.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = ("native.h", "products.c", "scan.c", "load.c", "attend.c", "gather.c", "native.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=off",  # torch multiplies and adds one after the other
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
)
THREADS = "-fopenmp"
LIMIT_SECONDS = 120
KEY_DIGITS = 24


class NativeError(Exception):
    """There is no library, and why: one line."""


def library_in(folder: Path) -> ctypes.CDLL:
    """The library out of a folder, compiled into it if it is not there.

    Raises:
        NativeError: no compiler, or one that fails; another kind of system; a folder that cannot be
            written.
    """
    if sys.platform != "linux" or sys.byteorder != "little":
        raise NativeError(f"not written for {sys.platform} on {platform.machine()}")
    compiler = find_compiler()
    sources = {name: (Path(__file__).parent / name).read_bytes() for name in SOURCES}
    path = folder / f"answer-{_key(compiler, sources)}.so"
    try:
        if not _is_whole(path):
            _compile(compiler, sources, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{type(error).__name__}: {error}") from error


def find_compiler() -> str:
    """The path of a C compiler.

    Raises:
        NativeError: there is none.
    """
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise NativeError(f"no C compiler ({', '.join(COMPILERS)})")


def _key(compiler: str, sources: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, text in sources.items():
        digest.update(f"{name} {len(text)}\n".encode() + text)
    digest.update(repr((FLAGS, THREADS, compiler, _run([compiler, "--version"]))).encode())
    digest.update(_processor().encode())
    return digest.hexdigest()[:KEY_DIGITS]


def _processor() -> str:
    """What `-march=native` depends on: kind and abilities of the processor."""
    names = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = [line for line in lines if line.split(":")[0].strip() in names]
    return "\n".join([platform.machine(), *facts])


def _compile(compiler: str, sources: dict[str, bytes], path: Path) -> None:
    """Compile to `path`; the rename at the end is what others see."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compiling-") as name:
        work = Path(name)
        for file, text in sources.items():
            (work / file).write_bytes(text)
        arguments = [compiler, *FLAGS, "-c", str(work / "native.c"), "-o", str(work / "native.o")]
        try:
            _run([*arguments, THREADS])
        except NativeError:  # a compiler without OpenMP: one thread
            _run(arguments)
        # Not linked with OpenMP's library: torch has brought one, and its threads are to be used.
        # A second one would start threads of its own beside them.
        built = work / "native.so"
        _run([compiler, "-shared", str(work / "native.o"), "-o", str(built), "-lm"])
        digest = hashlib.sha256(built.read_bytes()).hexdigest()
        (work / "digest").write_text(digest)
        # The digest last: a library without the right one is not loaded.
        built.replace(path)
        (work / "digest").replace(_digest_of(path))


def _is_whole(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == _digest_of(path).read_text()
    except OSError:
        return False


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        NativeError: it failed; the first line of what it said.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeError(f"{Path(command[0]).name}: {type(error).__name__}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise NativeError(f"{Path(command[0]).name} failed: {said[0]}")
    return done.stdout
