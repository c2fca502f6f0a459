"""What `--json` prints, and what is told of memory used."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from infllm_cli.document import Document
from infllm_cli.events import Answer
from infllm_cli.evidence import Passage
from infllm_cli.keeping import Keeper
from infllm_cli.kernels.dispatch import replaced
from infllm_cli.reader import Memory, Reader
from infllm_cli.wording import duration, size

JSON_SCHEMA = 1


def dtype_name(dtype: torch.dtype) -> str:
    """As in "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def json_line(value: object, out: TextIO) -> str:
    """JSON as a line that `out` can encode."""
    readable = (out.encoding or "").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=not readable) + "\n"


def peak_bytes(reader: Reader, memory: Memory) -> int:
    """The most that was held on the model's device.

    On a GPU everything that was allocated there, weights included; on a processor, where device
    and host are one, the tiers that would be on the device.
    """
    if reader.loaded.device.type == "cuda":
        devices = {layer.device for layer in reader.loaded.layers} | {reader.loaded.device}
        return sum(torch.cuda.max_memory_allocated(device) for device in devices)
    return memory.device_bytes_peak


def peak_process_bytes() -> int:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def passage_as_json(passage: Passage, document: Document) -> dict[str, Any]:
    """A passage with its place."""
    return {
        "file": passage.file or document.name,
        "lines": list(passage.lines),
        "text": passage.text,
        "score": round(passage.score, 6),
    }


def answer_as_json(answer: Answer, document: Document, most: int) -> dict[str, Any]:
    """An answer with at most so many passages of evidence."""
    return {
        "question": answer.question,
        "answer": answer.text,
        "quote": None if answer.quote is None else passage_as_json(answer.quote, document),
        "supported": answer.supported,
        "finish": answer.finish,
        "tokens": answer.tokens,
        "seconds": round(answer.seconds, 3),
        "quote_seconds": None if answer.quote_seconds is None else round(answer.quote_seconds, 3),
        "first_token_seconds": round(answer.first_token_seconds, 3),
        "evidence": [passage_as_json(passage, document) for passage in answer.evidence[:most]],
        "reread": [passage_as_json(passage, document) for passage in answer.reread],
    }


def as_json(
    reader: Reader,
    memory: Memory,
    keeper: Keeper | None,
    answers: list[Answer],
    evidence: int,
    written: Path | None = None,
) -> dict[str, Any]:
    """The object that `--json` prints."""
    document, loaded = memory.document, reader.loaded
    saved = keeper.saved_path() if keeper is not None else None
    most = evidence or 5
    return {
        "schema": JSON_SCHEMA,
        "document": {
            "name": document.name,
            "bytes": document.size_bytes,
            "encoding": document.encoding,
            "lines": document.lines,
            "tokens": len(memory.tokens),
            "sha256": document.sha256,
            "files": [
                {
                    "name": file.name,
                    "bytes": file.size_bytes,
                    "encoding": file.encoding,
                    "lines": file.lines,
                    "sha256": file.sha256,
                }
                for file in document.parts or [document]
            ],
        },
        "read": {
            "tokens": memory.read_tokens,
            "reused_tokens": memory.reused_tokens,
            "truncated": memory.state.dropped > 0,
            "seconds": round(memory.read_seconds, 3),
            "tokens_per_second": round(memory.read_tokens / max(memory.read_seconds, 1e-9), 1),
        },
        "answers": [answer_as_json(answer, document, most) for answer in answers],
        "memory": {
            "whole": memory.whole,
            "blocks": memory.state.blocks,
            "dropped_blocks": memory.state.dropped,
            "host_bytes": memory.state.host_bytes,
            "disk_bytes": memory.state.mapped_bytes,
            "moved_to_disk": keeper is not None and keeper.moved,
            "stored_denser": memory.is_denser(reader),
            "saved": None if saved is None else {"key": saved.name, "path": str(saved)},
            "file": None if written is None else str(written),
            "device_bytes_peak": peak_bytes(reader, memory),
            "config": memory.state.config.as_dict(),
            "gates": reader.gates.as_dict(),
            "device_cache": memory.state.device_cache,
            "replaced_kernels": replaced(loaded.device.type),
        },
        "model": {
            "name": loaded.name,
            "architecture": loaded.architecture,
            "dtype": dtype_name(loaded.dtype),
            "device": str(loaded.device),
            "trained_length": loaded.trained_length,
        },
    }


def report_facts(
    reader: Reader, memory: Memory, answers: list[Answer], peak: int
) -> list[tuple[str, str]]:
    """What a report tells when all is done, as name and value."""
    state, loaded = memory.state, reader.loaded
    speed = memory.read_tokens / max(memory.read_seconds, 1e-9)
    dtype = dtype_name(loaded.dtype)
    facts = [("model", f"{loaded.name}, {dtype} on {loaded.device}")]
    total = f"{len(memory.tokens):,} tokens"
    if memory.read_tokens:
        read = f"{memory.read_tokens:,} of {total} in {duration(memory.read_seconds)}"
        facts.append(("read", f"{read}, {speed:.0f}/s"))
    if memory.reused_tokens:
        facts.append(("from a saved memory", f"{memory.reused_tokens:,} of {total}"))
    if memory.whole:
        facts.append(("memory", "attended whole, no blocks"))
    elif not state.config.policy.has_blocks:
        facts.append(("memory", f"as {state.config.policy.value} keeps it"))
    else:
        facts.append(
            (
                "memory",
                f"{state.blocks} blocks of {state.config.block_tokens} per layer, "
                f"{state.config.codec.value}",
            )
        )
    if cached := state.device_cache:
        found = f"{cached['hits']:,} of {cached['hits'] + cached['misses']:,} blocks were there"
        facts.append(("device cache", found))
        if "bytes_to_device" in cached:
            to, back = size(cached["bytes_to_device"]), size(cached["bytes_to_host"])
            ahead = f"{cached['prefetched']:,} blocks ahead of their step"
            facts.append(("moved", f"{to} to the device, {ahead}; {back} to the host"))
        if cached.get("keys_scanned_on"):
            facts.append(("keys scanned", f"on: {cached['keys_scanned_on']}"))
    for name, reason in replaced(loaded.device.type).items():
        facts.append(("kernel replaced", f"{name}: {reason}"))
    if state.dropped:
        facts.append(("dropped", f"{state.dropped:,} of these blocks"))
    facts.append(("host", size(state.host_bytes)))
    if state.mapped_bytes:
        facts.append(("disk", size(state.mapped_bytes)))
    facts.append(("device", f"{size(peak)} at most"))
    facts.append(("process", f"{size(peak_process_bytes())} at most"))
    tokens = sum(answer.tokens for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    if answers:
        facts.append(("answered", f"{tokens} tokens in {duration(seconds)}"))
    return facts
