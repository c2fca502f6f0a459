"""What was measured as a table, as JSON, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from infllm_cli.bench.floor import Rates
from infllm_cli.bench.measure import Point
from infllm_cli.wording import size

NONE = "-"


def shortened(tokens: int) -> str:
    """As in 32K."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else f"{tokens:,}"


def table(points: Sequence[Point], chunk_tokens: int, rates: Rates) -> list[list[str]]:
    """Rows, the header first: a measured quantity in each, a length in each column."""
    ratio = "{:.2f}".format
    rows = [["", *(shortened(p.tokens) for p in points)]]

    def add(name: str, cells: list[str]) -> None:
        rows.append([name, *cells])

    def speed(seconds: float | None, tokens: float) -> str:
        return NONE if seconds is None else f"{tokens / seconds:,.0f}"

    def ms(seconds: float | None) -> str:
        return NONE if seconds is None else f"{1000 * seconds:.0f} ms"

    add("reading, tokens/s", [speed(p.read_seconds, p.tokens) for p in points])
    add("the same, since the length before", [speed(p.recent_chunk, chunk_tokens) for p in points])
    add(
        "bare model on a chunk without context (the ceiling)",
        [speed(p.bare_chunk, chunk_tokens) for p in points],
    )
    add("share of the ceiling", [ratio(p.bare_chunk / p.recent_chunk) for p in points])
    add("dense cache, tokens/s", [speed(p.dense_seconds, p.tokens) for p in points])
    add(
        "times as fast as dense",
        [NONE if not p.dense_seconds else ratio(p.dense_seconds / p.read_seconds) for p in points],
    )
    add("chunk, at least (floor)", [ms(p.read_need.seconds(rates)) for p in points])
    add("answer token, memory", [ms(p.step) for p in points])
    add("bare model, one token", [ms(p.bare_step) for p in points])
    add("answer token over bare", [ratio(p.step / p.bare_step) for p in points])
    add("answer token, memory and passages", [ms(p.both_step) for p in points])
    add("dense cache, one token", [ms(p.dense_step) for p in points])
    add("answer token, at least (floor)", [ms(p.step_need.seconds(rates)) for p in points])
    add("first token of an answer", [f"{p.first_token:.1f} s" for p in points])
    add("the same of a further question", [f"{p.next_first_token:.1f} s" for p in points])
    add("keys and values on the device, peak", [size(p.device_bytes) for p in points])
    add("on the host", [size(p.host_bytes) for p in points])
    add("dense cache", [size(p.dense_bytes) if p.dense_bytes else NONE for p in points])
    return rows


def parts_table(points: Sequence[Point], kind: str) -> list[list[str]]:
    """Where the time of a chunk or an answer token went, in ms and as a share."""
    rows = [[kind, *(shortened(p.tokens) for p in points)]]
    for part in points[0].parts[kind]:
        cells = []
        for point in points:
            seconds = point.parts[kind]
            share = 100 * seconds[part] / max(sum(seconds.values()), 1e-12)
            cells.append(f"{1000 * seconds[part]:.1f} ms, {share:.0f} %")
        rows.append([part, *cells])
    return rows


def as_json(
    points: Sequence[Point], rates: Rates, facts: dict[str, Any], chunk_tokens: int
) -> dict[str, Any]:
    """The object that `--json` prints."""
    told = []
    for point in points:
        told.append(
            {
                **asdict(point),
                "tokens_per_second": point.tokens / point.read_seconds,
                "share_of_bare": point.bare_chunk / point.recent_chunk,
                "step_over_bare": point.step / point.bare_step,
                "read_floor": point.read_need.seconds(rates),
                "step_floor": point.step_need.seconds(rates),
            }
        )
    return {
        "schema": 1,
        **facts,
        "chunk_tokens": chunk_tokens,
        "machine": {"operations_per_second": rates.product, "bytes_per_second": rates.moved},
        "lengths": told,
    }
