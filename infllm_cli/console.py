"""What a person sees while it works; everything goes to standard error.

Animation only where standard error is a terminal (`live_console`); otherwise plain lines, one per
tenth of the reading. `--quiet` shows nothing.
"""

from __future__ import annotations

import abc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infllm_cli.wording import STRIP, duration, place, row, shrunk, size, summarized, told, visible

if TYPE_CHECKING:
    from infllm_cli.digests import PassDone, PieceTold, Summary
    from infllm_cli.events import Answer, ChunkRead, Looked
    from infllm_cli.evidence import Passage
    from infllm_cli.reader import Memory, Reader


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
        """Where it was not the model that ended the answer, and where nothing speaks for it."""
        reason = {
            "length": "the answer was cut at --max-tokens.",
            "repeat": "the answer began to loop and was stopped.",
            "interrupted": "interrupted; the answer so far has been written.",
        }.get(answer.finish)
        if reason is not None:
            self.note(reason)
        if answer.supported is False:
            self.note(
                "nothing in the document comes near this question: the answer is probably made up."
            )

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


class SpeakingConsole(Console, abc.ABC):
    """What the two that show something have in common: which facts a report is made of."""

    def report_summary(self, reader: Reader, memory: Memory, summary: Summary, peak: int) -> None:
        """What a summary took."""
        from infllm_cli.told import report_facts

        self._facts([*report_facts(reader, memory, [], peak), ("summary", summarized(summary))])

    def report(self, reader: Reader, memory: Memory, answers: list[Answer], peak: int) -> None:
        """What it took."""
        from infllm_cli.told import report_facts

        self._facts(report_facts(reader, memory, answers, peak))

    @abc.abstractmethod
    def _facts(self, facts: list[tuple[str, str]]) -> None:
        """Show names and values."""


class PlainConsole(SpeakingConsole):
    """Plain lines, for pipes, files and logs; imports no Rich."""

    def __init__(self, write: Callable[[str], Any], keep_rows: bool) -> None:
        self._write = write
        self._plain = not draws_bars()
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
            self._passage(f"{place(passage)}, score {passage.score:.3f}", passage)

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
            self._passage(place(passage), passage)

    def _passage(self, where: str, passage: Passage) -> None:
        self._line(f"evidence {where}")
        for line in passage.text.split("\n"):
            self._write(f"    {visible(line)}\n")

    def _facts(self, facts: list[tuple[str, str]]) -> None:
        """One line, or one per fact with `--stats`."""
        if self._keep_rows:
            for name, value in facts:
                self._line(f"{name}: {value}")
        else:
            self._line("; ".join(f"{name} {value}" for name, value in facts))


def open_console(*, quiet: bool = False, keep_rows: bool = False) -> Console:
    """The console that suits standard error."""
    if quiet:
        return Console()
    terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    if terminal:
        from infllm_cli.live_console import LiveConsole

        return LiveConsole(keep_rows, color="NO_COLOR" not in os.environ)

    def write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()

    return PlainConsole(write, keep_rows)


def draws_bars() -> bool:
    """Whether standard error takes the characters that bars are made of."""
    try:
        STRIP.encode(sys.stderr.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True
