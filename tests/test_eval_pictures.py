"""Heat maps of results: what they hold, as SVG and as PNG."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from infllm_cli.errors import CapacityError, UsageError
from infllm_cli.evaluate import oracle_report
from infllm_cli.evaluate.chart import Box, Panel, Sheet, colour_of, ink_on, lay_out
from infllm_cli.evaluate.chart_files import check_files, svg, write
from infllm_cli.evaluate.pictures import sheet_of
from infllm_cli.evaluate.tables import as_text, grid_table
from infllm_cli.table_view import write_table

SETTINGS = {
    "model": "tiny",
    "seed": 0,
    "answering": "memory",
    "form": "published",
    "memory": {
        "sink_tokens": 64, "window_tokens": 1024, "answer_blocks": 8, "block_tokens": 128,
    },
}  # fmt: skip


def row(**values: Any) -> dict[str, Any]:
    common = {
        "task": "needle", "variant": "", "policy": "infllm", "length": 8192, "depth": 0.5,
        "sample": 0, "score": 1.0, "settings": SETTINGS, "read_seconds": 2.0,
        "document_tokens": 8000, "first_token_seconds": 1.0, "device_bytes": 10**6,
        "host_bytes": 10**7,
    }  # fmt: skip
    return {**common, **values}


ROWS = [
    row(depth=0.0),
    row(depth=1.0, score=0.0),
    row(depth=1.0, sample=1, score=1.0),
    row(depth=0.0, length=100_000, score=0.0, error="no room"),
    row(policy="dense", depth=0.0, score=0.25),
]


def test_a_map_has_depths_by_lengths_for_each_policy() -> None:
    first, second = sheet_of(ROWS).panels
    assert (first.title, second.title) == ("needle: infllm", "needle: dense")
    assert first.rows == ["0 %", "100 %"] and first.columns == ["8k", "100,000"]
    assert first.shares == [[1.0, 0.0], [0.5, None]]
    assert second.shares == [[0.25, None], [None, None]]


def test_without_depths_a_map_has_policies_by_lengths() -> None:
    (panel,) = sheet_of([row(depth=None), row(depth=None, policy="dense", score=0.0)]).panels
    assert (panel.title, panel.rows, panel.shares) == (
        "needle",
        ["infllm", "dense"],
        [[1.0], [0.0]],
    )


def test_a_table_has_what_is_found_and_what_it_costs() -> None:
    header, ours, dense = grid_table(ROWS)
    assert header == [
        "task", "policy", "8k", "100,000", "device", "host", "read tokens/s", "first token",
    ]  # fmt: skip
    assert ours == [
        "needle", "infllm", "67 % of 3", "0 % of 1, 1 failed", "1.0 MB", "10.0 MB", "4,000",
        "1.0 s",
    ]  # fmt: skip
    assert dense[2:4] == ["25 % of 1", "-"]


def test_a_terminal_gets_a_drawn_table_and_a_pipe_markdown() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rows = [["task", "policy", "8k"], ["needle [bold]", "a\x1b[1m", "91 % of 11"]]
    drawn, piped = Terminal(), io.StringIO()
    write_table(rows, drawn)
    write_table(rows, piped)
    assert piped.getvalue() == as_text(rows)
    assert "needle [bold]" in drawn.getvalue() and "91 % of 11" in drawn.getvalue()
    assert "a\x1b" not in drawn.getvalue() and "a␛" in drawn.getvalue()
    assert "|" not in drawn.getvalue()


def test_nothing_overlaps_and_all_is_inside() -> None:
    drawing = lay_out(sheet_of(ROWS))
    boxes = [mark for mark in drawing.marks if isinstance(mark, Box)]
    for index, a in enumerate(boxes):
        assert min(a.x, a.y) >= 0
        assert a.x + a.width <= drawing.width and a.y + a.height <= drawing.height
        for b in boxes[:index]:
            apart = a.x >= b.x + b.width or b.x >= a.x + a.width
            assert apart or a.y >= b.y + b.height or b.y >= a.y + a.height


def test_the_numbers_can_be_read_on_every_colour() -> None:
    def luminance(colour: tuple[int, int, int]) -> float:
        linear = [
            c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4
            for c in colour
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lights = [luminance(colour_of(step / 50)) for step in range(51)]
    assert lights == sorted(lights)  # the order holds in grey, too
    for step in range(51):
        high, low = sorted((lights[step], luminance(ink_on(colour_of(step / 50)))), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG AA


def test_svg_is_well_formed_and_tells_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    rows = [*ROWS, row(policy="<&\x1b]", depth=0.0)]
    write(sheet_of(rows), path)
    root = ET.parse(path).getroot()
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "needle: tiny" in texts and "needle: <&␛]" in texts
    assert {"100", "0", "50", "25", "-"} <= set(texts)
    told = root.find("{http://www.w3.org/2000/svg}desc").text
    assert "needle: infllm: 50 % on average over 3 cells" in told
    source = path.read_text()
    assert "prefers-color-scheme:dark" in source and "http" not in source.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_png_has_the_colours_of_the_cells(tmp_path: Path) -> None:
    path = tmp_path / "map.png"
    sheet = sheet_of(ROWS)
    write(sheet, path)
    drawing = lay_out(sheet)
    with Image.open(path) as image:
        assert image.size == (2 * drawing.width, 2 * drawing.height)
        cells = [m for m in drawing.marks if isinstance(m, Box) and m.told]
        for cell in cells:
            found = image.getpixel((int(2 * cell.x) + 3, int(2 * cell.y) + 3))
            assert found == (cell.colour or (236, 238, 241))


def test_what_cannot_be_drawn_is_told_beforehand(tmp_path: Path) -> None:
    check_files([tmp_path / "a.SVG", tmp_path / "b.png"])
    with pytest.raises(UsageError, match=r"\.svg or \.png"):
        check_files([tmp_path / "a.pdf"])
    with pytest.raises(UsageError, match="there is no folder"):
        check_files([tmp_path / "none" / "a.svg"])
    with pytest.raises(CapacityError):
        write(Sheet("t", "c", [Panel("p", ["r"], ["c"], [[1.0]])]), tmp_path / "none" / "a.svg")


def test_a_single_panel_has_room_for_its_titles() -> None:
    sheet = Sheet("t" * 90, "c" * 120, [Panel("p" * 80, ["r"], ["c"], [[None]])])
    assert lay_out(sheet).width > 120 * 6
    assert "not measured" in svg(lay_out(sheet), "t", "told")


def captured(phase: str, way: str, blocks: int, share: float) -> dict[str, Any]:
    shares = {"0": share, "10": share / 2}
    return {"phase": phase, "way": way, "blocks": blocks, "shares": shares, "found": {"0": 1.0}}


def test_the_oracle_is_told_by_layer_and_by_number_of_blocks() -> None:
    told = [captured("ask", "exact", n, n / 16) for n in (4, 8, 16)]
    rows = [row(captured=told), row(depth=1.0, captured=told[:2])]
    table = oracle_report.layer_table(rows)
    assert table[0][-1] == "exact"
    assert [line[-2:] for line in table[1:]] == [["0", "50.0 %"], ["10", "25.0 %"]]
    counted = oracle_report.count_table(rows)
    assert counted[0][-3:] == ["4 blocks", "8 blocks", "16 blocks"]
    assert counted[1][-3:] == ["19 %, found 100 %", "38 %, found 100 %", "75 %, found 100 %"]
    shares, found = oracle_report.sheet_of(rows).panels
    assert shares.rows == ["0", "10"] and shares.columns == found.columns == ["4", "8", "16"]
    assert found.rows == ["0"] and found.shares == [[1.0, 1.0, 1.0]]
    assert oracle_report.sheet_of([row(captured=[])]) is None
