"""What the GPU path promised, and whether the figures of a check hold it. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SCORED_MS = 0.05  # 8,000 blocks by their representatives
OF_BANDWIDTH = 1.3  # one token over 4K active tokens, of what the memory takes for the bytes
MOVED_MS = 0.12  # eight blocks per KV head moved and attended, besides what the bus takes
SHARE_OF_OWN_SPEED = 0.8  # reading 128K tokens, of the model's own speed on 512
GROWN_SHARE = 0.01  # of the device's memory, in the second half of these: it is to be constant


@dataclass(frozen=True, slots=True)
class Floor:
    """One of them.

    Attributes:
        wanted: in words; at most or at least, as it says.
        found: in words; None: it was not measured, the floor is open.
        holds: None: open.
    """

    what: str
    wanted: str
    found: str | None = None
    holds: bool | None = None


def floors(report: dict[str, Any]) -> list[Floor]:
    """All of them, by what a report of `check` has measured."""
    cases = report["cases"]
    scored = _case(cases, "block_relevance", "sum")
    token = _case(cases, "tiered_attention", "1 of")
    moved = report.get("blocks_moved_and_attended") or {}
    read = report.get("end_to_end") or {}
    found = [
        _at_most("8,000 blocks scored", SCORED_MS, scored.get("ms")),
        Floor("one token over 4K active tokens", f"at most {OF_BANDWIDTH} x bandwidth's time"),
        _at_most("eight blocks moved and attended", MOVED_MS, moved.get("beside_the_bus_ms")),
        Floor("128K tokens read, 8B geometry", f"at least {SHARE_OF_OWN_SPEED} of own speed"),
        Floor("the same, growth on the device", f"at most {GROWN_SHARE:.0%} in its second half"),
    ]
    if token.get("ms") is not None and token.get("floor_ms"):
        times = OF_BANDWIDTH * token["ms"] / token["floor_ms"]
        found[1] = Floor(found[1].what, found[1].wanted, f"{times:.2f} x", times <= OF_BANDWIDTH)
    if "share_of_own_speed" in read:
        share = read["share_of_own_speed"]
        found[3] = Floor(found[3].what, found[3].wanted, f"{share}", share >= SHARE_OF_OWN_SPEED)
        grown = read["device_bytes_grown_in_second_half"] / max(read["device_bytes"], 1)
        found[4] = Floor(found[4].what, found[4].wanted, f"{grown:.2%}", grown <= GROWN_SHARE)
    return found


def as_json(found: Sequence[Floor]) -> list[dict[str, Any]]:
    """Plain values."""
    return [asdict(floor) for floor in found]


def lines(found: Sequence[dict[str, Any]]) -> list[str]:
    """The table, of what `as_json` gives."""
    words = {None: "open", True: "holds", False: "TOO SLOW"}
    return [
        f"{'floor':<36}{'wanted':<36}{'found':>10}",
        *(
            f"{floor['what']:<36}{floor['wanted']:<36}{floor['found'] or '-':>10}"
            f"  {words[floor['holds']]}"
            for floor in found
        ),
    ]


def _at_most(what: str, wanted: float, ms: float | None) -> Floor:
    if ms is None:
        return Floor(what, f"at most {wanted} ms")
    return Floor(what, f"at most {wanted} ms", f"{ms:.4f} ms", ms <= wanted)


def _case(cases: Sequence[dict[str, Any]], kernel: str, what: str) -> dict[str, Any]:
    """The first case of a kernel whose description has some words; empty: there is none."""
    same = (case for case in cases if case["kernel"] == kernel and what in case["what"])
    return next(same, {})
