"""A heat map of shares, laid out once and drawn as SVG and as PNG.

A sheet holds panels; a panel has rows, columns and a share for each of their cells, or none. The
colours (cividis; Nunez et al., 2018) keep their order for any colour vision, and every cell holds
its number as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Share = float | None
Colour = tuple[int, int, int]

_SCALE: tuple[Colour, ...] = (
    (0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56),
)  # fmt: skip
CELL_WIDTH, CELL_HEIGHT = 62, 26
LEAST_PANEL = 4  # columns that a panel has room for at least, so that its title fits
MARGIN, GAP = 24, 36
TITLE_HEIGHT, PANEL_HEAD, PANEL_FOOT = 58, 42, 50
LEGEND_HEIGHT = 48
LETTER = 6.6  # pixels, about, of the labels' letters


@dataclass(frozen=True)
class Panel:
    """One map.

    Attributes:
        shares: [rows][columns], 0 to 1; None was not measured.
        row_name, column_name: what rows and columns are.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    shares: Sequence[Sequence[Share]]
    row_name: str = ""
    column_name: str = ""


@dataclass(frozen=True)
class Sheet:
    """Several maps with what is common to them.

    Attributes:
        caption: one line below the title.
        meaning: what a share is, for the scale.
        across: panels side by side, at most.
    """

    title: str
    caption: str
    panels: Sequence[Panel]
    meaning: str = "score"
    across: int = 3


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; without a colour it is ground on which nothing was measured."""

    x: float
    y: float
    width: float
    height: float
    colour: Colour | None
    told: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """A text; `y` is its middle. Without a colour it is written in that of the page's text.

    Attributes:
        anchor: "start", "middle" or "end".
    """

    x: float
    y: float
    text: str
    size: int = 12
    anchor: str = "start"
    bold: bool = False
    dim: bool = False
    colour: Colour | None = None


@dataclass(frozen=True)
class Drawing:
    """What is to be drawn, in order, in pixels."""

    width: int
    height: int
    marks: list[Box | Label]


def colour_of(share: float) -> Colour:
    """Dark blue for 0, yellow for 1."""
    at = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    index = min(int(at), len(_SCALE) - 2)
    low, high = _SCALE[index], _SCALE[index + 1]
    return tuple(round(a + (b - a) * (at - index)) for a, b in zip(low, high, strict=True))


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever is read better (WCAG relative luminance)."""
    linear = [
        c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4
        for c in colour
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return (0, 0, 0) if luminance > 0.179 else (255, 255, 255)


def lay_out(sheet: Sheet) -> Drawing:
    """Where everything stands."""
    across = min(sheet.across, len(sheet.panels))
    left = max(_left(panel) for panel in sheet.panels)
    columns = max(LEAST_PANEL, *(len(panel.columns) for panel in sheet.panels))
    longest = max(len(panel.title) for panel in sheet.panels)
    width_each = max(left + CELL_WIDTH * columns, int(longest * 7.6))
    rows = max(len(panel.rows) for panel in sheet.panels)
    height_each = PANEL_HEAD + CELL_HEIGHT * rows + PANEL_FOOT
    down = -(-len(sheet.panels) // across)
    width = 2 * MARGIN + across * width_each + (across - 1) * GAP
    width = max(
        width,
        2 * MARGIN + int(LETTER * len(sheet.caption)),
        2 * MARGIN + int(9.2 * len(sheet.title)),
        2 * MARGIN + 340,
    )
    height = TITLE_HEIGHT + down * height_each + LEGEND_HEIGHT
    marks: list[Box | Label] = [
        Label(MARGIN, 24, sheet.title, size=16, bold=True),
        Label(MARGIN, 45, sheet.caption, dim=True),
    ]
    for number, panel in enumerate(sheet.panels):
        x = MARGIN + number % across * (width_each + GAP)
        y = TITLE_HEIGHT + number // across * height_each
        marks += _panel(panel, x, y, left)
    marks += _legend(sheet.meaning, MARGIN, height - LEGEND_HEIGHT + 10)
    return Drawing(width, height, marks)


def _left(panel: Panel) -> int:
    """Room for a panel's row labels."""
    longest = max(len(label) for label in panel.rows)
    return int(max(longest, len(panel.row_name)) * LETTER) + 12


def _panel(panel: Panel, x: float, y: float, left: int) -> list[Box | Label]:
    marks: list[Box | Label] = [Label(x, y + 10, panel.title, size=13, bold=True)]
    top = y + PANEL_HEAD
    tall = CELL_HEIGHT * len(panel.rows)
    if panel.row_name:
        marks.append(Label(x + left - 6, top - 9, panel.row_name, 11, "end", dim=True))
    for row, (name, shares) in enumerate(zip(panel.rows, panel.shares, strict=True)):
        middle = top + CELL_HEIGHT * (row + 0.5)
        marks.append(Label(x + left - 6, middle, name, anchor="end"))
        for column, share in enumerate(shares):
            at = x + left + CELL_WIDTH * column
            told = f"{panel.title}: {name}, {panel.columns[column]}: {_percent(share)}"
            colour = None if share is None else colour_of(share)
            marks.append(
                Box(at, top + CELL_HEIGHT * row, CELL_WIDTH - 1, CELL_HEIGHT - 1, colour, told)
            )
            ink = None if colour is None else ink_on(colour)
            text = "-" if share is None else f"{100 * share:.0f}"
            marks.append(
                Label(at + (CELL_WIDTH - 1) / 2, middle - 0.5, text, anchor="middle", colour=ink)
            )
    wide = CELL_WIDTH * len(panel.columns)
    for column, name in enumerate(panel.columns):
        at = x + left + CELL_WIDTH * (column + 0.5)
        marks.append(Label(at, top + tall + 11, name, anchor="middle"))
    if panel.column_name:
        marks.append(
            Label(x + left + wide / 2, top + tall + 28, panel.column_name, 11, "middle", dim=True)
        )
    return marks


def _legend(meaning: str, x: float, y: float) -> list[Box | Label]:
    steps, wide = 40, 4
    marks: list[Box | Label] = [
        Box(x + wide * step, y, wide, 10, colour_of(step / (steps - 1))) for step in range(steps)
    ]
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        marks.append(Label(x + wide * steps * share, y + 20, f"{100 * share:.0f} %", 11, anchor))
    marks.append(Label(x + wide * steps + 14, y + 5, meaning, 11, dim=True))
    return marks


def _percent(share: Share) -> str:
    return "not measured" if share is None else f"{100 * share:.0f} %"


def in_words(sheet: Sheet) -> str:
    """What the sheet shows, for those who cannot see it."""
    told = []
    for panel in sheet.panels:
        known = [share for row in panel.shares for share in row if share is not None]
        if known:
            mean = 100 * sum(known) / len(known)
            told.append(f"{panel.title}: {mean:.0f} % on average over {len(known)} cells.")
    return " ".join(told)
