"""How fast did a model read on this machine, the last time?

One small file beside the models. It is only a figure for estimates: what cannot be read is not
known, what cannot be written is not remembered.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

LEAST_TOKENS = 512  # fewer tell of the start, not of the speed


def remember(
    cache_dir: Path, model: str, device: str, dtype: str, tokens: int, seconds: float
) -> None:
    """Note a reading of so many tokens; short ones are left out."""
    if tokens < LEAST_TOKENS or seconds <= 0:
        return
    speeds = _load(cache_dir)
    speeds[_key(model, device, dtype)] = round(tokens / seconds, 1)
    fresh = _file(cache_dir).with_name(f".speeds.{os.getpid()}")
    with contextlib.suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(json.dumps(speeds, indent=1) + "\n", encoding="utf-8")
            fresh.replace(_file(cache_dir))
        finally:
            fresh.unlink(missing_ok=True)


def last_speed(cache_dir: Path, model: str, device: str, dtype: str) -> float | None:
    """Tokens per second of the last reading, or None where there was none."""
    speed = _load(cache_dir).get(_key(model, device, dtype))
    return float(speed) if isinstance(speed, (int, float)) and speed > 0 else None


def _file(cache_dir: Path) -> Path:
    return cache_dir / "speeds.json"


def _key(model: str, device: str, dtype: str) -> str:
    return f"{model} {device} {dtype}"


def _load(cache_dir: Path) -> dict[str, Any]:
    try:
        value = json.loads(_file(cache_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
