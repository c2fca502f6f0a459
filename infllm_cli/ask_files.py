"""`infllm ask book.infllm`: questions to memories that lie in files."""

from __future__ import annotations

import enum
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TextIO

from infllm_cli.ask import AskRequest, ask_all, check_request
from infllm_cli.early_check import CHECKERS
from infllm_cli.errors import UsageError
from infllm_cli.identity import ASKING
from infllm_cli.joining import join_memories
from infllm_cli.memory.config import FLAGS, KNOB_FLAGS, MemoryConfig
from infllm_cli.memory_file import MemoryFile
from infllm_cli.models import lean_import
from infllm_cli.models.loading import import_library
from infllm_cli.reader import Memory, Reader
from infllm_cli.reading import tell_plain_form
from infllm_cli.tensor_files import check_sealed

if TYPE_CHECKING:
    from infllm_cli.console import Console

# Sizes that memories must share to be asked together.
SHARED = ("sink_tokens", "window_tokens", "block_tokens", "chunk_tokens")


def run_ask_files(request: AskRequest, console: Console, out: TextIO) -> None:
    """Load the memories, join them if they are several, ask.

    Raises:
        InfllmError: see the modules.
        UsageError: sizes were given that only a reading can have, or the memories' differ.
    """
    check_request(request)
    limits = request.limits.parsed()
    console.stage("checking the memory")
    with ThreadPoolExecutor(CHECKERS) as threads:
        checks = [threads.submit(check_sealed, path) for path in request.memory_files]
        lean_import.want()
        import_library()  # meanwhile
        pairs = zip(request.memory_files, checks, strict=True)
        files = [MemoryFile(path, check) for path, check in pairs]
    configs = [_config(file, request) for file in files]
    _refuse_different(files)
    wanted = request.sizes.as_dict()["codec"]
    for file in files:
        # The default is nobody's wish.
        if wanted not in (MemoryConfig().codec, file.config.codec):
            console.note(
                f"{file.path} is stored as {file.config.codec.value}; --store does not change it."
            )
    dtype = request.model.dtype.value
    console.stage("loading the model")
    reader = Reader.load(
        request.model.model or files[0].model,
        device=request.model.device,
        dtype=files[0].dtype if dtype == "auto" else dtype,
        cache_dir=request.model.cache,
        progress=console.fetching,
        device_limit_bytes=limits.device,
        **{field.name: getattr(configs[0], field.name) for field in fields(configs[0])},
    )
    tell_plain_form(reader, console)
    release = sum(file.size for file in files) > limits.host
    reserve = reader.reserve_for(request.questions, request.options)
    memories: list[Memory] = []
    for file, config in zip(files, configs, strict=True):
        # Each with its own codec.
        of_file = Reader(reader.loaded, config)
        memory = file.load(
            of_file, request.model.cache, console.fetching, reserve=reserve, release=release
        )
        console.note(
            f"all {len(memory.tokens):,} tokens come from {file.path}; none is read again."
        )
        memories.append(memory)
    memory = memories[0]
    if len(memories) > 1:
        memory = join_memories(memories, reader.loaded.trained_length)
    ask_all(request, reader, memory, None, console, out)


def _config(file: MemoryFile, request: AskRequest) -> MemoryConfig:
    """The sizes of a memory, with what the user wants for answers.

    Raises:
        UsageError: another size was given, and it is another one than the memory's.
    """
    config = replace(file.config, scan_every=request.sizes.scan_every)
    for name, value in request.sizes.sizes().items():
        if value is None:
            continue
        if name in ASKING:
            config = replace(config, **{name: value})
        elif value != getattr(config, name):
            flag = {**FLAGS, **KNOB_FLAGS}[name]
            raise UsageError(
                f"{flag} is {_plain(value)}, but {file.path} was read with "
                f"{_plain(getattr(config, name))}; leave it out."
            )
    return config


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _refuse_different(files: list[MemoryFile]) -> None:
    first = files[0]
    for file in files[1:]:
        for name in SHARED:
            here, there = getattr(file.config, name), getattr(first.config, name)
            if here != there:
                raise UsageError(
                    f"{file.path} was read with {FLAGS[name]} {here}, {first.path} with {there}: "
                    "they cannot be asked together."
                )
