"""Where each token of an answer looked, as a picture: the document from left to right.

One file, nothing fetched; readable on light and dark ground; what is drawn is also told in words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

from infllm_cli.events import Answer, Looked
from infllm_cli.evidence import Passage
from infllm_cli.memory.step import Phase
from infllm_cli.passages import Passages
from infllm_cli.wording import place, visible

MOST_COLUMNS = 120
LEAST_SHOWN = 0.03  # of the strongest cell: fainter ones are left out
LEFT, TOP, WIDTH, ROW = 130, 58, 840, 15
FULL = LEFT + WIDTH + 20
STYLE = """
.map{color:#1f2328;background:#fff;font:12px/1.3 system-ui,sans-serif}
.map .ground{fill:#f3f4f6}.map text{fill:currentColor}.map .cell{fill:#c2410c}
.map .dim{opacity:.7}
@media(prefers-color-scheme:dark){.map{color:#e6e6e6;background:#16181d}
.map .ground{fill:#24272e}.map .cell{fill:#ffb86b}}
"""


@dataclass(frozen=True, slots=True)
class Column:
    """Neighbouring passages that are drawn as one; its score is unused."""

    first: int
    last: int
    passage: Passage


@dataclass(frozen=True, slots=True)
class Heatmap:
    """The attention of one answer.

    Attributes:
        tokens: labels of the rows: the question, then the answer's tokens.
        cells: [rows, columns] share of each step's attention, beyond what any question draws.
        layers: the same for single layers, by index, nothing taken off; maybe none.
    """

    answer: Answer
    tokens: list[str]
    columns: list[Column]
    cells: np.ndarray
    layers: dict[int, np.ndarray] = field(default_factory=dict)

    def best(self, row: int | None = None, most: int = 3) -> list[tuple[int, float]]:
        """Columns that a row, or all rows together, looked at most, and their share."""
        shares = self.cells.mean(axis=0) if row is None else self.cells[row]
        order = np.argsort(-shares, kind="stable")[:most]
        return [(int(index), float(shares[index])) for index in order if shares[index] > 0]


def columns_of(
    passages: Passages, tell: Callable[[int], Passage], most: int = MOST_COLUMNS
) -> list[Column]:
    """The document in at most so many columns of about as many passages.

    Args:
        tell: the passage of an index, as of `AttentionRecord.passage`.
    """
    total = len(passages)
    size = -(-total // most)
    found = []
    for first in range(0, total, size):
        last = min(first + size, total)
        told = [tell(index) for index in range(first, last)]
        # A column may reach into the next file: it is named by the one where it begins.
        here = [passage for passage in told if passage.file == told[0].file]
        lines = (here[0].lines[0], here[-1].lines[1])
        text = "\n".join(passage.text for passage in told)
        found.append(Column(first, last, Passage(lines, text, 0.0, told[0].file)))
    return found


def heatmap_of(answer: Answer, looked: Sequence[Looked], columns: list[Column]) -> Heatmap:
    """The picture of an answer from the steps that looked."""
    steps = [step for step in looked if step.phase is Phase.ANSWER]
    asked = [step for step in looked if step.phase is Phase.ASK][-1:]
    rows = asked + steps
    starts = [column.first for column in columns]

    def cells(masses: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.add.reduceat(mass, starts) for mass in masses])

    layers = {
        index: cells([step.layers[index] for step in rows])
        for index in (rows[0].layers if rows else {})
    }
    tokens = ["(question)"] * len(asked) + [step.token for step in steps]
    return Heatmap(answer, tokens, columns, cells([step.mass for step in rows]), layers)


def svg_file(maps: Sequence[Heatmap], name: str) -> str:
    """A file with the pictures of all answers, one below the other."""
    heights = [height_of(one) for one in maps]
    pieces = []
    at = 0
    for one, height in zip(maps, heights, strict=True):
        pieces.append(f'<g transform="translate(0 {at})">{body(one)}</g>')
        at += height
    told = " ".join(in_words(one) for one in maps)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" class="map" role="img" '
        f'aria-labelledby="name told" width="{FULL}" height="{at}" viewBox="0 0 {FULL} {at}">'
        f'<title id="name">Where the answers looked in {as_xml(name)}</title>'
        f'<desc id="told">{as_xml(told)}</desc><style>{STYLE}</style>{"".join(pieces)}</svg>\n'
    )


def height_of(one: Heatmap) -> int:
    """Of a picture, in pixels."""
    return TOP + ROW * len(one.tokens) + 44


def body(one: Heatmap) -> str:
    """The drawing of one answer, without the element around it."""
    wide = WIDTH / len(one.columns)
    tall = ROW * len(one.tokens)
    question = as_xml(_short(one.answer.question, 120))
    answer = as_xml(_short(one.answer.text, 130))
    parts = [
        f'<text x="10" y="20" font-weight="600">{question}</text>',
        f'<text x="10" y="40" class="dim">{answer}</text>',
        f'<rect class="ground" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{tall}"/>',
    ]
    for number, token in enumerate(one.tokens):
        label = as_xml(_short(token.replace("\n", "⏎").strip() or "␣", 18))
        y = TOP + ROW * number + ROW - 4
        parts.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{label}</text>')
    parts.append(f'<g class="cells">{rectangles(one, one.cells)}</g>')
    count = len(one.columns)
    for number in range(5):
        index = min(count - 1, round(number * (count - 1) / 4))
        x = LEFT + wide * (index + 0.5)
        anchor = "start" if number == 0 else "end" if number == 4 else "middle"
        passage = one.columns[index].passage
        label = f"line {passage.lines[0]}"
        parts.append(
            f'<text class="dim" x="{x:.0f}" y="{TOP + tall + 18}" text-anchor="{anchor}">'
            f"{label}</text>"
        )
    return "".join(parts)


def rectangles(one: Heatmap, cells: np.ndarray) -> str:
    """The cells that can be seen, each with its place and share as a tooltip."""
    wide = WIDTH / len(one.columns)
    found = []
    for (row, column), strength in np.ndenumerate(strengths(cells)):
        if strength < LEAST_SHOWN:
            continue
        passage = one.columns[column].passage
        share = 100 * cells[row, column]
        told = f"{place(passage)}: {share:.1f} % — {_short(' '.join(passage.text.split()), 90)}"
        found.append(
            f'<rect class="cell" data-column="{column}" x="{LEFT + wide * column:.2f}" '
            f'y="{TOP + ROW * row}" width="{max(wide, 1.5):.2f}" height="{ROW - 1}" '
            f'fill-opacity="{strength:.2f}"><title>{as_xml(told)}</title></rect>'
        )
    return "".join(found)


def strengths(cells: np.ndarray) -> np.ndarray:
    """How strongly cells are drawn, 0 to 1: the root, so that weaker ones are seen, too."""
    return np.sqrt(np.maximum(cells, 0) / max(float(cells.max(initial=0.0)), 1e-12))


def in_words(one: Heatmap) -> str:
    """What the picture shows, as a sentence."""
    best = "; ".join(
        f"{place(one.columns[index].passage)} ({100 * share:.1f} %)" for index, share in one.best()
    )
    told = f"most attended: {best}." if best else "nothing in particular was attended."
    return f"For the question {one.answer.question!r}, {told}"


def as_xml(text: str) -> str:
    """Text as it may stand in XML, which knows no control characters."""
    return escape(visible(text).replace("\ufffe", "�").replace("\uffff", "�"))


def _short(text: str, most: int) -> str:
    one_line = " ".join(text.split()) if "\n" in text else text
    return one_line if len(one_line) <= most else f"{one_line[: most - 1]}…"
