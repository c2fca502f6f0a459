"""`python -m infllm_cli.kernels.check`: is every kernel right here, and how fast?

On a GPU each kernel is compared with its twin and timed against it and against torch's own
attention. Without one the kernels run in Triton's interpreter, on small sizes; how fast they are
is then unknown, and said to be.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import floors

if TYPE_CHECKING:
    from .check_cases import Case
    from .native.choice import NativeKernels

SECONDS = 300.0
MEASURED = ("blocks_moved_and_attended", "end_to_end")  # of the report, on a GPU
ABOUT = "Correctness and speed of every kernel, on the GPU that is here or in the interpreter."


@dataclass
class Result:
    """A case as it went; times in milliseconds, None where they are unknown."""

    kernel: str
    what: str
    difference: float
    tolerance: float
    right: bool
    ms: float | None = None
    twin_ms: float | None = None
    sdpa_ms: float | None = None
    floor_ms: float | None = None
    error: str | None = None

    @property
    def fast(self) -> bool | None:
        """Whether it is within its floor; None: no time, or nothing was said."""
        if self.ms is None or self.floor_ms is None:
            return None
        return self.ms <= self.floor_ms


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 where something is wrong or was not reached."""
    parser = argparse.ArgumentParser(prog="python -m infllm_cli.kernels.check", description=ABOUT)
    parser.add_argument("--json", type=Path, default=Path("kernels-check.json"), metavar="FILE")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="to end within")
    parser.add_argument(
        "--compile", type=int, metavar="CC", help="only compile, for e.g. 90 (Hopper) or 89 (Ada)"
    )
    parser.add_argument(
        "--end-to-end", action="store_true", help="also read 128K tokens, 8B geometry (a GPU only)"
    )
    options = parser.parse_args(arguments)
    import torch

    from .native.choice import NativeKernels

    gpu = torch.cuda.is_available() and not options.compile
    if options.compile:
        os.environ.pop("TRITON_INTERPRET", None)
    elif not gpu:
        # Before Triton is imported, which decides there and then.
        os.environ["TRITON_INTERPRET"] = "1"
    if options.end_to_end and not gpu:
        parser.error("--end-to-end needs a GPU; there is none here.")
    if options.compile:
        return _compile(options.compile)
    began = time.monotonic()
    results, left_out = _run_all(gpu, began + options.seconds)
    report: dict[str, Any] = {"schema": 1, **_machine(gpu), "left_out": left_out}
    report["cases"] = [{**asdict(result), "fast": result.fast} for result in results]
    with tempfile.TemporaryDirectory(prefix="infllm-check-") as folder:
        native = NativeKernels(Path(folder))
        if gpu:
            report["blocks_moved_and_attended"] = _measured(lambda: _moves(native))
        if options.end_to_end:
            report["end_to_end"] = _measured(lambda: _end_to_end(native))
    report["floors"] = floors.as_json(floors.floors(report))
    report["seconds"] = round(time.monotonic() - began, 1)
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(render(report))
    failed = any("error" in report.get(name, {}) for name in MEASURED)
    return 0 if all(result.right for result in results) and not left_out and not failed else 1


def _moves(native: NativeKernels) -> dict[str, Any]:
    import torch

    from infllm_cli.block_moves import measure

    return measure(torch.device("cuda"), native=native.get())


def _end_to_end(native: NativeKernels) -> dict[str, Any]:
    import torch

    from infllm_cli.large_model import measure
    from infllm_cli.memory.device_path import DeviceOptions

    return measure(torch.device("cuda"), options=DeviceOptions(native=native))


def _measured(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Figures by name, or the error: what fails here does not take the table away."""
    try:
        return measure()
    except Exception as error:
        return {"error": _in_a_line(error)}


def _run_all(gpu: bool, deadline: float) -> tuple[list[Result], bool]:
    import torch

    from .check_cases import ORDINARY, SMALL, Cases

    device = torch.device("cuda" if gpu else "cpu")
    sizes = ORDINARY if gpu else SMALL
    bandwidth = _bandwidth(device) if gpu else None
    results = []
    with torch.inference_mode():
        for case in Cases(sizes, device, torch.bfloat16).all():
            if time.monotonic() > deadline:
                return results, True
            results.append(check(case, _milliseconds if gpu else None, bandwidth))
    return results, False


def check(
    case: Case, clock: Callable[[Callable[[], Any]], float] | None, bandwidth: float | None
) -> Result:
    """Compare a kernel with its twin, and time both if there is a `clock`."""
    from .check_cases import difference

    result = Result(case.kernel, case.what, float("nan"), case.tolerance, False)
    if case.floor_ms is not None:
        result.floor_ms = case.floor_ms
    elif case.of_bandwidth is not None and bandwidth is not None:
        result.floor_ms = 1000 * case.of_bandwidth * case.bytes / bandwidth
    try:
        found = difference(case.run(), case.twin(), relative=case.relative)
        result.difference, result.right = found, found <= case.tolerance
        if clock is not None:
            result.ms, result.twin_ms = clock(case.run), clock(case.twin)
            result.sdpa_ms = clock(case.other) if case.other is not None else None
    except Exception as error:  # a kernel that does not run is a line of the table
        result.error = _in_a_line(error)
        result.right = False
    return result


def _in_a_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _milliseconds(run: Callable[[], Any]) -> float:
    """Median time on the device, with a cold second-level cache as between layers."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=20, rep=80, return_mode="median"))


def _bandwidth(device: Any) -> float:
    """Bytes per second that a copy reads and writes."""
    import torch

    source = torch.empty(2**28, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (_milliseconds(lambda: target.copy_(source)) / 1000)


def _machine(gpu: bool) -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if gpu else "none: Triton's interpreter",
        "timed": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def render(report: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{report['device']}, torch {report['torch']}, triton {report['triton']}",
        "",
        f"{'kernel':<26}{'case':<30}{'difference':>11}{'tolerance':>11}  right"
        f"{'ms':>10}{'twin':>10}{'sdpa':>10}{'floor':>10}",
    ]
    for case in report["cases"]:
        times = [case["ms"], case["twin_ms"], case["sdpa_ms"], case["floor_ms"]]
        cells = "".join(f"{'-' if x is None else f'{x:.4f}':>10}" for x in times)
        verdict = "yes" if case["right"] else "NO"
        late = "  too slow" if case["fast"] is False else ""
        wrong = f"  {case['error']}" if case["error"] else ""
        lines.append(
            f"{case['kernel']:<26}{case['what']:<30}{case['difference']:>11.2g}"
            f"{case['tolerance']:>11.2g}  {verdict:<5}{cells}{late}{wrong}"
        )
    lines.append("")
    if report["left_out"]:
        lines.append("Cases were left out: the time was up (--seconds).")
    if not report["timed"]:
        lines.append(
            "No GPU here: the numbers are right or wrong as in Triton's interpreter, on small "
            "sizes; all timings, and whether the floors hold, are open."
        )
    for name in MEASURED:
        if name in report:
            told = (f"{key} {value}" for key, value in report[name].items())
            lines.append(f"{name.replace('_', ' ')}: " + ", ".join(told))
    lines += ["", *floors.lines(report["floors"])]
    return "\n".join(lines)


def _compile(capability: int) -> int:
    """Compile all launches for a GPU that need not be there."""
    import torch

    from .check_cases import COMPILED, Cases
    from .compiling import compiling_for

    failed = 0
    with torch.inference_mode(), compiling_for(capability) as found:
        for case in Cases(COMPILED, torch.device("cpu"), torch.bfloat16).all():
            try:
                case.run()
            except Exception as error:  # a kernel that does not compile is a line of the report
                failed += 1
                print(f"{case.kernel}, {case.what}: {type(error).__name__}: {error}")
    print(f"{found.launches} launches compiled for {capability}, {failed} failed; shared memory:")
    for name, size in sorted(found.shared.items()):
        print(f"  {name.strip('_'):<24}{size:>9,} bytes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
