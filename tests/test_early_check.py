"""Checksums compared in the background vouch for what is still the same, and for nothing else."""

from __future__ import annotations

import json
import os
import time

import pytest

from infllm_cli import early_check, saved
from infllm_cli.checksums import BrokenFile, FileRecord
from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags
from infllm_cli.document import load_document
from infllm_cli.early_check import EarlyCheck
from infllm_cli.reading import Source
from infllm_cli.shelf import MANIFEST, Record, Shelf, load_record, save_record
from infllm_cli.tensor_files import write_tensors

DIGEST = "d" * 64
LONG_AGO = time.time() - 3600


def make(folder, digest=DIGEST, used=LONG_AGO, files=3):
    """A memory's folder whose files have not been touched for an hour, and their records."""
    torch = pytest.importorskip("torch")
    folder.mkdir(parents=True)
    records = []
    for number in range(files):
        name = f"segment-{number:05d}.safetensors"
        records.append(write_tensors(folder / name, {"a": torch.arange(5000) + number}, {}))
        os.utime(folder / name, (LONG_AGO, LONG_AGO))
    record = Record(
        folder.name, True, "a.txt", "model", "", 10, 10, 1, False, records, document_sha256=digest
    )
    save_record(folder, record)
    os.utime(folder / "memory.json", (used, used))
    return records


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    # The time of the last change of an inode cannot be set back.
    monkeypatch.setattr(early_check, "SETTLED_SECONDS", -1.0)


def done(early):
    """Wait until every file has been compared."""
    for found in early._found.values():
        found.result(timeout=30)
    return early


def test_whole_files_are_vouched_for(tmp_path):
    files = make(tmp_path / "key")
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    assert all(early.vouches(tmp_path / "key", file) for file in files)


@pytest.mark.parametrize("damage", ["flip", "short", "long", "gone"])
def test_a_broken_file_is_not(tmp_path, damage):
    files = make(tmp_path / "key")
    path = tmp_path / "key" / files[1].name
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 4
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"short": data[:-1], "long": data + b"x"}.get(damage, data))
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    assert [early.vouches(tmp_path / "key", file) for file in files] == [True, False, True]


def test_a_file_that_changes_afterwards_is_not(tmp_path):
    files = make(tmp_path / "key")
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    path = tmp_path / "key" / files[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, (LONG_AGO, LONG_AGO))  # whoever sets this back does not set back the other
    assert not early.vouches(tmp_path / "key", files[0])
    assert early.vouches(tmp_path / "key", files[1])


def test_a_file_written_just_now_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(early_check, "SETTLED_SECONDS", 60.0)
    files = make(tmp_path / "key")
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    assert not any(early.vouches(tmp_path / "key", file) for file in files)


def test_other_records_and_folders_are_not(tmp_path):
    files = make(tmp_path / "key")
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    other = FileRecord(files[0].name, files[0].size, files[0].crc32 ^ 1)
    assert not early.vouches(tmp_path / "key", other)
    assert not early.vouches(tmp_path / "another", files[0])


def test_of_several_memories_of_a_document_the_last_used_is_compared(tmp_path):
    old = make(tmp_path / "old", used=LONG_AGO - 9)
    new = make(tmp_path / "new", used=LONG_AGO)
    make(tmp_path / "other", digest="e" * 64, used=LONG_AGO + 9)
    early = done(EarlyCheck(Shelf(tmp_path), DIGEST))
    assert early.vouches(tmp_path / "new", new[0])
    assert not early.vouches(tmp_path / "old", old[0])


def test_what_has_not_begun_is_left_to_the_caller(tmp_path, monkeypatch):
    monkeypatch.setattr(early_check, "CHECKERS", 0)
    files = make(tmp_path / "key")
    early = EarlyCheck(Shelf(tmp_path), DIGEST)
    assert not any(early.vouches(tmp_path / "key", file) for file in files)
    early.close()


def test_no_memory_is_no_matter(tmp_path):
    early = EarlyCheck(Shelf(tmp_path / "none"), DIGEST)
    assert not early.vouches(tmp_path, FileRecord("a", 1, 1))
    early.close()


def test_loading_compares_only_what_nobody_vouches_for(tmp_path, monkeypatch):
    files = make(tmp_path / "key")
    checked = []

    def check(folder, file):
        checked.append(file.name)
        raise BrokenFile("enough")

    class Early:
        def vouches(self, folder, file):
            return file is not files[1]

    monkeypatch.setattr(saved, "check", check)
    place = type("Place", (), {"folder": tmp_path / "key"})
    record = type("Record", (), {"files": files})
    with pytest.raises(BrokenFile, match="enough"):
        saved.load(place, record, None, release=False, early=Early())
    assert checked == [files[1].name]


def test_a_record_tells_the_document_where_older_versions_do_not_look(tmp_path):
    make(tmp_path / "key")
    told = json.loads((tmp_path / "key" / MANIFEST).read_text())
    assert "document_sha256" not in told["memory"]
    assert load_record(tmp_path / "key").document_sha256 == DIGEST
    del told["document_sha256"]
    (tmp_path / "key" / MANIFEST).write_text(json.dumps(told))
    assert load_record(tmp_path / "key").document_sha256 == ""


@pytest.mark.parametrize("kept, save", [(True, True), (True, False), (False, True)])
def test_nothing_is_compared_where_no_memory_will_be_asked(tmp_path, kept, save):
    (tmp_path / "a.txt").write_text("A document.")
    document = load_document(str(tmp_path / "a.txt"))
    files = make(tmp_path / "memories" / "key", digest=document.sha256)
    flags = ModelFlags(cache_dir=tmp_path), LimitFlags(save=save), SizeFlags()
    early = Source(document, *flags, kept).early
    assert (early is not None) == (kept and save)
    if early is not None:
        assert done(early).vouches(tmp_path / "memories" / "key", files[0])
