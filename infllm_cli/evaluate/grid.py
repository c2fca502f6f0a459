"""Run tasks over a grid of lengths, depths, samples and policies.

A document is built once for all policies, read once by each, and asked all of its questions.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import infllm_cli
from infllm_cli.capacity import Room
from infllm_cli.document import Document, decode_document
from infllm_cli.errors import CapacityError, InfllmError
from infllm_cli.evaluate.results import Results, Row, key_of
from infllm_cli.evaluate.tables import short_length
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Probe, Task
from infllm_cli.evaluate.varied import System, changes_of
from infllm_cli.keeping import Keeper
from infllm_cli.limits import Limits, disk_room, memories_folder
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.model_size import reread_tokens
from infllm_cli.models.loading import LoadedModel
from infllm_cli.prompts import QUESTION
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.shelf import Shelf
from infllm_cli.wording import visible

if TYPE_CHECKING:
    from infllm_cli.console import Console


class TimeIsUp(Exception):
    """`--limit-seconds` have passed."""


class Deadline:
    """When to stop; never, where no limit is given."""

    def __init__(self, seconds: float | None) -> None:
        self._at = None if seconds is None else time.monotonic() + seconds

    def check(self) -> None:
        """Raise `TimeIsUp` when the time has come."""
        if self._at is not None and time.monotonic() >= self._at:
            raise TimeIsUp


class Form(enum.Enum):
    """How a document and its question become a prompt."""

    PUBLISHED = "published"  # one message, with the benchmark's words alone
    ASK = "ask"  # as `infllm ask` does: the document is a turn of its own


@dataclass(frozen=True)
class Grid:
    """What is to be measured."""

    tasks: Sequence[Task]
    lengths: Sequence[int]
    depths: Sequence[float]
    policies: Sequence[System]
    samples: int
    seed: int
    options: AnswerOptions  # their longest answer, and what it begins with, are the tasks'
    form: Form = Form.PUBLISHED
    sizes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Wanted:
    """A document, and the cells that one policy has not answered on it yet."""

    task: Task
    cells: tuple[Cell, ...]
    policy: System
    missing: tuple[tuple[int, str], ...]  # index of the cell, its key


class GridRunner:
    """Measures the cells of a grid that are not among the results yet.

    What is measured of a cell is one method's business (`_answer`), so that others can stand in.

    Attributes:
        cells: keys of all cells of the grid, in order.
        found: how many of them had been measured before.
        failed: rows of cells that could not be measured.
    """

    def __init__(
        self,
        grid: Grid,
        loaded: LoadedModel,
        results: Results,
        console: Console,
        cache_dir: Path,
        limits: Limits,
        deadline: Deadline,
    ) -> None:
        self.grid = grid
        self.loaded = loaded
        self.results = results
        self.console = console
        self.cache_dir = cache_dir
        self.limits = replace(limits, save=False)  # nobody will ask these documents again
        self.deadline = deadline
        self.readers = {
            policy: Reader(
                loaded,
                MemoryConfig.for_model(
                    loaded.trained_length, **{**grid.sizes, **changes_of(policy)}
                ),
            )
            for policy in grid.policies
        }
        if grid.form is Form.PUBLISHED:
            for reader in self.readers.values():
                reader.prompt = reader.prompt.in_one_turn()
        self.fitting = Fitting(next(iter(self.readers.values())).prompt)
        self.failed: list[Row] = []
        self.cells: list[str] = []
        self._plans: list[tuple[Task, tuple[Cell, ...]]] = []
        for length in grid.lengths:
            for task in grid.tasks:
                self._plans += [(task, p) for p in task.plan([length], grid.depths, grid.samples)]
        for task, cells in self._plans:
            for policy in grid.policies:
                self.cells += [key_of(self._identity(task, cells, c, policy)) for c in cells]
        self.found = sum(results.get(key) is not None for key in self.cells)

    @property
    def rows(self) -> list[Row]:
        """What is known of the grid's cells, those before this command included."""
        known = (self.results.get(key) for key in self.cells)
        return [row for row in known if row is not None] + self.failed

    def run(self) -> None:
        """Measure.

        Raises:
            TimeIsUp: what has been measured so far is among the results.
            InfllmError: what is wrong with the whole of it, not with a cell.
        """
        ahead = self._built_ahead()
        for task, cells in self._plans:
            wanted = list(self._wanted(task, cells))
            if not wanted:
                continue
            self.deadline.check()
            case = ahead.pop((task.title, cells), None)
            if case is None:
                case = task.build(self.fitting, cells, self.grid.seed)
            document = decode_document(
                case.text.encode(), f"{task.title}, {short_length(cells[0].length)}"
            )
            for one in wanted:
                self._measure(one, case, document)

    def _built_ahead(self) -> dict[tuple[str, tuple[Cell, ...]], Case]:
        """The first document of each task and length: what cannot be built is told at once, and
        not after hours of measuring.
        """
        built: dict[tuple[str, tuple[Cell, ...]], Case] = {}
        seen: set[tuple[str, int]] = set()
        for task, cells in self._plans:
            kind = (task.title, cells[0].length)
            if kind not in seen and any(self._wanted(task, cells)):
                self.deadline.check()
                self.console.stage(f"making {task.title}, {short_length(cells[0].length)}")
                built[task.title, cells] = task.build(self.fitting, cells, self.grid.seed)
                seen.add(kind)
        return built

    def _wanted(self, task: Task, cells: tuple[Cell, ...]) -> Iterator[_Wanted]:
        for policy in self.grid.policies:
            keys = [key_of(self._identity(task, cells, cell, policy)) for cell in cells]
            missing = [(i, key) for i, key in enumerate(keys) if self.results.get(key) is None]
            if missing:
                yield _Wanted(task, cells, policy, tuple(missing))

    def _measure(self, wanted: _Wanted, case: Case, document: Document) -> None:
        reader = self.readers[wanted.policy]
        disk = disk_room(Shelf(memories_folder(self.cache_dir)), self.limits.disk)
        try:
            room = Room(self.limits.host, disk)
            memory = reader.open(document, allow_whole=False, room=room)
            with contextlib.ExitStack() as stack:
                if self.grid.options.answering is not Answering.PASSAGES:
                    keeper = None
                    if wanted.policy.has_blocks:  # which can move to disk
                        keeper = Keeper(
                            reader, memory, self.cache_dir, self.limits, note=self.console.note
                        )
                        stack.callback(keeper.close)
                    self._read(reader, memory, keeper, wanted)
                for number, (index, key) in enumerate(wanted.missing, 1):
                    self.deadline.check()
                    self.console.stage(
                        f"{document.name}, {wanted.policy.value}: question {number} of "
                        f"{len(wanted.missing)}"
                    )
                    probe = case.probes[index]
                    measured = self._answer(reader, memory, wanted.task, probe)
                    self._add(wanted, index, key, memory, probe, measured)
        except (CapacityError, torch.OutOfMemoryError, MemoryError) as error:
            self._fail(wanted, case, str(error) or type(error).__name__)
        except InfllmError as error:
            if type(error) is not InfllmError:  # usage, document, model: wrong for every cell
                raise
            self._fail(wanted, case, str(error))

    def _read(self, reader: Reader, memory: Memory, keeper: Keeper | None, wanted: _Wanted) -> None:
        self.console.begin_reading(f"{memory.document.name}, {wanted.policy.value}", memory)
        for event in reader.read_steps(memory):
            if keeper is not None:
                keeper.chunk_read()
            self.console.chunk_read(event)
            self.deadline.check()
        if keeper is not None:
            keeper.finish()
        self.console.end_reading(memory)

    def _answer(self, reader: Reader, memory: Memory, task: Task, probe: Probe) -> Row:
        """Put a probe's question: what the row of its cell tells of it."""
        options = replace(self.grid.options, max_tokens=task.max_tokens, prefill=probe.prefill)
        answer = reader.ask(memory, self._question(probe), options)
        return {
            "answer": answer.text,
            "score": task.score(answer.text, probe.answers),
            "finish": answer.finish,
            "answer_tokens": answer.tokens,
            "seconds": round(answer.seconds, 3),
            "first_token_seconds": round(answer.first_token_seconds, 3),
        }

    def _question(self, probe: Probe) -> str:
        # The form of `infllm ask` begins with the same word.
        ours = self.grid.form is Form.ASK
        return probe.question.removeprefix(QUESTION) if ours else probe.question

    def _told(self, measured: Row) -> str:
        """A cell in a line."""
        answer = " ".join(visible(measured["answer"]).split())
        return f"{measured['score']:.2f}: {answer[:80]}"

    # -- rows ---------------------------------------------------------------------------------

    def _settings(self, task: Task, policy: System) -> dict[str, Any]:
        """All that decides an answer but the cell."""
        options = self.grid.options
        return {
            "model": self.loaded.name,
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "device": self.loaded.device.type,
            "seed": self.grid.seed,
            "form": self.grid.form.value,
            "answering": options.answering.value,
            "max_tokens": task.max_tokens,
            "reread_tokens": reread_tokens(options.reread_tokens, self.readers[policy].parameters),
            "encoder": options.encoder,
            "candidates": options.candidates,
            "memory": self.readers[policy].config.as_dict(),
            **task.facts,
        }

    def _identity(
        self, task: Task, cells: tuple[Cell, ...], cell: Cell, policy: System
    ) -> dict[str, Any]:
        return {
            **self._place(task, cell, policy),
            "infllm": infllm_cli.__version__,  # another one may make other documents
            # What stands in one document depends on all of its cells.
            "together": [[c.sample, c.depth] for c in cells],
            "settings": self._settings(task, policy),
        }

    @staticmethod
    def _place(task: Task, cell: Cell, policy: System) -> dict[str, Any]:
        return {
            "task": task.name,
            "variant": task.variant,
            "policy": policy.value,
            "length": cell.length,
            "depth": cell.depth,
            "sample": cell.sample,
        }

    def _head(self, wanted: _Wanted, index: int, key: str, probe: Probe) -> Row:
        return {
            "cell": key,
            **self._place(wanted.task, wanted.cells[index], wanted.policy),
            "kind": probe.kind,
            "question": probe.question,
            "prefill": probe.prefill,
            "known": list(probe.answers),
        }

    def _tail(self, wanted: _Wanted) -> Row:
        return {
            "chance": wanted.task.chance,
            "questions_of_document": len(wanted.cells),
            "settings": self._settings(wanted.task, wanted.policy),
            "versions": {
                "infllm": infllm_cli.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }

    def _add(
        self,
        wanted: _Wanted,
        index: int,
        key: str,
        memory: Memory,
        probe: Probe,
        measured: Row,
    ) -> None:
        row = {
            **self._head(wanted, index, key, probe),
            **measured,
            "document_tokens": len(memory.tokens),
            "read_seconds": round(memory.read_seconds, 3),
            "blocks": memory.state.blocks,
            "device_bytes": memory.device_bytes_peak,
            "host_bytes": memory.state.host_bytes + memory.state.mapped_bytes,
            **self._tail(wanted),
        }
        self.results.add(row)
        cell = wanted.cells[index]
        where = "" if cell.depth is None else f", depth {100 * cell.depth:.0f} %"
        self.console.note(
            f"{wanted.task.title}, {short_length(cell.length)}{where}, {wanted.policy.value}: "
            f"{self._told(measured)}"
        )

    def _fail(self, wanted: _Wanted, case: Case, reason: str) -> None:
        """What could not be measured counts as nothing found, with the reason."""
        for index, key in wanted.missing:
            if self.results.get(key) is not None:  # answered before it failed
                continue
            probe = case.probes[index]
            row = {**self._head(wanted, index, key, probe), "score": 0.0, "error": reason}
            row.update(self._tail(wanted))
            self.results.add(row)
            self.failed.append(row)
        where = f"{wanted.task.title}, {short_length(wanted.cells[0].length)}"
        self.console.note(f"{where}, {wanted.policy.value}: {reason}")
