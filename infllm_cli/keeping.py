"""Where do the blocks of a reading lie, and what remains of it: RAM, disk, a saved memory.

One `Keeper` follows one document from its opening to the end of the command.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from infllm_cli import budget, machine, saved
from infllm_cli.checksums import BrokenFile
from infllm_cli.early_check import EarlyCheck
from infllm_cli.errors import CapacityError
from infllm_cli.identity import key_facts, key_of
from infllm_cli.limits import Limits, disk_room, memories_folder
from infllm_cli.memory import snapshot
from infllm_cli.memory.dropping import drop_least_used
from infllm_cli.saved import Writer
from infllm_cli.shelf import Place, Shelf
from infllm_cli.wording import size

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

CHECKPOINT_SECONDS = 5.0  # of reading, that a killed process may lose
CHECKPOINT_SHARE = 20  # and this many times what writing a checkpoint took

Note = Callable[[str], None]
Progress = Callable[[str, int, int], None]


class Keeper:
    """Looks for a saved memory, and otherwise writes one while the document is read.

    Args:
        memory: opened, nothing of it read; afterwards it is as far as a saved memory brings it.
        note: is told what the user should know.
        early: what has been found out about a saved memory before.

    Raises:
        CapacityError: the RAM does not suffice, and the disk cannot be used.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        cache_dir: Path,
        limits: Limits,
        *,
        note: Note = lambda text: None,
        progress: Progress = lambda stage, done, total: None,
        early: EarlyCheck | None = None,
    ) -> None:
        self.memory = memory
        self.limits = limits
        self.shelf = Shelf(memories_folder(cache_dir))
        self.model = reader.loaded.name
        self.key: str | None = None
        self.moved = False  # whether blocks were moved from RAM to disk
        self.kept_tokens = 0  # of the document, in a saved memory
        self._note = note
        self._place: Place | None = None
        self._spill: Place | None = None
        self._writer: Writer | None = None
        self._filled = 0  # segments
        self._mapped = 0  # segments, from the first on
        self._wrote = time.monotonic()
        self._took = 0.0  # seconds, the last checkpoint
        need = needed(reader, memory)
        self._pressed = need.host_peak_bytes > limits.host
        self._spill_room: int | None = None  # bytes of disk, where they do not suffice
        try:
            if limits.save and not memory.state.config.policy.has_blocks:
                policy = memory.state.config.policy.value
                note(f"what --policy {policy} keeps is not saved: every command reads anew.")
            elif limits.save:
                self._find(reader, cache_dir, progress, early)
                if not memory.complete:
                    self._plan_saving(need)
            if self._writer is None and self._pressed and not memory.complete:
                self._plan_spilling(need)
        except BaseException:
            self.close()
            raise

    # -- before the reading -----------------------------------------------------------------

    def _find(
        self, reader: Reader, cache_dir: Path, progress: Progress, early: EarlyCheck | None
    ) -> None:
        """Take the place of this memory on the shelf, and what lies in it."""
        try:
            self.key = key_of(key_facts(reader, self.memory, cache_dir, progress))
            self._place = self.shelf.take(self.key)
        except OSError as error:
            self._note(f"this memory is not saved: {error.filename}: {error.strerror}.")
            return
        if self._place is None:
            self._note("another infllm is reading this document; this memory is not saved.")
            return
        record = self._place.record
        if record is None:
            return
        try:
            saved.load(self._place, record, self.memory, release=self._pressed, early=early)
        except BrokenFile as error:
            self._note(f"a saved memory is damaged ({error}); the document is read again.")
            if self._place.claim():
                self._place.keep_only(set())
            else:
                self._note("another infllm uses it; this memory is not saved.")
            return
        self._place.touch()
        self._mapped = len(record.files) - 1
        self.kept_tokens = record.read_tokens
        if record.complete:
            self._place.share()
            self._note(
                f"all {record.tokens:,} tokens come from a saved memory; none is read again."
            )
        else:
            self._note(
                f"an earlier reading goes on: {record.read_tokens:,} of {record.tokens:,} tokens "
                "come from it."
            )

    def _plan_saving(self, need: budget.Need) -> None:
        """Start to write, if the memory can be kept at all."""
        place = self._place
        if place is None or not place.alone:
            return
        record = place.record
        there = record.size if record is not None else 0
        wanted = saved_size(need, self.memory)
        room = disk_room(self.shelf, self.limits.disk, self.key)
        reason = None
        if wanted > self.limits.budget:
            reason = f"--memory-budget is {size(self.limits.budget)}"
        elif self.limits.disk is not None and wanted > self.limits.disk:
            reason = f"--disk-limit is {size(self.limits.disk)}"
        elif wanted > room + there:
            reason = f"the disk has room for {size(room + there)}"
        if reason is not None:
            self._note(f"this memory is not saved: it takes {size(wanted)}, and {reason}.")
            return
        self.shelf.make_room(self.limits.budget - wanted, self._free_for(wanted - there), self.key)
        self._writer = Writer(place.folder)
        if record is not None:
            self._writer.continue_from(record)

    def _plan_spilling(self, need: budget.Need) -> None:
        """Have a folder for the blocks that do not fit the RAM."""
        segment = self.memory.state.segment_bytes
        wanted = need.host_peak_bytes - self.limits.host + segment
        room = disk_room(self.shelf, self.limits.disk, self.key)
        if self.limits.allow_drop and wanted > room:
            self._spill_room = wanted = room
            if room < segment:
                return
        self.shelf.make_room(self.limits.budget, self._free_for(wanted), self.key)
        try:
            self._spill = self.shelf.spill_folder()
        except OSError as error:
            raise CapacityError(
                f"--host-limit {size(self.limits.host)} does not suffice, and "
                f"{error.filename} cannot be used ({error.strerror})."
            ) from None
        self._writer = Writer(self._spill.folder)

    def _free_for(self, wanted: int) -> Callable[[], bool]:
        folder = self.shelf.folder
        return lambda: machine.free_disk(folder) - machine.disk_reserve(folder) >= wanted

    # -- while reading ----------------------------------------------------------------------

    def chunk_read(self) -> None:
        """A chunk has been read: write what is ready, and move blocks to disk if need be.

        Raises:
            CapacityError: there is no room in RAM, and the disk is full.
        """
        if (filled := snapshot.segments_of(self.memory.state)) != self._filled:
            self._filled = filled
            machine.give_back_memory()  # of packing, and of the tail
        writer = self._writer
        if writer is None:
            self._drop()
            return
        if self._spill is None:
            writer.write_segments(self.memory.state)
        if writer.failure is not None:
            self._give_up(reading=not self.memory.complete)
            return
        self._relieve()
        if self._spill is None and not writer.busy and not self.memory.complete:
            pause = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * self._took)
            if time.monotonic() - self._wrote >= pause:
                self._write_state()

    def _write_state(self) -> None:
        assert self._writer is not None and self.key is not None
        self._wrote = began = time.monotonic()
        read = self.memory.reused_tokens + self.memory.read_tokens
        self._writer.write_state(self.memory, self.key, self.model)

        def done() -> None:
            self._took = time.monotonic() - began
            self.kept_tokens = read

        self._writer.then(done)

    def _relieve(self) -> None:
        """Replace the oldest segments in RAM by their files until the limit holds."""
        if not self._pressed:
            return
        writer, state = self._writer, self.memory.state
        assert writer is not None
        while self._mapped < snapshot.segments_of(state) and self._above_limit():
            if self._spill_room is not None and self._spill_room < state.segment_bytes:
                break
            if not writer.map_segment(state, self._mapped):
                # What is only moved is written when it has to go.
                writer.write_segments(state, self._mapped + 1)
                writer.wait()
                if writer.failure is not None:
                    self._give_up(reading=not self.memory.complete)
                    return
                continue
            if self._spill is not None:
                # Mapped it lives on without a name, and ends with this process whatever happens.
                (self._spill.folder / writer.segments[self._mapped].name).unlink()
            self._mapped += 1
            if self._spill_room is not None:
                self._spill_room -= state.segment_bytes
            if not self.moved:
                self.moved = True
                self._note(
                    f"the host limit of {size(self.limits.host)} is reached: the oldest blocks "
                    f"move to disk, in {self.shelf.folder}."
                )
        for layer in state.tiered:
            for segment in layer.arena.segments[: self._mapped]:
                if segment.release is not None:
                    segment.release()
        if self._spill_room is not None:
            self._drop()

    def _above_limit(self) -> bool:
        """Whether another chunk would pass the host limit."""
        state = self.memory.state
        chunk = state.config.chunk_tokens // state.config.block_tokens + 1
        ahead = chunk * sum(layer.arena.block_bytes for layer in state.tiered)
        return state.host_bytes + ahead > self.limits.host

    def _drop(self) -> None:
        """Give up the least used blocks until the limit holds, if that is allowed and needed."""
        if not (self._pressed and self.limits.allow_drop) or self.memory.complete:
            return
        state = self.memory.state
        first = state.dropped == 0
        while self._above_limit() and drop_least_used(state, state.config.segment_blocks):
            pass
        if first and state.dropped:
            self._note(
                f"the host limit of {size(self.limits.host)} is reached and the disk has no room: "
                "the least used blocks are dropped (--allow-drop)."
            )

    def _give_up(self, *, reading: bool = True) -> None:
        """Writing has failed: nothing partial stays, and a reading goes on if the RAM suffices.

        Raises:
            CapacityError: it does not.
        """
        writer = self._writer
        assert writer is not None and writer.failure is not None
        full = writer.failure.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "the disk is full" if full else str(writer.failure.strerror or writer.failure)
        writer.close()
        self._writer = None
        self.kept_tokens = 0
        if self._place is not None:
            self._place.clear()
        if self._pressed and reading and not self.limits.allow_drop:
            raise CapacityError(
                f"{self.shelf.folder}: {reason}, and the host limit of {size(self.limits.host)} "
                "is reached. Free some space, or raise --host-limit."
            )
        self._note(f"this memory is not saved: {self.shelf.folder}: {reason}.")

    def finish(self) -> None:
        """The document has been read: write the rest, in the background."""
        writer = self._writer
        if writer is None or not self.memory.complete:
            return
        self.chunk_read()
        if self._writer is None:
            return
        if self._spill is None:
            self._write_state()
            assert self._place is not None
            writer.then(self._place.share)

    # -- the end ----------------------------------------------------------------------------

    def stop(self) -> int:
        """The reading was interrupted; how many tokens the next one need not read again."""
        if self._writer is not None:
            self._writer.wait()
        return self.kept_tokens

    def saved_path(self) -> Path | None:
        """The folder of the saved memory, once it is whole."""
        if self._writer is not None and self._spill is None:
            self._writer.wait()
            if self._writer.failure is not None:
                self._give_up(reading=False)
        whole = self._place is not None and self.memory.complete
        return self._place.folder if whole and self.kept_tokens else None

    def close(self) -> None:
        """Wait for what is being written, keep the budget, give the lock back."""
        if self._writer is not None:
            self._writer.close()
            if self._writer.failure is not None and self._spill is None:
                self._give_up(reading=False)
        for place in (self._place, self._spill):
            if place is not None:
                place.close()
        if self._place is not None:
            own = self._place.record
            most = self.limits.budget - (own.size if own else 0)
            self.shelf.make_room(most, keep=self.key)
        self._place = self._spill = self._writer = None


# --- room ----------------------------------------------------------------------------------------


def needed(reader: Reader, memory: Memory) -> budget.Need:
    """What the memory of a document takes once it has been read."""
    loaded = reader.loaded
    context = memory.prefix_tokens + len(memory.tokens)
    return budget.of_policy(
        loaded.shapes,
        loaded.dtype.itemsize,
        memory.state.config,
        context,
        whole_tokens=context if memory.whole else 0,
    )


def saved_size(need: budget.Need, memory: Memory) -> int:
    """Bytes that the files of a memory take, at most."""
    config, layers = memory.state.config, len(memory.state.layers)
    return budget.saved_bytes(need, config, layers, memory.prefix_tokens + len(memory.tokens))
