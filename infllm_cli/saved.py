"""A saved memory: written while the document is read, mapped back in when it is asked again."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from infllm_cli.checksums import BrokenFile, FileRecord, check
from infllm_cli.early_check import CHECKERS, EarlyCheck
from infllm_cli.memory import snapshot
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.snapshot import State
from infllm_cli.shelf import Place, Record, save_record
from infllm_cli.tensor_files import MappedFile, write_tensors

if TYPE_CHECKING:
    from infllm_cli.reader import Memory


def load(
    place: Place,
    record: Record,
    memory: Memory,
    *,
    release: bool,
    early: EarlyCheck | None = None,
) -> None:
    """Map a saved memory in; `memory` is empty, and afterwards as far as the saved one.

    Args:
        release: keep the pages of the blocks out of this process but while they are read.
        early: may have compared its files already; all others are compared now.

    Raises:
        BrokenFile: a file is not what was written; `memory` is as it was.
    """
    folder = place.folder

    def compare(file: FileRecord) -> None:
        if early is None or not early.vouches(folder, file):
            check(folder, file)

    with ThreadPoolExecutor(CHECKERS) as checkers:
        list(checkers.map(compare, record.files))
    *segments, state = [MappedFile(folder / file.name) for file in record.files]
    try:
        numbers = json.loads(state.facts["state"])
    except (KeyError, ValueError) as error:
        raise BrokenFile(f"{folder / record.files[-1].name}: {error}") from None
    for index, file in enumerate(segments):
        snapshot.place_segment(memory.state, index, file.tensors, file.release if release else None)
    snapshot.restore_state(memory.state, State(**numbers, tensors=state.tensors))
    memory.reused_tokens = record.read_tokens


class Writer:
    """Writes the segments and the state of a memory in the background, in order.

    The first failure ends it: what comes later is not written, and `failure` tells it. Nothing
    partial is left; what was whole stays until the owner of the folder clears it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure: OSError | None = None
        self.segments: list[FileRecord] = []
        self.state: FileRecord | None = None
        self._submitted = 0
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether something is still to be written."""
        return self._last is not None and not self._last.done()

    def continue_from(self, record: Record) -> None:
        """The folder holds these files already."""
        *self.segments, self.state = record.files
        self._submitted = len(self.segments)

    def write_segments(self, memory: ModelMemory, most: int | None = None) -> None:
        """Write the segments that have been filled since the last call, of the first `most`."""
        filled = snapshot.segments_of(memory)
        while self._submitted < (filled if most is None else min(filled, most)):
            index = self._submitted
            tensors = snapshot.segment_tensors(memory, index)
            self._submitted += 1
            self._submit(lambda index=index, tensors=tensors: self._write_segment(index, tensors))

    def _write_segment(self, index: int, tensors: snapshot.Tensors) -> None:
        path = self.folder / f"segment-{index:05d}.safetensors"
        self.segments.append(write_tensors(path, tensors, {"segment": str(index)}))

    def write_state(self, memory: Memory, key: str, model: str) -> None:
        """Write the state as it is now, and then the record that makes it a memory."""
        state = snapshot.state_of(memory.state)
        record = Record(
            key=key,
            complete=memory.complete,
            document=memory.document.name,
            model=model,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
            tokens=len(memory.tokens),
            read_tokens=memory.reused_tokens + memory.read_tokens,
            blocks=memory.state.blocks,
            whole=memory.whole,
            files=[],
            document_sha256=memory.document.sha256,
        )
        assert state.segments == self._submitted, "segments are written before the state"
        self._submit(lambda: self._write_state(state, record))

    def _write_state(self, state: State, record: Record) -> None:
        numbers = {"tokens": state.tokens, "segments": state.segments, "starts": state.starts}
        facts = {"state": json.dumps(numbers)}
        before = self.state
        path = self.folder / f"state-{state.tokens}.safetensors"
        self.state = write_tensors(path, state.tensors, facts)
        record.files.extend([*self.segments, self.state])
        save_record(self.folder, record)
        if before is not None and before.name != self.state.name:
            with contextlib.suppress(OSError):
                (self.folder / before.name).unlink()

    def then(self, call: Callable[[], None]) -> None:
        """Call something when all that was given so far has been written, unless that failed."""
        self._submit(call)

    def _submit(self, job: Callable[[], None]) -> None:
        self._last = self._thread.submit(self._run, job)

    def _run(self, job: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            job()
        except OSError as error:
            self.failure = error

    def map_segment(self, memory: ModelMemory, index: int, *, release: bool = True) -> bool:
        """Put the written file in place of a segment in memory; False: it is not written yet."""
        if index >= len(self.segments):
            return False
        file = MappedFile(self.folder / self.segments[index].name)
        snapshot.place_segment(memory, index, file.tensors, file.release if release else None)
        return True

    def wait(self) -> None:
        """Until everything has been written."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait and end the thread."""
        self._thread.shutdown(wait=True)
