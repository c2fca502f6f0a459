"""The check of the kernels: what it says here, and that it would say what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch
from infllm_cli.kernels import check, floors
from infllm_cli.kernels.check_cases import SMALL, Case, Cases, difference
from infllm_cli.kernels.dispatch import Kernels, kernels_for, replaced

from infllm_cli import block_moves
from infllm_cli.large_model import Shape, measure
from infllm_cli.memory.device_path import DeviceOptions

CPU = torch.device("cpu")


def test_without_a_gpu_the_numbers_are_checked_and_the_timings_are_open(tmp_path) -> None:
    path = tmp_path / "check.json"
    command = [sys.executable, "-m", "infllm_cli.kernels.check", "--json", str(path)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # where there is one
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=hidden
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all timings, and whether the floors hold, are open" in done.stdout
    report = json.loads(path.read_text())
    assert report["timed"] is False and report["left_out"] is False
    kernels = {case["kernel"].partition(".")[0] for case in report["cases"]}
    assert kernels == {
        "tiered_attention",
        "exact_lookup",
        "segment_lookup",
        "block_relevance",
        "representative_scores",
        "store_codec",
    }
    assert all(case["right"] and case["ms"] is None for case in report["cases"])
    assert [floor["wanted"] for floor in report["floors"]] == [
        "at most 0.05 ms",
        "at most 1.3 x bandwidth's time",
        "at most 0.12 ms",
        "at least 0.8 of own speed",
        "at most 1% in its second half",
    ]
    assert all(floor["found"] is floor["holds"] is None for floor in report["floors"])
    assert done.stdout.count(" open\n") == 5


def test_end_to_end_wants_a_gpu(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        check.main(["--end-to-end"])
    assert "needs a GPU" in capsys.readouterr().err


def test_a_wrong_kernel_a_slow_one_and_one_that_fails_are_told() -> None:
    one, two = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])

    def broken() -> torch.Tensor:
        raise ValueError("no such instruction\nand more")

    cases = [
        Case("a", "wrong", lambda: two, lambda: one, 0.5),
        Case("b", "slow", lambda: one, lambda: one, 0.0, floor_ms=1.0),
        Case("c", "failing", broken, lambda: one, 0.5),
        Case("d", "bandwidth", lambda: one, lambda: one, 0.0, bytes=100, of_bandwidth=2.0),
    ]
    found = [check.check(case, lambda run: 3.0, 1e5) for case in cases]
    assert [result.right for result in found] == [False, True, False, True]
    assert [result.fast for result in found] == [None, False, None, False]
    assert found[2].error == "ValueError: no such instruction"
    assert found[3].floor_ms == pytest.approx(2.0)
    report = {"device": "x", "torch": "1", "triton": "2", "left_out": True, "timed": True}
    report["cases"] = [{**vars(result), "fast": result.fast} for result in found]
    report["floors"] = floors.as_json(floors.floors(report))
    text = check.render(report)
    assert "NO" in text and "too slow" in text and "no such instruction" in text
    assert "left out" in text and "No GPU here" not in text


def test_each_floor_is_judged_by_what_was_measured() -> None:
    def report(ms: float, share: float, grown: int) -> dict:
        kinds = {"tiered_attention": "1 of 4096 tokens", "block_relevance": "8000 blocks, sum"}
        times = {"tiered_attention": (20 * ms, 2.6), "block_relevance": (ms, 0.05)}
        cases = [
            {"kernel": kernel, "what": what, "ms": times[kernel][0], "floor_ms": times[kernel][1]}
            for kernel, what in kinds.items()
        ]
        read = {"share_of_own_speed": share, "device_bytes": 10_000}
        read["device_bytes_grown_in_second_half"] = grown
        moved = {"beside_the_bus_ms": 2 * ms}
        return {"cases": cases, "blocks_moved_and_attended": moved, "end_to_end": read}

    found = floors.floors(report(0.05, 0.85, 0))
    assert [floor.holds for floor in found] == [True] * 5
    assert [floor.found for floor in found] == ["0.0500 ms", "0.50 x", "0.1000 ms", "0.85", "0.00%"]
    assert [f.holds for f in floors.floors(report(0.2, 0.7, 200))] == [False] * 5
    failed = report(0.05, 0.85, 0)
    failed["blocks_moved_and_attended"] = failed["end_to_end"] = {"error": "OutOfMemoryError: x"}
    assert [f.holds for f in floors.floors(failed)] == [True, True, None, None, None]
    text = floors.lines(floors.as_json(floors.floors(report(0.2, 0.85, 0))))
    assert len(text) == 6 and sum(line.endswith("TOO SLOW") for line in text) == 3


def test_what_fails_to_be_measured_is_a_line_not_the_end() -> None:
    def broken() -> dict:
        raise torch.OutOfMemoryError("no room\nand more")

    assert check._measured(broken) == {"error": "OutOfMemoryError: no room"}
    assert check._measured(lambda: {"ms": 1}) == {"ms": 1}


def test_differences_are_absolute_or_of_the_largest() -> None:
    a, b = torch.tensor([1.0, -4.0]), torch.tensor([1.5, -4.0])
    assert difference(a, b, relative=False) == 0.5
    assert difference(a, b, relative=True) == 0.125
    nan = torch.tensor([float("nan"), float("-inf")])
    assert difference([a, nan], [a, nan], relative=False) == 0.0


def test_every_case_compares_two_different_functions() -> None:
    for case in Cases(SMALL, CPU, torch.float32).all():
        assert case.run is not case.twin and case.bytes > 0


def test_a_kernel_that_fails_is_replaced_with_one_warning(monkeypatch) -> None:
    from infllm_cli.kernels import dispatch

    def broken(x: int) -> int:
        raise RuntimeError("out of registers\n and a long trace")

    monkeypatch.setattr(dispatch, "find", lambda name: broken)
    kernels = Kernels(triton=True)
    with pytest.warns(RuntimeWarning, match=r"the kernel a.b does not run here .*out of registers"):
        assert kernels.run("a.b", lambda x: x + 1, 1) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.run("a.b", lambda x: x + 1, 2) == 3
    assert kernels.failed == {"a.b": "RuntimeError: out of registers"}


def test_memory_that_runs_out_is_no_reason_for_a_twin(monkeypatch) -> None:
    from infllm_cli.kernels import dispatch

    def hungry(x: int) -> int:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(dispatch, "find", lambda name: hungry)
    kernels = Kernels(triton=True)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.run("a", lambda x: x, 1)
    assert not kernels.failed


def test_what_fails_on_the_host_is_told_beside_what_fails_on_the_device(monkeypatch) -> None:
    monkeypatch.setattr(kernels_for("cpu"), "failed", {"native": "no C compiler"})
    monkeypatch.setattr(kernels_for("cuda"), "failed", {"a": "out of registers"})
    assert replaced("cuda") == {"native": "no C compiler", "a": "out of registers"}
    assert replaced("cpu") == {"native": "no C compiler"}


def test_a_processor_runs_the_twins() -> None:
    assert not kernels_for("cpu").triton
    assert kernels_for("cuda") is kernels_for("cuda")


def test_blocks_are_moved_each_time_they_are_timed() -> None:
    kinds = {"heads": 4, "kv_heads": 2, "d": 16, "block": 8, "blocks": 3, "runs": 4}
    found = block_moves.measure(CPU, dtype=torch.float32, **kinds)
    # Full blocks are packed: codes, a scale per value, and what a key's channels have in common.
    assert found["bytes"] >= 2 * 3 * 8 * 2 * 16 and found["blocks"] == 6
    assert found["ms"] > 0 and found["floor_ms"] == 0.12


def test_a_model_with_random_weights_is_read_and_asked() -> None:
    shape = Shape(
        layers=2,
        hidden=32,
        intermediate=32,
        heads=4,
        kv_heads=2,
        vocabulary=50,
        trained_length=512,
        tokens=640,
    )
    sizes = {"window_tokens": 64, "block_tokens": 16, "chunk_tokens": 32, "sink_tokens": 4}
    found = measure(CPU, shape, torch.float32, DeviceOptions(on_cpu=True), **sizes)
    assert found["tokens"] == 640 and found["tokens_per_second"] > 0
    assert found["device_bytes_grown_in_second_half"] == 0
    assert found["misses"] > 0 and found["keys_scanned_on"]
