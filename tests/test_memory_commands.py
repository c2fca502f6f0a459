"""The commands around memories, as a user runs them: export, ask a file, ask several, prune."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_folder import save_folder
from tiny_tokenizers import prose

from infllm_cli import machine, memories
from infllm_cli.errors import InfllmError
from infllm_cli.limits import memories_folder
from infllm_cli.shelf import Shelf


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two documents and their memories, and the model that read them."""
    folder = tmp_path_factory.mktemp("commands")
    save_folder(folder / "model")
    (folder / "a.txt").write_text(prose(6000))
    (folder / "b.txt").write_text(prose(5000)[700:])
    return folder


def common(place, cache):
    return ["--model", place / "model", "--cache-dir", cache]


@pytest.fixture(scope="module")
def exported(server, place):
    for name in ("a", "b"):
        target = place / f"{name}.infllm"
        arguments = ["read", place / f"{name}.txt", "-o", target, *common(place, place / "cache")]
        done = server.run([*arguments, "--dtype", "f32"])
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode() == f"{target}\n"
    return place


ASK = ["--answering", "memory", "--max-tokens", 6, "--json"]


def told(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_moved_memory_answers_as_its_document_does_and_reads_nothing(server, exported, tmp_path):
    where = common(exported, exported / "cache")
    right = told(
        server.run(["ask", exported / "a.txt", "What?", *ASK, *where, "--dtype", "f32", "--save"])
    )
    assert right["read"]["tokens"] == 0
    moved = tmp_path / "moved.infllm"
    moved.write_bytes((exported / "a.infllm").read_bytes())
    # Its own model, dtype and sizes; and another cache, which holds nothing.
    done = server.run(["ask", moved, "What?", *ASK, *common(exported, tmp_path / "cache")])
    found = told(done)
    assert b"none is read again" in done.stderr
    assert found["read"]["tokens"] == 0
    assert found["read"]["reused_tokens"] == found["document"]["tokens"]
    assert found["document"] == right["document"]
    assert found["model"]["dtype"] == "float32"
    for key in ("answer", "evidence", "finish"):
        assert found["answers"][0][key] == right["answers"][0][key]
    assert list((tmp_path / "cache").glob("memories/*")) == []
    limited = ["ask", moved, "What?", *ASK, *common(exported, tmp_path), "--host-limit", "1MB"]
    assert told(server.run(limited))["answers"][0]["answer"] == found["answers"][0]["answer"]


def test_several_memories_are_asked_together_and_evidence_names_the_document(server, exported):
    files = [exported / "a.infllm", "What?", "-f", exported / "b.infllm"]
    found = told(server.run(["ask", *files, *ASK, *common(exported, exported / "cache")]))
    names = [str(exported / "a.txt"), str(exported / "b.txt")]
    assert [file["name"] for file in found["document"]["files"]] == names
    assert found["read"]["tokens"] == 0
    for passage in found["answers"][0]["evidence"]:
        lines = Path(passage["file"]).read_text().split("\n")
        first, last = passage["lines"]
        assert passage["text"] in "\n".join(lines[first - 1 : last])


def test_what_cannot_be_asked_says_why(server, exported, tmp_path):
    where = common(exported, exported / "cache")

    def fails(*arguments):
        done = server.run(["ask", *arguments, *ASK, *where])
        assert done.stdout == b""
        return done.returncode, done.stderr.decode()

    memory = exported / "a.infllm"
    code, says = fails(memory, "What?", "-f", exported / "b.txt")
    assert code == 2 and "infllm read" in says
    code, says = fails(memory, "What?", "--window", 300)
    assert code == 2 and "--window is 300" in says
    code, says = fails(memory, "What?", "--dtype", "bf16")
    assert code == 4 and "--dtype" in says
    damaged = tmp_path / "x.infllm"
    damaged.write_bytes(memory.read_bytes()[:-1])
    code, says = fails(damaged, "What?")
    assert code == 3 and "damaged" in says
    damaged.write_bytes(b"")
    assert fails(damaged, "What?")[0] == 3
    save_folder(tmp_path / "other", rms_norm_eps=1e-3)
    done = server.run(["ask", memory, "What?", *ASK, "--model", tmp_path / "other", *where[2:]])
    assert done.returncode == 4 and b"was made by model" in done.stderr
    done = server.run(["read", exported / "a.txt", "-o", exported / "b.txt", *where])
    assert done.returncode == 2 and (exported / "b.txt").read_text() == prose(5000)[700:]


def test_a_target_that_is_too_small_is_refused_before_reading(server, exported, tmp_path):
    setup = "from infllm_cli import machine; machine.free_disk = lambda folder: 10_000"
    target = tmp_path / "a.infllm"
    arguments = ["read", exported / "a.txt", "-o", target, *common(exported, tmp_path / "cache")]
    done = server.run([*arguments, "--dtype", "f32"], setup=setup)
    assert done.returncode == 5 and b"its disk has room for" in done.stderr
    assert b"tokens, into blocks" not in done.stderr and not target.exists()


def test_prune_keeps_the_budget_and_what_was_used_last(server, place, tmp_path):
    where = ["--cache-dir", tmp_path]
    for name in ("a", "b"):
        arguments = ["read", place / f"{name}.txt", *common(place, tmp_path), "--dtype", "f32"]
        assert server.run(arguments).returncode == 0
    newest, oldest = Shelf(memories_folder(tmp_path)).entries()
    left = memories_folder(tmp_path) / "spilled-1-a"
    left.mkdir()
    assert server.run(["memory", "prune", *where]).stdout == b""
    assert not left.exists()
    done = server.run(["memory", "prune", "--memory-budget", newest.size, *where])
    assert done.returncode == 0 and done.stdout.decode().startswith(oldest.key[:12])
    assert [entry.key for entry in Shelf(memories_folder(tmp_path)).entries()] == [newest.key]
    assert server.run(["memory", "prune", "--memory-budget", "much", *where]).returncode == 2
    used = Shelf(memories_folder(tmp_path)).take(newest.key)
    with pytest.raises(InfllmError, match="in use"):
        memories.prune(tmp_path, 0)
    used.close()
    assert newest.key[:12] in memories.prune(tmp_path, 0)


def test_memory_that_is_freed_goes_back_to_the_system():
    import torch

    held = [torch.ones(100_000) for _ in range(400)]  # 160 MB in pieces that are not mapped alone
    keep = held[::50]
    before = rss()
    del held
    machine.give_back_memory()
    assert rss() < before - 100_000_000 and len(keep) == 8


def rss():
    import psutil

    return psutil.Process().memory_info().rss
