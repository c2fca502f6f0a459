"""What the oracle's rows come to: by number of blocks, by layer, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence

from infllm_cli.evaluate.chart import Panel, Sheet
from infllm_cli.evaluate.pictures import caption_of
from infllm_cli.evaluate.results import Row
from infllm_cli.evaluate.tables import distinct, short_length, title_of

Group = tuple[str, int, str, str]  # task, length, policy, phase


def groups_of(rows: Sequence[Row]) -> dict[Group, list[Row]]:
    """Captured shares of all cells, by what they are told apart by."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        for captured in row.get("captured", []):
            key = (title_of(row), row["length"], row["policy"], captured["phase"])
            groups.setdefault(key, []).append(captured)
    return groups


def count_table(rows: Sequence[Row]) -> list[list[str]]:
    """Captured share, and share of the answer's blocks found, over all layers, header first."""
    counts = sorted({c["blocks"] for row in rows for c in row.get("captured", [])})
    names = [f"{count} block{'s' if count > 1 else ''}" for count in counts]
    table = [["task", "length", "policy", "phase", "lookup", *names]]
    for (task, length, policy, phase), captured in groups_of(rows).items():
        for way in distinct(c["way"] for c in captured):
            cells = []
            for count in counts:
                here = [c for c in captured if c["way"] == way and c["blocks"] == count]
                share = _over_layers(here, "shares")
                found = _over_layers(here, "found")
                told = "-" if share is None else f"{100 * share:.0f} %"
                cells.append(told if found is None else f"{told}, found {100 * found:.0f} %")
            table.append([task, short_length(length), policy, phase, way, *cells])
    return table


def layer_table(rows: Sequence[Row]) -> list[list[str]]:
    """Captured share by layer, with as many blocks as the policy loads, header first."""
    table: list[list[str]] = []
    for (task, length, policy, phase), captured in groups_of(rows).items():
        loaded = _loaded(rows, policy, captured)
        here = [c for c in captured if c["blocks"] == loaded]
        ways = distinct(c["way"] for c in here)
        if not table:
            table.append(["task", "length", "policy", "phase", "blocks", "layer", *ways])
        for layer in _layers(here):
            cells = [
                _percent(_of_layer([c for c in here if c["way"] == way], layer)) for way in ways
            ]
            head = [task, short_length(length), policy, phase, str(loaded), layer]
            table.append([*head, *cells])
    return table


def sheet_of(rows: Sequence[Row]) -> Sheet | None:
    """Layers by numbers of blocks, a panel for each lookup; None where nothing is stored."""
    panels: list[Panel] = []
    across = 1
    for (task, length, policy, phase), captured in groups_of(rows).items():
        where = f"{phase} ({task}, {short_length(length)}, {policy})"
        counts = sorted({c["blocks"] for c in captured})
        ways = distinct(c["way"] for c in captured)
        across = max(across, len(ways))
        for name, said in (("shares", ""), ("found", "answer's block, ")):
            layers = _layers(captured, name)
            for way in ways if layers else []:
                own = [c for c in captured if c["way"] == way]
                shares = [
                    [_of_layer([c for c in own if c["blocks"] == n], layer, name) for n in counts]
                    for layer in layers
                ]
                columns = [str(n) for n in counts]
                title = f"{said}{way}: {where}"
                panels.append(Panel(title, layers, columns, shares, "layer", "blocks"))
    if not panels:
        return None
    model = rows[0]["settings"]["model"]
    return Sheet(
        f"Attention that lookups capture: {model}",
        caption_of(rows),
        panels,
        "share of the attention on stored blocks; of the answer's blocks: those loaded",
        across,
    )


def _loaded(rows: Sequence[Row], policy: str, captured: Sequence[Row]) -> int:
    """How many blocks the policy loads while answering, or the next number that was measured."""
    wanted = next(
        row["settings"]["memory"]["answer_blocks"] for row in rows if row["policy"] == policy
    )
    counts = sorted({c["blocks"] for c in captured})
    return max((n for n in counts if n <= wanted), default=counts[0])


def _layers(captured: Sequence[Row], name: str = "shares") -> list[str]:
    return sorted({layer for c in captured for layer in c[name]}, key=int)


def _of_layer(captured: Sequence[Row], layer: str, name: str = "shares") -> float | None:
    values = [c[name][layer] for c in captured if layer in c[name]]
    return sum(values) / len(values) if values else None


def _over_layers(captured: Sequence[Row], name: str) -> float | None:
    values = [value for c in captured for value in c[name].values()]
    return sum(values) / len(values) if values else None


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
