"""What comes before a command's own work: load the model, open the document, read and keep it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from infllm_cli import collector, speeds
from infllm_cli.capacity import Room
from infllm_cli.document import Document
from infllm_cli.early_check import EarlyCheck
from infllm_cli.errors import Interrupted
from infllm_cli.impressions import keep_neutral, recall_neutral
from infllm_cli.keeping import Keeper
from infllm_cli.limits import disk_room, memories_folder
from infllm_cli.meaning_files import keep_meanings
from infllm_cli.models import lean_import
from infllm_cli.reader import Memory, Reader
from infllm_cli.shelf import Shelf

if TYPE_CHECKING:
    from infllm_cli.commands.groups import LimitFlags, ModelFlags, SizeFlags
    from infllm_cli.console import Console


@dataclass(frozen=True)
class Source:
    """A document, and how it is to be read.

    Attributes:
        kept: whether its memory will be asked or written; only its text otherwise.
    """

    document: Document
    model: ModelFlags
    limits: LimitFlags
    sizes: SizeFlags
    kept: bool = True

    @cached_property
    def early(self) -> EarlyCheck | None:
        """Begins to look after a saved memory when it is first named, which is before loading."""
        if not (self.kept and self.limits.save):
            return None
        return EarlyCheck(Shelf(memories_folder(self.model.cache)), self.document.sha256)


def load_reader(source: Source, console: Console) -> Reader:
    """The model.

    Raises:
        InfllmError: it cannot be found, loaded or vouched for, or the sizes do not fit it.
    """
    for file in source.document.parts or [source.document]:
        if file.encoding not in ("utf-8", "ascii"):
            console.note(f"{file.name} is read as {file.encoding}.")
    console.stage("loading the model")
    lean_import.want()
    source.early  # noqa: B018  goes on beside it
    reader = Reader.load(
        source.model.model,
        device=source.model.device,
        dtype=source.model.dtype.value,
        cache_dir=source.model.cache,
        progress=console.fetching,
        device_limit_bytes=source.limits.parsed().device,
        **source.sizes.as_dict(),
    )
    tell_plain_form(reader, console)
    if reader.gates.told:
        console.note(reader.gates.told)
    return reader


def tell_plain_form(reader: Reader, console: Console) -> None:
    """Say that a model is not asked as a chat."""
    if not reader.prompt.is_chat:
        console.note(
            f"{reader.loaded.name} has no chat template: it is asked in a plain form, as "
            "'Question: ... Answer:'."
        )


def open_memory(source: Source, reader: Reader, console: Console, reserve_tokens: int) -> Memory:
    """An empty memory for the document.

    Raises:
        DocumentError: no token comes out of it.
        CapacityError: it would pass the limits.
    """
    console.stage("tokenizing")
    limits = source.limits.parsed()
    shelf = Shelf(memories_folder(source.model.cache))
    memory = reader.open(
        source.document,
        reserve_tokens=reserve_tokens,
        # Sizes given by hand are meant for the tiers.
        allow_whole=not source.sizes.given,
        room=Room(
            limits.host,
            disk_room(shelf, limits.disk),
            denser=source.sizes.may_be_denser,
            may_drop=limits.allow_drop,
        ),
    )
    if memory.is_denser(reader):
        console.note(
            f"RAM and disk do not hold this document as {reader.config.codec.value}: it is stored "
            f"as {memory.state.config.codec.value}, which finds a little less (--store "
            f"{reader.config.codec.value} refuses it instead)."
        )
    return memory


@contextlib.contextmanager
def kept(source: Source, reader: Reader, memory: Memory, console: Console) -> Iterator[Keeper]:
    """Read what no saved memory holds; inside, the memory is complete.

    Raises:
        Interrupted: the reading was stopped.
        CapacityError: there is no room for it.
    """
    cache_dir, limits = source.model.cache, source.limits.parsed()
    with contextlib.closing(
        Keeper(
            reader,
            memory,
            cache_dir,
            limits,
            note=console.note,
            progress=console.fetching,
            early=source.early,
        )
    ) as keeper:
        if source.early is not None:
            source.early.close()
        _read(reader, memory, keeper, console)
        _remember_speed(reader, memory, cache_dir)
        # Of a memory that was read just now there is none, and its files are still being written.
        if not memory.read_tokens:
            memory.folder = keeper.saved_path()
        known = recall_neutral(memory.folder, reader, memory)
        yield keeper
        if not known:
            keep_neutral(keeper.saved_path(), reader, memory)
        if memory.meanings is not None:
            keep_meanings(keeper.saved_path(), memory.meanings)


def _read(reader: Reader, memory: Memory, keeper: Keeper, console: Console) -> None:
    if memory.complete:
        return
    console.begin_reading(memory.document.name, memory)
    try:
        for event in reader.read_steps(memory):
            keeper.chunk_read()
            console.chunk_read(event)
            collector.wake()  # not before something is to be seen: it looks at everything first
        keeper.finish()
    except KeyboardInterrupt:
        console.close()
        kept = keeper.stop()
        rest = f"{kept:,} of them are kept: ask again to go on." if kept else "nothing is kept."
        console.note(
            f"interrupted after {memory.reused_tokens + memory.read_tokens:,} of "
            f"{len(memory.tokens):,} tokens; {rest}"
        )
        raise Interrupted from None
    console.end_reading(memory)


def _remember_speed(reader: Reader, memory: Memory, cache_dir: Path) -> None:
    loaded = reader.loaded
    speeds.remember(
        cache_dir,
        loaded.name,
        str(loaded.device),
        str(loaded.dtype).removeprefix("torch."),
        memory.read_tokens,
        memory.read_seconds,
    )
