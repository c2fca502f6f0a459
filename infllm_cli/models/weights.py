"""Which weights are these? By their content, not by their name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from infllm_cli.models.folder import read_json
from infllm_cli.models.store import file_sha256

Progress = Callable[[str, int, int], None]


def weights_sha256(folder: Path, cache_dir: Path, report: Progress) -> str:
    """A hash over the names and contents of the safetensors files in `folder`.

    Noted in the cache per path, size and times of change, so that it is read from the disk once.

    Raises:
        OSError: a file cannot be read.
    """
    index = cache_dir / "weights-index.json"
    noted = read_json(index)
    found: dict[str, object] = {}
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        key = str(path.resolve())
        known = noted.get(key)
        if isinstance(known, dict) and known.get("state") == state:
            sha256 = str(known.get("sha256"))
        else:
            sha256 = file_sha256(path, "hashing the weights", report)
            found[key] = {"state": state, "sha256": sha256}
        total.update(f"{path.name}\0{sha256}\n".encode())
    if found:
        # What cannot be noted is hashed again; of two processes the last one wins.
        with contextlib.suppress(OSError):
            cache_dir.mkdir(parents=True, exist_ok=True)
            fresh = index.with_name(f".{index.name}.{os.getpid()}")
            try:
                fresh.write_text(json.dumps({**noted, **found}, indent=1), encoding="utf-8")
                fresh.replace(index)
            finally:
                fresh.unlink(missing_ok=True)
    return total.hexdigest()
