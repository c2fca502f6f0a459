"""`infllm eval TASK` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_folder
from tiny_tokenizers import prose

SIZES = ["--window", 128, "--sinks", 8, "--blocks", 2, "--chunk", 64]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    save_folder(folder / "model", max_position_embeddings=1024)
    (folder / "book.txt").write_text(prose(9000))
    return folder


@dataclass(frozen=True)
class Ran:
    returncode: int
    stdout: str
    stderr: str


def run(server: Any, place: Path, *arguments: object) -> Ran:
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    done = server.run(["eval", *arguments, *common, *SIZES])
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_task_prints_a_table_writes_results_and_draws(server: Any, place: Path) -> None:
    out, svg, png = (place / f"r.{kind}" for kind in ("jsonl", "svg", "png"))
    arguments = [
        "needle", "--document", place / "book.txt", "--lengths", "1k,1500", "--depths", 2,
        "--policies", "infllm,streaming-llm", "-o", out, "--heatmap", svg, "--heatmap", png,
    ]  # fmt: skip
    done = run(server, place, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("| task ") and "1k" in lines[0] and "1,500" in lines[0]
    assert len(lines) == 4 and "streaming-llm" in lines[3]
    assert len(out.read_text().splitlines()) == 8
    assert svg.read_text().startswith("<svg") and png.read_bytes().startswith(b"\x89PNG")
    again = run(server, place, *arguments, "--json")
    assert "8 of 8 cells are in" in again.stderr and "read " not in again.stderr
    rows = [json.loads(line) for line in again.stdout.splitlines()]
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize(
    "arguments",
    [
        ["passkey"],
        ["number"],
        ["kv", "--prompt", "key-first"],
        ["lines"],
        ["ruler", "niah_multivalue", "vt", "fwe"],
        ["order", "--segment-words", "20", "--samples", "2"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_every_task_runs(server: Any, place: Path, arguments: list[str]) -> None:
    done = run(server, place, *arguments, "--lengths", "2k", "--depths", 1, "--json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows and all(row["task"] == arguments[0] for row in rows)


def test_the_oracle_prints_layers_and_numbers_of_blocks(server: Any, place: Path) -> None:
    done = run(server, place, "oracle", "--task", "kv", "--lengths", "1k", "--depths", 1)
    assert done.returncode == 0, done.stderr
    layers, counts = done.stdout.split("\n\n")
    assert "| layer |" in layers and len(layers.splitlines()) == 2 + 2 * 4
    assert "exact, shared" in counts and "found" in counts


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["passkey", "--lengths", "4x"], "'4x' is no length"),
        (["passkey", "--lengths", "0"], "no length"),
        (["passkey", "--policies", "infllm,magic"], "'magic' is unknown"),
        (["passkey", "--depths", "0"], "--depths is 0"),
        (["passkey", "--samples", "0"], "--samples is 0"),
        (["passkey", "--heatmap", "map.pdf"], ".svg or .png"),
        (["passkey", "-o", "/none/r.jsonl"], "there is no folder"),
        (["kv", "--prompt", "other"], "'other' is unknown"),
        (["needle", "--wording", "other"], "'other' is unknown"),
        (["ruler", "qa_1"], "'qa_1' is unknown"),
        (["order", "--segment-words", "30"], "'30' is unknown"),
        (["oracle", "--task", "order"], "'order' is unknown"),
        (["oracle", "--policies", "dense"], "looks nothing up"),
        (["passkey", "--lengths", "50"], "--lengths"),
    ],
)
def test_what_cannot_work_is_refused(
    server: Any, place: Path, arguments: list[str], said: str
) -> None:
    done = run(server, place, *arguments)
    assert done.returncode == 2 and said in done.stderr
    assert done.stdout == ""


def test_time_that_is_up_is_told(server: Any, place: Path) -> None:
    late = place / "late.jsonl"
    done = run(server, place, "passkey", "--limit-seconds", "0", "-o", late)
    assert done.returncode == 0, done.stderr
    assert "time is up: 10 of 10 cells are not measured; the same command" in done.stderr
    assert done.stdout == ""
