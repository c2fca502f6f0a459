"""What a person sees on a terminal while it works; with `table_view` the only user of Rich."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from infllm_cli.console import SpeakingConsole, draws_bars
from infllm_cli.wording import (
    PLAIN_STRIP,
    STRIP,
    place,
    places,
    row,
    shrunk,
    size,
    strip,
    told,
    visible,
)

if TYPE_CHECKING:
    from infllm_cli.digests import PassDone, PieceTold, Summary
    from infllm_cli.events import Answer, ChunkRead, Looked
    from infllm_cli.evidence import Passage
    from infllm_cli.reader import Memory

LIVE_ROWS = 6
REFRESH_PER_SECOND = 8


class _Cropped:
    """The last lines of something, as many as the terminal has rows.

    Rich crops a live display while it lives, but shows all of it once more when it ends, and lines
    that have left the screen cannot be taken away.
    """

    def __init__(self, renderable: Any) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.segment import Segment

        lines = console.render_lines(self.renderable, options, pad=False)
        for number, line in enumerate(lines[-max(1, options.size.height - 1) :]):
            if number:
                yield Segment.line()
            yield from line


# From little to much attention; told by the height of the bar, too.
BAR_COLOURS = ("blue", "cyan", "yellow", "bold bright_yellow")


class LiveConsole(SpeakingConsole):
    """A terminal: a progress bar while reading, a live table of lookups while answering."""

    def __init__(self, keep_rows: bool, color: bool) -> None:
        from rich.console import Console as RichConsole

        self._rich = RichConsole(
            stderr=True, highlight=False, markup=False, emoji=False, no_color=not color
        )
        self._keep_rows = keep_rows
        self._plain = not draws_bars()
        self._live: Any = None
        self._progress: Any = None
        self._rows: deque[Looked] = deque(maxlen=LIVE_ROWS)
        self._text = ""
        self._question = ""
        self._looking = ""
        self.shows_answer = sys.stdout.isatty()

    # -- one live display at a time -----------------------------------------------------------

    def _show(self, renderable: Any) -> None:
        from rich.live import Live

        self.close()
        # Rich would otherwise take over standard output, and `> file` would stay empty.
        self._live = Live(
            _Cropped(renderable),
            console=self._rich,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def close(self) -> None:
        """Remove the live display."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str | None = None) -> None:
        self._rich.print(visible(text), style=style, soft_wrap=True)

    def _print_row(self, event: Looked) -> None:
        """A step's line; the document in it is a bar whose colour and height tell the mass."""
        from rich.text import Text

        line = Text(visible(row(event, plain=self._plain)), style="dim")
        bar = strip(event.mass, plain=self._plain)
        at = line.plain.find(f"[{bar}]") + 1 if bar else 0
        levels = PLAIN_STRIP if self._plain else STRIP
        for index, cell in enumerate(bar if at else ""):
            colour = BAR_COLOURS[levels.index(cell) * len(BAR_COLOURS) // len(levels)]
            line.stylize(f"not dim {colour}", at + index, at + index + 1)
        self._rich.print(line, soft_wrap=True)

    def stage(self, text: str) -> None:
        """A spinner."""
        from rich.spinner import Spinner
        from rich.text import Text

        self._show(Spinner("dots", text=Text(f"{visible(text)} ...")))

    def note(self, text: str) -> None:
        """A line that stays."""
        self._print(f"infllm: {text}", style="yellow")

    def fetching(self, stage: str, done: int, total: int) -> None:
        """A bar for bytes or steps."""
        from rich.spinner import Spinner
        from rich.text import Text

        part = f" {100 * done // total} %" if total else ""
        if self._live is None:
            self._show(Spinner("dots"))
        self._live.update(Spinner("dots", text=Text(f"{visible(stage)}{part} ...")))

    def begin_reading(self, name: str, memory: Memory) -> None:
        """The bar: tokens, speed, time left, blocks, bytes per tier."""
        from rich.console import Group
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.text import Text

        self._progress = Progress(
            TextColumn("reading"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f} %  {task.completed:,} of {task.total:,} tokens"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(compact=True),
            console=self._rich,
            auto_refresh=False,
        )
        total = len(memory.tokens)
        self._task = self._progress.add_task("", total=total, speed="")
        self._tiers = Text("", style="dim")
        self._show(Group(self._progress, self._tiers))

    def chunk_read(self, event: ChunkRead) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=event.tokens,
            speed=f"{(event.tokens - event.reused) / max(event.seconds, 1e-9):.0f}/s",
        )
        self._tiers.plain = (
            f"        {event.blocks} blocks per layer, {size(event.host_bytes)} on the host, "
            f"{size(event.device_bytes)} on the device"
        )

    def end_reading(self, memory: Memory) -> None:
        """Take the bar away; the report tells the figures."""
        self.close()

    def begin_answer(self, question: str) -> None:
        """An empty table."""
        self._rows.clear()
        self._text = ""
        self._question = question
        self._show(self._table())

    def looked(self, event: Looked) -> None:
        """A row of the table, or with `--stats` a line that stays."""
        self._rows.append(event)
        if self._keep_rows:
            self._print_row(event)
        if self._live is not None:
            self._live.update(_Cropped(self._table()))

    def token(self, text: str) -> None:
        """The answer so far, where this terminal is also standard output."""
        self._text += text
        if self.shows_answer and self._live is not None:
            self._live.update(_Cropped(self._table()))

    def _table(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        table.add_column("step")
        table.add_column("token", max_width=14, no_wrap=True)
        table.add_column("document", justify="right")
        table.add_column("where it looked", no_wrap=True, overflow="ellipsis")
        for event in self._rows:
            table.add_row(
                f"{event.phase.value} {event.index + 1}",
                Text(visible(event.token.replace("\n", " "))),
                f"{100 * event.share:.0f} %",
                Text(visible(places(event.passages))),
            )
        if not self.shows_answer:
            return table
        tail = visible(self._text[-600:])
        question = visible(" ".join(self._question[:200].split()))
        return Group(Text(question, style="dim"), table, Text(tail))

    def end_answer(self, answer: Answer) -> None:
        """Take the table away; the answer follows on standard output."""
        self.close()

    def evidence(self, answer: Answer, most: int) -> None:
        """The passages with their lines."""
        for passage in answer.evidence[:most]:
            self._passage(f"{place(passage)}  score {passage.score:.3f}", passage)

    def piece_told(self, event: PieceTold) -> None:
        """The bar, and with `--stats` a line that stays."""
        if self._keep_rows:
            self._print(told(event), style="dim")
        self.fetching("summarizing", event.piece.index + 1, event.total)

    def pass_done(self, event: PassDone) -> None:
        """With `--stats` a line that stays."""
        if self._keep_rows:
            self._print(shrunk(event), style="dim")

    def summary_evidence(self, summary: Summary, most: int) -> None:
        """The passages with their lines."""
        for passage in summary.evidence[:most]:
            self._passage(place(passage), passage)

    def _passage(self, heading: str, passage: Passage) -> None:
        from rich.padding import Padding
        from rich.text import Text

        self._print(heading, style="bold")
        self._rich.print(Padding(Text(visible(passage.text)), (0, 0, 1, 4)))

    def _facts(self, facts: list[tuple[str, str]]) -> None:
        """A small table."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in facts:
            table.add_row(Text(name, style="dim"), Text(visible(value), style="dim"))
        self._rich.print(table)
