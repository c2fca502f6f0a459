"""The C functions against their twins on odd sizes; what becomes of them where they cannot run."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from infllm_cli.kernels.dispatch import kernels_for
from infllm_cli.kernels.native import choice, compiling
from infllm_cli.kernels.native.check import differences, results
from infllm_cli.kernels.native.choice import NAME, NativeKernels
from infllm_cli.kernels.native.compiling import NativeError, library_in
from infllm_cli.kernels.native.library import Native
from infllm_cli.kernels.native.twins import Case
from infllm_cli.kernels.store_codec import FULL, INT8
from native_library import FOLDER, native

CASES = {
    "plain": Case(),
    "one row": Case(group=1),
    "two heads more than a tile": Case(kv_heads=1, group=6),
    "one head": Case(kv_heads=1, group=1, dim=64, block_tokens=16),
    "grouped by four": Case(group=4, dim=128, value_dim=128, half=64),
    "odd dimensions": Case(dim=37, value_dim=23, half=10),
    "no vector": Case(dim=7, value_dim=5, half=3, block_tokens=3),
    "wide": Case(kv_heads=1, group=2, dim=1024, value_dim=1000, half=512, block_tokens=5),
    "neighbours turn": Case(interleaved=True, half=11),
    "nothing turns": Case(half=0),
    "a long block": Case(block_tokens=1100, parts=((2, INT8), (2, FULL)), chosen=2),
    "as models have it": Case(kv_heads=3, block_tokens=128, sink_tokens=64, held=300, chosen=7),
    "int8 alone": Case(parts=((3, INT8), (1, INT8))),
    "full alone": Case(parts=((3, FULL), (5, FULL))),
    "all blocks": Case(chosen=7),
    "no sums": Case(keeps_sums=False),
    "no sinks, a token": Case(sink_tokens=0, held=1, keeps_sums=False),
}
# What torch rounds, these round in the same places.
BITS = ("begin", "load", "choose: blocks", "gather")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_functions_equal_their_twins(name: str, seed: int):
    found = results(native(), replace(CASES[name], seed=seed))
    assert {key.split(":")[0] for key in found} == {
        "begin",
        "scan",
        "scan listed",
        "choose",
        "load",
        "attend",
        "note",
        "gather",
    }
    for key, (ours, twin) in found.items():
        if key.startswith(BITS) and key != "begin: sums":
            assert torch.equal(ours, twin.to(ours.dtype)), key
        elif key.startswith("attend"):  # scores may be rounded the other way, to 8 bits
            torch.testing.assert_close(ours, twin, rtol=2**-6, atol=2**-8, msg=key)
        else:
            bits = 2**-7 if any(kind == FULL for _, kind in CASES[name].parts) else 1e-5
            limit = bits if key.startswith("scan") else 1e-5
            torch.testing.assert_close(ours, twin, rtol=limit, atol=limit, msg=key)
    assert differences(native(), (CASES[name],)) == []


def test_scans_of_int8_are_as_exact_as_the_products_of_integers():
    found = results(native(), Case(parts=((5, INT8), (2, INT8)), block_tokens=128))
    for key in ("scan: lse", "scan: peak"):
        ours, twin = found[key]
        torch.testing.assert_close(ours, twin, rtol=2e-6, atol=2e-6)


def test_the_number_of_threads_changes_no_bit():
    case = Case(kv_heads=3, block_tokens=128, held=600)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(native(), case))
    finally:
        torch.set_num_threads(before)
    for name, (ours, _) in found[0].items():
        assert all(torch.equal(ours, other[name][0]) for other in found[1:]), name


def test_nan_is_not_hidden():
    case = Case(parts=((2, FULL),), chosen=1)
    case.restart()
    ours, layer = native(), None
    layer = ours.layer((2, 2, 64, 64), half=32, interleaved=False, block_tokens=16, scaling=1.0)
    keys, values = torch.ones(2, 40, 64).bfloat16(), torch.ones(2, 40, 64).bfloat16()
    keys[1, 3, 5] = float("nan")
    ours.place(layer, keys, values, keys, None)
    q, out = torch.ones(2, 64).bfloat16(), torch.empty(2, 64).bfloat16()
    per_key, work = torch.empty(2, 40), torch.empty(10_000)
    pointers = (out.data_ptr(), per_key.data_ptr(), work.data_ptr())
    ours.attend(ctypes.byref(layer), q.data_ptr(), 0, 40, *pointers)
    assert torch.isfinite(out[0]).all() and torch.isnan(out[1]).all()


def test_threads_are_those_of_torch():
    native()
    torch.ones(1000, 1000).sum()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert len({os.path.realpath(name) for name in mapped if "gomp" in name}) <= 1


# --- where they cannot run -----------------------------------------------------------------------


@pytest.fixture
def forgets():
    """What was tried and failed is no business of other tests."""
    choice._in_folder.cache_clear()
    yield
    choice._in_folder.cache_clear()
    kernels_for("cpu").failed.pop(NAME, None)


def test_without_a_compiler_torch_does_the_work(monkeypatch, tmp_path, forgets):
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    assert NativeKernels(tmp_path).get() is None
    assert kernels_for("cpu").failed[NAME] == "no C compiler (cc, gcc, clang)"
    assert not list(tmp_path.iterdir())


def test_a_compiler_that_fails_is_named_in_one_line(monkeypatch, tmp_path, forgets):
    broken = tmp_path / "cc"
    broken.write_text(
        "#!/bin/sh\n"
        "case $1 in --version) echo 1;; *) echo no luck >&2; echo again >&2; exit 3;; esac"
    )
    broken.chmod(0o755)
    monkeypatch.setattr(compiling.shutil, "which", lambda name: str(broken))
    assert NativeKernels(tmp_path / "cache").get() is None
    assert kernels_for("cpu").failed[NAME] == "cc failed: no luck"
    assert not list((tmp_path / "cache").iterdir())


def test_another_system_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling.sys, "platform", "darwin")
    with pytest.raises(NativeError, match="darwin"):
        library_in(tmp_path)


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path, forgets):
    (tmp_path / "file").write_text("")
    assert NativeKernels(tmp_path / "file" / "cache").get() is None
    assert "Error" in kernels_for("cpu").failed[NAME]


def test_functions_that_differ_are_not_used(monkeypatch, forgets):
    monkeypatch.setattr(choice, "differences", lambda native: ["load: keys", "note"])
    assert NativeKernels(FOLDER).get() is None
    assert kernels_for("cpu").failed[NAME] == "differs from torch: load: keys, note"


class Wrong:
    """The library, but for one function."""

    def __init__(self, name: str):
        self.__dict__.update(native().__dict__)
        setattr(self, name, lambda *arguments: None)

    layer = Native.layer
    place = staticmethod(Native.place)


@pytest.mark.parametrize("name", ["begin", "scan", "choose", "load", "attend", "note"])
def test_the_self_check_finds_a_function_that_does_nothing(name):
    assert {found.split(":")[0] for found in differences(Wrong(name))} >= {name}


@pytest.fixture
def quickly(monkeypatch):
    """What is compiled need not be fast."""
    monkeypatch.setattr(compiling, "FLAGS", [x.replace("-O3", "-O0") for x in compiling.FLAGS])


@pytest.mark.parametrize("harm", ["cut", "altered", "no digest"])
def test_a_broken_library_is_compiled_again(tmp_path, harm, quickly):
    library_in(tmp_path)
    (path,) = tmp_path.glob("*.so")
    whole = path.read_bytes()
    # Another file in its place: what is loaded already stays what it is.
    path.unlink()
    path.write_bytes({"cut": whole[:5000], "altered": whole[:-1] + b"x"}.get(harm, whole))
    if harm == "no digest":
        path.with_suffix(".sha256").unlink()
    library_in(tmp_path)
    assert path.read_bytes() == whole or harm != "no digest"
    assert compiling._is_whole(path)
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".sha256", ".so"]


def test_a_library_is_compiled_once(monkeypatch, tmp_path, quickly):
    library_in(tmp_path)
    monkeypatch.setattr(compiling, "_compile", lambda *arguments: pytest.fail("once is enough"))
    library_in(tmp_path)


COMPILE_AND_CHECK = """
import sys
from pathlib import Path
from infllm_cli.kernels.native import compiling
from infllm_cli.kernels.native.check import differences
from infllm_cli.kernels.native.compiling import library_in
from infllm_cli.kernels.native.library import Native
compiling.FLAGS = [flag.replace("-O3", "-O0") for flag in compiling.FLAGS]
assert differences(Native(library_in(Path(sys.argv[1])))) == []
"""


def test_processes_that_compile_at_once_do_not_harm_each_other(tmp_path):
    command = [sys.executable, "-c", COMPILE_AND_CHECK, str(tmp_path)]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert sorted(file.suffix for file in tmp_path.iterdir()) == [".sha256", ".so"]
