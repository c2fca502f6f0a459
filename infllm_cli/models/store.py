"""How does a model get into the cache: once, whole, and never half-made under its name?

It is built in a temporary folder beside its place and renamed, under a lock between processes.
The cache is disposable: what is damaged in it is made again.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.models import convert
from infllm_cli.models.convert import Progress
from infllm_cli.models.folder import check_folder, read_json

STAMP = "infllm.json"
"""Beside each model that we converted: where it came from. Written last."""


def models_folder(cache_dir: Path) -> Path:
    """The folder of the cache that holds one folder for each converted model."""
    return cache_dir / "models"


def usable(folder: Path, sha256: str | None = None) -> bool:
    """Whether `folder` holds a whole model that this version of the converter made.

    With `sha256`, also whether it was made from the file of this hash.
    """
    stamp = read_json(folder / STAMP)
    if stamp.get("converter") != convert.CONVERTER_VERSION:
        return False
    if sha256 is not None and stamp.get("sha256") != sha256:
        return False
    try:
        check_folder(folder)
    except ModelError:
        return False
    return True


def install(
    target: Path,
    sha256: str,
    facts: dict[str, str],
    build: Callable[[Path, Path], None],
    report: Progress,
) -> None:
    """Call `build(work, made)`, which fills the folder `made`, and put `made` at `target`.

    `work` is for intermediate files, on the same disk; it is removed whatever happens. When a
    usable target appears meanwhile, that one stays. `facts` go into the stamp.

    Raises CapacityError when the disk is full, ModelError when the cache cannot be written.
    """
    models = target.parent
    with disk_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".lock-{target.name}", report) as alone:
            if usable(target, sha256):
                return
            prefix = f".tmp-{target.name}@"
            if alone:
                # What a killed process left: nobody else builds this model now.
                for leftover in models.glob(f"{prefix}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=prefix, dir=models))
            try:
                made = work / "model"
                made.mkdir()
                build(work, made)
                stamp = {
                    **facts,
                    "sha256": sha256,
                    "converter": convert.CONVERTER_VERSION,
                    "date": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
                }
                text = json.dumps(stamp, indent=2, ensure_ascii=False) + "\n"
                (made / STAMP).write_text(text, encoding="utf-8")
                _publish(made, target, sha256, work / "replaced")
            finally:
                shutil.rmtree(work, ignore_errors=True)


def _publish(made: Path, target: Path, sha256: str, aside: Path) -> None:
    try:
        made.rename(target)
    except OSError as exc:
        if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if usable(target, sha256):
            return
        target.rename(aside)  # broken, or of an older converter; goes with the work folder
        made.rename(target)


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[bool]:
    """Hold a lock between processes; gives False where the file system knows no locks.

    Without the lock two processes do the same work twice, which is wasteful and not wrong.
    """
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("waiting for another infllm that prepares the model", 0, 0)
                time.sleep(0.2)
            except OSError:
                yield False
                return
        yield True  # closing the file gives the lock back


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn what goes wrong with the cache folder into an error that says what to do."""
    try:
        yield
    except OSError as exc:
        if convert.is_disk_full(exc):
            raise CapacityError(
                f"the disk that holds {folder} is full: free some space or choose another cache "
                "folder; nothing half-made was kept"
            ) from exc
        raise ModelError(
            f"cannot use the model cache {folder} ({exc.strerror or exc}): mend its permissions "
            "or choose another cache folder"
        ) from exc


# --- hashes --------------------------------------------------------------------------------------


def file_sha256(path: Path, stage: str, report: Progress) -> str:
    """The file's hash, hexadecimal; progress in bytes."""
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
            done += len(data)
            report(stage, done, total)
    return digest.hexdigest()


def gguf_folder(path: Path, sha256: str, cache_dir: Path) -> Path:
    """Where the GGUF file `path` with this hash is converted to."""
    stem = re.sub(r"[^\w.-]", "_", path.stem)[:80]
    return models_folder(cache_dir) / f"gguf-{stem}-{sha256[:12]}"


def known_sha256(path: Path, cache_dir: Path) -> str | None:
    """The hash noted for a GGUF file, if its size and time of change are still the same."""
    key, state = _index_key(path)
    noted = read_json(_index(cache_dir)).get(key)
    if isinstance(noted, dict) and noted.get("state") == state:
        return str(noted.get("sha256"))
    return None


def gguf_sha256(path: Path, cache_dir: Path, report: Progress) -> str:
    """The hash of a GGUF file, which is noted so that an unchanged file is read only once."""
    known = known_sha256(path, cache_dir)
    if known is not None:
        return known
    key, state = _index_key(path)
    sha256 = file_sha256(path, f"hashing {path.name}", report)
    index = _index(cache_dir)
    noted = {**read_json(index), key: {"state": state, "sha256": sha256}}
    # Written beside and renamed. Of two processes the last one wins; what is lost is hashed again.
    with disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        fresh = index.with_name(f".{index.name}.{os.getpid()}")
        try:
            fresh.write_text(json.dumps(noted, indent=1), encoding="utf-8")
            fresh.replace(index)
        finally:
            fresh.unlink(missing_ok=True)
    return sha256


def _index(cache_dir: Path) -> Path:
    return cache_dir / "gguf-index.json"


def _index_key(path: Path) -> tuple[str, list[int]]:
    stat = path.stat()
    return str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
