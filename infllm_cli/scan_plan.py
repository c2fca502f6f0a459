"""Where an answer will scan the stored keys, in words. Imports no torch at its top."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infllm_cli import wording
from infllm_cli.memory.scan_cost import Place, Scan

if TYPE_CHECKING:
    import torch

WHERE = {
    Place.DEVICE.value: "on the device, where a copy fits",
    Place.HOST.value: "in host memory",
    Place.BUS.value: "on the device, streamed",
}


def device_room(device: torch.device, limit: int | None) -> int:
    """Bytes of a device that stored keys may take; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    if limit is not None:
        return limit
    import torch

    return torch.cuda.mem_get_info(device)[0] // 2


def as_json(scan: Scan | None) -> dict[str, Any] | None:
    """Of `--json`; null where nothing is scanned."""
    if scan is None:
        return None
    seconds = {place: round(value, 6) for place, value in scan.seconds.items()}
    return {"bytes": scan.bytes, "place": scan.place.value, "estimated_seconds": seconds}


def line(scan: Scan) -> str:
    """One line, the cheapest place first."""
    others = [
        f"{WHERE[place]} {_time(seconds)}"
        for place, seconds in sorted(scan.seconds.items(), key=lambda item: item[1])
        if place != scan.place.value
    ]
    rest = f" ({', '.join(others)})" if others else ""
    return (
        f"lookup    {wording.size(scan.bytes)} of keys per token of an answer, scanned "
        f"{WHERE[scan.place.value]}: about {_time(scan.seconds[scan.place.value])}, "
        f"by estimate{rest}"
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
