"""What a person sees while it works: the only user of Rich; everything goes to standard error.

Animation only where standard error is a terminal; otherwise plain lines, one per tenth of the
reading. `--quiet` shows nothing.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infllm_cli.wording import (
    PLAIN_STRIP,
    STRIP,
    duration,
    place,
    places,
    row,
    shrunk,
    size,
    strip,
    summarized,
    told,
    visible,
)

if TYPE_CHECKING:
    from infllm_cli.digests import PassDone, PieceTold, Summary
    from infllm_cli.events import Answer, ChunkRead, Looked
    from infllm_cli.reader import Memory, Reader

LIVE_ROWS = 6
REFRESH_PER_SECOND = 8


class Console:
    """Says nothing (`--quiet`): the base of the two that do."""

    shows_answer = False  # whether the live display holds the answer until it is complete

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End whatever is animated."""

    def stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def note(self, text: str) -> None:
        """Something that the user should know, once."""

    def fetching(self, stage: str, done: int, total: int) -> None:
        """Progress of fetching and converting a model; total 0: unknown."""

    def begin_reading(self, name: str, memory: Memory) -> None:
        """A document is about to be read."""

    def chunk_read(self, event: ChunkRead) -> None:
        """A chunk has been read."""

    def end_reading(self, memory: Memory) -> None:
        """The document has been read."""

    def begin_answer(self, question: str) -> None:
        """A question is about to be asked."""

    def looked(self, event: Looked) -> None:
        """A step looked into the memory."""

    def token(self, text: str) -> None:
        """A piece of the answer."""

    def end_answer(self, answer: Answer) -> None:
        """The answer is complete, and is about to be written."""

    def say_why_it_ended(self, answer: Answer) -> None:
        """Where it was not the model that ended the answer; the answer has been written."""
        reason = {
            "length": "the answer was cut at --max-tokens.",
            "repeat": "the answer began to loop and was stopped.",
            "interrupted": "interrupted; the answer so far has been written.",
        }.get(answer.finish)
        if reason is not None:
            self.note(reason)

    def evidence(self, answer: Answer, most: int) -> None:
        """Show the passages attended most."""

    def piece_told(self, event: PieceTold) -> None:
        """A piece of the document has been summarized."""

    def pass_done(self, event: PassDone) -> None:
        """Summaries have been made fewer."""

    def summary_evidence(self, summary: Summary, most: int) -> None:
        """Show what the summary rests on; `most` 0: nothing."""

    def report_summary(self, reader: Reader, memory: Memory, summary: Summary, peak: int) -> None:
        """What a summary took."""

    def report(self, reader: Reader, memory: Memory, answers: list[Answer], peak: int) -> None:
        """What it took."""


class PlainConsole(Console):
    """Plain lines, for pipes, files and logs; imports no Rich."""

    def __init__(self, write: Callable[[str], Any], keep_rows: bool) -> None:
        self._write = write
        self._plain = not _draws_bars()
        self._keep_rows = keep_rows
        self._tenth = -1
        self._stage = ""

    def _line(self, text: str) -> None:
        self._write(f"infllm: {visible(text)}\n")

    def stage(self, text: str) -> None:
        """One line."""
        self._line(text)

    def note(self, text: str) -> None:
        """One line."""
        self._line(text)

    def fetching(self, stage: str, done: int, total: int) -> None:
        """A line per stage."""
        if stage != self._stage:
            self._stage = stage
            self._line(stage)

    def begin_reading(self, name: str, memory: Memory) -> None:
        """What is read, and how."""
        policy = memory.state.config.policy
        how = "into blocks" if policy.has_blocks else f"by {policy.value}"
        how = "as a whole" if memory.whole else how
        self._line(f"reading {name}: {len(memory.tokens)} tokens, {how}")

    def chunk_read(self, event: ChunkRead) -> None:
        """A line per tenth."""
        tenth = 10 * event.tokens // event.total
        if tenth > self._tenth:
            self._tenth = tenth
            speed = (event.tokens - event.reused) / max(event.seconds, 1e-9)
            left = (event.total - event.tokens) / max(speed, 1e-9)
            self._line(
                f"read {event.tokens} of {event.total} tokens, {speed:.0f}/s, "
                f"{duration(left)} left, {event.blocks} blocks, {size(event.host_bytes)}"
            )

    def looked(self, event: Looked) -> None:
        """A line per step, where asked for."""
        if self._keep_rows:
            self._line(row(event, plain=self._plain))

    def evidence(self, answer: Answer, most: int) -> None:
        """The passages with their lines."""
        for passage in answer.evidence[:most]:
            self._line(f"evidence {place(passage)}, score {passage.score:.3f}")
            for line in passage.text.split("\n"):
                self._write(f"    {visible(line)}\n")

    def piece_told(self, event: PieceTold) -> None:
        """A line per tenth, or with `--stats` the piece's summary."""
        done = event.piece.index + 1
        if self._keep_rows:
            self._line(told(event))
        elif 10 * done // event.total > 10 * (done - 1) // event.total:
            self._line(f"summarized {done} of {event.total} pieces")

    def pass_done(self, event: PassDone) -> None:
        """A line."""
        self._line(shrunk(event))

    def summary_evidence(self, summary: Summary, most: int) -> None:
        """The passages with their lines."""
        for passage in summary.evidence[:most]:
            self._line(f"evidence {place(passage)}")
            for line in passage.text.split("\n"):
                self._write(f"    {visible(line)}\n")

    def report_summary(self, reader: Reader, memory: Memory, summary: Summary, peak: int) -> None:
        """One line, or one per fact with `--stats`."""
        from infllm_cli.told import report_facts

        self._facts([*report_facts(reader, memory, [], peak), ("summary", summarized(summary))])

    def report(self, reader: Reader, memory: Memory, answers: list[Answer], peak: int) -> None:
        """One line, or one per fact with `--stats`."""
        from infllm_cli.told import report_facts

        self._facts(report_facts(reader, memory, answers, peak))

    def _facts(self, facts: list[tuple[str, str]]) -> None:
        if self._keep_rows:
            for name, value in facts:
                self._line(f"{name}: {value}")
        else:
            self._line("; ".join(f"{name} {value}" for name, value in facts))


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


class LiveConsole(Console):
    """A terminal: a progress bar while reading, a live table of lookups while answering."""

    def __init__(self, keep_rows: bool, color: bool) -> None:
        from rich.console import Console as RichConsole

        self._rich = RichConsole(
            stderr=True, highlight=False, markup=False, emoji=False, no_color=not color
        )
        self._keep_rows = keep_rows
        self._plain = not _draws_bars()
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
        from rich.padding import Padding
        from rich.text import Text

        for passage in answer.evidence[:most]:
            self._print(f"{place(passage)}  score {passage.score:.3f}", style="bold")
            self._rich.print(Padding(Text(visible(passage.text)), (0, 0, 1, 4)))

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
        from rich.padding import Padding
        from rich.text import Text

        for passage in summary.evidence[:most]:
            self._print(place(passage), style="bold")
            self._rich.print(Padding(Text(visible(passage.text)), (0, 0, 1, 4)))

    def report_summary(self, reader: Reader, memory: Memory, summary: Summary, peak: int) -> None:
        """A small table."""
        from infllm_cli.told import report_facts

        self._facts([*report_facts(reader, memory, [], peak), ("summary", summarized(summary))])

    def report(self, reader: Reader, memory: Memory, answers: list[Answer], peak: int) -> None:
        """A small table."""
        from infllm_cli.told import report_facts

        self._facts(report_facts(reader, memory, answers, peak))

    def _facts(self, facts: list[tuple[str, str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in facts:
            table.add_row(Text(name, style="dim"), Text(visible(value), style="dim"))
        self._rich.print(table)


def open_console(*, quiet: bool = False, keep_rows: bool = False) -> Console:
    """The console that suits standard error."""
    if quiet:
        return Console()
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if terminal:
        return LiveConsole(keep_rows, color="NO_COLOR" not in os.environ)

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return PlainConsole(write, keep_rows)


def _draws_bars() -> bool:
    """Whether standard error takes the characters that bars are made of."""
    try:
        STRIP.encode(sys.stderr.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
