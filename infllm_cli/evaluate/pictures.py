"""The heat maps of a grid: depth by length where the depth is chosen, else policy by length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infllm_cli.evaluate.chart import Panel, Share, Sheet
from infllm_cli.evaluate.results import Row
from infllm_cli.evaluate.tables import distinct, mean_score, short_length, title_of


def sheet_of(rows: Sequence[Row]) -> Sheet:
    """All of a grid's rows as one sheet; there is at least one."""
    panels: list[Panel] = []
    for title in distinct(map(title_of, rows)):
        own = [row for row in rows if title_of(row) == title]
        panels += _depths(title, own) if own[0]["depth"] is not None else [_policies(title, own)]
    return Sheet(_title(rows), caption_of(rows), panels, "share of the answer found")


def _depths(title: str, rows: Sequence[Row]) -> list[Panel]:
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    told = [f"{100 * depth:.0f} %" for depth in depths]
    panels = []
    systems = distinct(row["policy"] for row in rows)
    # One knob at several values (`varied`): a column for each.
    knobs = {system.rpartition(" ")[0] for system in systems}
    if len(lengths) == 1 and len(systems) > 1 and all("," in knob for knob in knobs):
        for knob in distinct(system.rpartition(" ")[0] for system in systems):
            own = [system for system in systems if system.rpartition(" ")[0] == knob]
            shares = [[_mean(rows, policy=one, depth=depth) for one in own] for depth in depths]
            name = f"{title}, {short_length(lengths[0])}: {knob}"
            settings = [system.rpartition(" ")[2] for system in own]
            panels.append(Panel(name, told, settings, shares, "depth", knob.rpartition(" ")[2]))
        return panels
    for policy in systems:
        shares = [
            [_mean(rows, policy=policy, length=length, depth=depth) for length in lengths]
            for depth in depths
        ]
        panels.append(
            Panel(
                f"{title}: {policy}",
                told,
                [short_length(length) for length in lengths],
                shares,
                "depth",
                "length in tokens",
            )
        )
    return panels


def _policies(title: str, rows: Sequence[Row]) -> Panel:
    lengths = sorted({row["length"] for row in rows})
    policies = distinct(row["policy"] for row in rows)
    shares = [
        [_mean(rows, policy=policy, length=length) for length in lengths] for policy in policies
    ]
    return Panel(
        title, policies, [short_length(n) for n in lengths], shares, "", "length in tokens"
    )


def _mean(rows: Sequence[Row], **where: Any) -> Share:
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return mean_score(found) if found else None


def _title(rows: Sequence[Row]) -> str:
    tasks = distinct(row["task"] for row in rows)
    models = distinct(row["settings"]["model"] for row in rows)
    return f"{', '.join(tasks)}: {', '.join(models)}"


def caption_of(rows: Sequence[Row]) -> str:
    """What was the same for all rows."""
    settings = rows[0]["settings"]
    samples = len({row["sample"] for row in rows})

    def size(name: str) -> str:
        found = sorted({row["settings"]["memory"][name] for row in rows})
        return f"{found[0]:,}" if len(found) == 1 else f"{found[0]:,} to {found[-1]:,}"

    parts = [
        f"sinks {size('sink_tokens')}, window {size('window_tokens')}, "
        f"{size('answer_blocks')} blocks of {size('block_tokens')}",
        f"answering {settings['answering']}, form {settings['form']}",
        f"{samples} sample{'s' if samples > 1 else ''}, seed {settings['seed']}",
    ]
    return "; ".join(parts)
