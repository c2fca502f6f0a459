"""The user's own defaults: `config.toml` in the configuration folder, keys named as the flags.

Precedence: flag, environment variable, file, default. What the file holds is checked before
anything else happens, so that a misspelled key is not silently without effect.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

from infllm_cli.errors import UsageError
from infllm_cli.memory.knobs import (
    CachePolicy,
    InfiniGates,
    InfiniUpdate,
    Lookup,
    Policy,
    Positions,
    Relevance,
    RepresentativeRule,
    Sharing,
)

WHOLE, NUMBER, TEXT, SWITCH = "a whole number", "a number", "a string", "true or false"

# Every setting: a flag that may as well stand in the file or, as INFLLM_ and its name, in the
# environment. What belongs to one document (its encoding, its questions) is no setting.
SETTINGS: dict[str, str | tuple[str, ...]] = {
    "model": TEXT,
    "cache-dir": TEXT,
    "device": TEXT,
    "dtype": ("auto", "bf16", "f16", "f32"),
    "max-tokens": WHOLE,
    "temperature": NUMBER,
    "top-p": NUMBER,
    "seed": WHOLE,
    "answering": ("both", "memory", "passages"),
    "quote": ("auto", "always", "never"),
    "length": ("short", "medium", "long"),
    "wording": ("auto", "own", "quoted"),
    "evidence": WHOLE,
    "stats": SWITCH,
    "quiet": SWITCH,
    "host-limit": TEXT,
    "disk-limit": TEXT,
    "device-limit": TEXT,
    "save": SWITCH,
    "store": ("auto", "full", "int8", "fp8", "int4"),
    "memory-budget": TEXT,
    "window": WHOLE,
    "sinks": WHOLE,
    "blocks": WHOLE,
    "read-blocks": WHOLE,
    "chunk": WHOLE,
    "policy": tuple(item.value for item in Policy),
    "block": WHOLE,
    "representatives": WHOLE,
    "representative-rule": tuple(item.value for item in RepresentativeRule),
    "relevance": tuple(item.value for item in Relevance),
    "sharing": tuple(item.value for item in Sharing),
    "positions": tuple(item.value for item in Positions),
    "read-lookup": tuple(item.value for item in Lookup),
    "answer-lookup": tuple(item.value for item in Lookup),
    "device-cache": WHOLE,
    "device-cache-policy": tuple(item.value for item in CachePolicy),
    "infini-segment": WHOLE,
    "infini-update": tuple(item.value for item in InfiniUpdate),
    "infini-gates": tuple(item.value for item in InfiniGates),
    "reread-tokens": WHOLE,
    "encoder": TEXT,
    "candidates": WHOLE,
    "scan-every": WHOLE,
}
_TYPES: dict[str, tuple[type, ...]] = {
    WHOLE: (int,),
    NUMBER: (int, float),
    TEXT: (str,),
    SWITCH: (bool,),
}


def config_path() -> Path:
    """Where the file is looked for, by the platform's rules. It need not exist."""
    import platformdirs

    return platformdirs.user_config_path("infllm") / "config.toml"


def load_config(path: Path) -> dict[str, Any]:
    """The file's values by parameter name; none where there is no file.

    Raises:
        UsageError: it cannot be read, is no TOML, or holds an unknown key or a value of a wrong
            kind; the message names file and key.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        values = tomllib.loads(data.decode())
    except ValueError as error:  # of TOML and of UTF-8
        raise UsageError(f"{path}: not valid TOML: {error}.") from None
    return {key.replace("-", "_"): _checked(path, key, value) for key, value in values.items()}


def _checked(path: Path, key: str, value: Any) -> Any:
    kind = SETTINGS.get(key)
    if kind is None:
        near = difflib.get_close_matches(key, SETTINGS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(SETTINGS)}."
        raise UsageError(f"{path}: unknown key {key!r}; {hint}")
    if isinstance(kind, tuple):
        if value not in kind:
            raise UsageError(f"{path}: {key} is {value!r}; choose {', '.join(kind)}.")
        return value
    # Of TOML's types only the boolean passes for another one in Python.
    fits = isinstance(value, _TYPES[kind]) and (kind == SWITCH or not isinstance(value, bool))
    if not fits:
        raise UsageError(f"{path}: {key} is {value!r}; it must be {kind}.")
    return str(Path(value).expanduser()) if key == "cache-dir" else value
