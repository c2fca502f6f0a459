"""A memory as one file that can be moved: `infllm read FILE -o book.infllm`.

An ordinary safetensors file: the segments and the state as a saved memory has them, the document's
text and tokens, and what the model must be. Its last tensor is the CRC-32 of all bytes before it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infllm_cli import identity, machine
from infllm_cli.checksums import BrokenFile
from infllm_cli.document import Document, Part, find_lines
from infllm_cli.errors import CapacityError, DocumentError, ModelError, UsageError
from infllm_cli.file_kinds import is_memory_file
from infllm_cli.keeping import needed, saved_size
from infllm_cli.memory import snapshot
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.snapshot import State, Tensors
from infllm_cli.shelf import FORMAT
from infllm_cli.tensor_files import MappedFile, check_sealed, write_tensors
from infllm_cli.tokens import Tokens
from infllm_cli.wording import size

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

Report = Callable[[str, int, int], None]

STATE, TEXT, IDS, SPANS = "state/", "document/text", "document/ids", "document/spans"
_DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "f16", "torch.float32": "f32"}


def check_target(path: Path) -> None:
    """Refuse before reading what could not be written, or must not be overwritten.

    Raises:
        UsageError: it is something else than a memory, or its folder is not there.
    """
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.absolute().parent}.")
    if path.exists() and not (path.is_file() and is_memory_file(path)):
        raise UsageError(f"--output {path} is there and is no memory; choose another name.")


def check_room(path: Path, reader: Reader, memory: Memory) -> None:
    """Refuse before reading what the disk would not hold.

    Raises:
        CapacityError: it has not room enough.
    """
    wanted = saved_size(needed(reader, memory), memory)
    free = machine.free_disk(path.absolute().parent)
    if wanted > free:
        raise CapacityError(
            f"--output {path}: the memory takes up to {size(wanted)}, and its disk has room for "
            f"{size(free)}."
        )


def write(path: Path, reader: Reader, memory: Memory, cache_dir: Path, report: Report) -> int:
    """Write a memory that has been read; its bytes.

    Raises:
        OSError: nothing of it is left.
        CapacityError: blocks of it were dropped.
    """
    assert memory.complete
    if memory.state.dropped:
        raise CapacityError(f"{path} is not written: {memory.state.dropped:,} blocks are missing.")
    state, tensors = memory.state, _document_tensors(memory)
    for index in range(snapshot.segments_of(state)):
        prefix = _segment(index)
        found = snapshot.segment_tensors(state, index)
        tensors |= {f"{prefix}{name}": tensor for name, tensor in found.items()}
    rest = snapshot.state_of(state)
    tensors |= {f"{STATE}{name}": tensor for name, tensor in rest.tensors.items()}
    facts = {
        "format": FORMAT,
        "document": _document_facts(memory.document),
        "whole": memory.whole,
        "model": reader.loaded.name,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
        "state": {"tokens": rest.tokens, "segments": rest.segments, "starts": rest.starts},
        "config": state.config.as_dict(),
        "identity": _identity(reader, memory, cache_dir, report),
    }
    record = write_tensors(
        path, tensors, {"infllm": json.dumps(facts)}, sealed=True, done=partial(_written, memory)
    )
    return record.size


def _written(memory: Memory, name: str) -> None:
    """Give back what writing a mapped segment has brought into this process."""
    where, _, rest = name.partition("/")
    if not where.startswith("segment-") or not rest.endswith(".chosen"):
        return
    layer = memory.state.layers[int(rest.split(".")[0])]
    release = layer.arena.segments[int(where.removeprefix("segment-"))].release
    if release is not None:
        release()


def _segment(index: int) -> str:
    return f"segment-{index:05d}/"


def _document_tensors(memory: Memory) -> Tensors:
    text = np.frombuffer(memory.document.text.encode(), np.uint8)
    arrays = {
        TEXT: text,
        IDS: memory.tokens.ids.astype(np.int32),
        SPANS: memory.tokens.spans.astype(np.int64),
    }
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


def _document_facts(document: Document) -> dict[str, Any]:
    return {
        "name": document.name,
        "encoding": document.encoding,
        "size_bytes": document.size_bytes,
        "sha256": document.sha256,
        "parts": [asdict(part) for part in document.parts],
    }


def _identity(reader: Reader, memory: Memory, cache_dir: Path, report: Report) -> dict[str, Any]:
    """What must be the same for the memory to mean anything."""
    return {
        "weights": identity.weights_of(reader.loaded, cache_dir, report),
        "prefix": identity.prefix_of(reader),
        "layers": identity.layers_of(memory),
        "configuration": identity.config_of(reader.loaded),
    }


def _different(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """What differs between two results of `_identity`, as far as both know it.

    Another version of transformers knows other settings; those count that both have.
    """
    here = json.loads(json.dumps(here))
    a, b = here.pop("configuration"), there["configuration"]
    found = [name for name in here if here[name] != there[name]]
    if any(a[name] != b[name] for name in a.keys() & b.keys()):
        found.append("configuration")
    return found


class MemoryFile:
    """A memory in a file, checked and ready to be loaded.

    Args:
        check: of its checksum, where that is compared in a thread; see `check_sealed`.

    Raises:
        DocumentError: it is no memory, of another format, or not what was written.
    """

    def __init__(self, path: Path, check: Future[None] | None = None) -> None:
        self.path = path
        try:
            if not is_memory_file(path):
                raise BrokenFile(f"{path}: it does not begin as a memory does")
            check_sealed(path) if check is None else check.result()
            self._file = MappedFile(path)
            self.facts: dict[str, Any] = json.loads(self._file.facts["infllm"])
        except (BrokenFile, KeyError, ValueError) as error:
            raise DocumentError(
                f"{path} is no memory, or it is damaged ({error}); make it again with "
                f"`infllm read FILE -o {path}`."
            ) from None
        if self.facts["format"] != FORMAT:
            raise DocumentError(
                f"{path} is a memory of format {self.facts['format']}, and this infllm reads "
                f"format {FORMAT}; make it again with `infllm read FILE -o {path}`."
            )

    @property
    def model(self) -> str:
        """The model's name where the memory was made."""
        return self.facts["model"]

    @property
    def dtype(self) -> str:
        """As `--dtype` names it."""
        return _DTYPES[self.facts["identity"]["layers"][0]["dtype"]]

    @property
    def config(self) -> MemoryConfig:
        """The sizes it was read with."""
        return MemoryConfig.from_dict(self.facts["config"])

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def document(self) -> Document:
        """The document that was read."""
        facts = dict(self.facts["document"])
        text = self._file.tensors[TEXT].numpy().tobytes().decode()
        parts = tuple(Part(**part) for part in facts.pop("parts"))
        lines = find_lines(text, facts["name"], facts["encoding"])
        return Document(text=text, line_starts=lines, parts=parts, **facts)

    def tokens(self) -> Tokens:
        """Its tokens."""
        ids, spans = (self._file.tensors[name].numpy().copy() for name in (IDS, SPANS))
        return Tokens(ids, spans)

    def load(
        self, reader: Reader, cache_dir: Path, report: Report, *, reserve: int, release: bool
    ) -> Memory:
        """The memory, as it was after reading; its blocks are mapped in.

        Args:
            reserve: tokens that a question and its answer take.
            release: keep the pages of the blocks out of this process but while they are read.

        Raises:
            ModelError: the reader's model is another one.
        """
        memory = reader.empty(
            self.document(), self.tokens(), whole=self.facts["whole"], reserve_tokens=reserve
        )
        here = _identity(reader, memory, cache_dir, report)
        different = _different(here, self.facts["identity"])
        if different:
            raise ModelError(
                f"{self.path} was made by {self.model} in {self.dtype}, and {reader.loaded.name} "
                f"differs in its {' and '.join(different)}. Give the same --model and --dtype."
            )
        numbers = self.facts["state"]
        for index in range(numbers["segments"]):
            prefix = _segment(index)
            give_back = partial(self._release, prefix) if release else None
            snapshot.place_segment(memory.state, index, self._part(prefix), give_back)
        snapshot.restore_state(memory.state, State(**numbers, tensors=self._part(STATE)))
        memory.reused_tokens = len(memory.tokens)
        return memory

    def _part(self, prefix: str) -> Tensors:
        tensors = self._file.tensors
        return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

    def _release(self, prefix: str, layer: str) -> Callable[[], None]:
        return self._file.release(f"{prefix}{layer}")
