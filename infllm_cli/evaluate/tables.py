"""Tables that read well as they are and are Markdown, too; and what a grid's rows come to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from infllm_cli.evaluate.results import Row
from infllm_cli.wording import size


def as_text(rows: list[list[str]]) -> str:
    """A table, its header first."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |\n"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|\n"
    return line(rows[0]) + rule + "".join(line(row) for row in rows[1:])


def short_length(length: int) -> str:
    """As on the command line: 8k is 8,192."""
    return f"{length // 1024:,}k" if length % 1024 == 0 else f"{length:,}"


def title_of(row: Row) -> str:
    """Task and variant of a row."""
    return f"{row['task']} {row['variant']}".strip()


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each once, in the order in which they come."""
    return list(dict.fromkeys(values))


def mean_score(rows: Sequence[Row]) -> float:
    """Of rows that are not none."""
    return sum(row["score"] for row in rows) / len(rows)


def grid_table(rows: Sequence[Row]) -> list[list[str]]:
    """What each policy finds, by task and length, and what it costs, header first."""
    lengths = sorted({row["length"] for row in rows})
    cost = ["device", "host", "read tokens/s", "first token"]
    table = [["task", "policy", *map(short_length, lengths), *cost]]
    for title in distinct(map(title_of, rows)):
        for policy in distinct(row["policy"] for row in rows if title_of(row) == title):
            own = [row for row in rows if title_of(row) == title and row["policy"] == policy]
            scores = []
            for length in lengths:
                here = [row for row in own if row["length"] == length]
                scores.append(_share(here))
            measured = [row for row in own if "error" not in row]
            table.append([title, policy, *scores, *_costs(measured)])
    return table


def _share(rows: Sequence[Row]) -> str:
    """As in "91 % of 11"; cells that could not be measured count as nothing found."""
    if not rows:
        return "-"
    failed = sum("error" in row for row in rows)
    said = f"{100 * mean_score(rows):.0f} % of {len(rows)}"
    return f"{said}, {failed} failed" if failed else said


def _costs(rows: Sequence[Row]) -> list[str]:
    """The most that was held, and speeds on average."""
    if not rows:
        return ["-"] * 4
    # Of a document with several questions every row tells of the same reading.
    readings = {(r["length"], r["sample"], r["read_seconds"]): r for r in rows}.values()
    seconds = sum(row["read_seconds"] for row in readings)
    tokens = sum(row["document_tokens"] for row in readings)
    first = sum(row["first_token_seconds"] for row in rows) / len(rows)
    return [
        size(max(row["device_bytes"] for row in rows)),
        size(max(row["host_bytes"] for row in rows)),
        f"{tokens / seconds:,.0f}" if seconds else "-",
        f"{first:.1f} s",
    ]
