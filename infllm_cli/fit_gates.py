"""`infllm fit-gates`: documents, a frozen model, a file of gates; how the parts work together."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch

from infllm_cli.document import Document
from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.fitting import FitOptions, Fitted, Fitting
from infllm_cli.gates import gates_path, save_gates
from infllm_cli.memory.knobs import InfiniGates, InfiniUpdate, Policy
from infllm_cli.reader import Reader
from infllm_cli.told import JSON_SCHEMA, json_line

if TYPE_CHECKING:
    from infllm_cli.commands.groups import ModelFlags
    from infllm_cli.console import Console

STATES = {"off": "memory off", "half": "gates at 0.5", "fitted": "gates fitted"}


@dataclass(frozen=True)
class FitRequest:
    """What the user asked for."""

    documents: list[Document]
    model: ModelFlags
    segment_tokens: int | None = None
    update: InfiniUpdate | None = None
    options: FitOptions = field(default_factory=FitOptions)
    as_json: bool = False


def run_fit_gates(request: FitRequest, console: Console, out: TextIO) -> None:
    """Fit, write the file, and tell the losses.

    Raises:
        InfllmError: see the modules.
    """
    console.stage("loading the model")
    cache_dir = request.model.cache
    reader = Reader.load(
        request.model.model,
        device=request.model.device,
        dtype=request.model.dtype.value,
        cache_dir=cache_dir,
        progress=console.fetching,
        policy=Policy.INFINI,
        infini_segment_tokens=request.segment_tokens,
        infini_update=request.update,
        infini_gates=InfiniGates.OFF,
    )
    path = gates_path(reader.loaded, cache_dir)
    if path is None:
        raise ModelError(f"{reader.loaded.name} lies in no folder, so its gates cannot be kept.")
    console.stage("tokenizing")
    encode = reader.prompt.tokenizer.encode
    texts = [np.concatenate([reader.prompt.prefix, encode(d.text).ids]) for d in request.documents]
    segment = reader.config.infini_segment_tokens
    fitting = Fitting(
        reader.model, reader.loaded.layers_for(segment), reader.config, texts, request.options
    )
    fitted = None
    for event in fitting.steps():
        if isinstance(event, Fitted):
            fitted = event
        else:
            console.fetching(event.stage, event.done, event.total)
    assert fitted is not None
    facts = _facts(request, reader, fitted)
    try:
        save_gates(path, fitted.beta, facts)
    except OSError as error:
        raise CapacityError(f"{path}: {error.strerror or error}; the gates are lost.") from None
    console.close()
    if request.as_json:
        told = {"schema": JSON_SCHEMA, "file": str(path), **facts}
        told["gates"] = torch.sigmoid(fitted.beta).tolist()
        out.write(json_line(told, out))
    else:
        out.write("".join(f"{line}\n" for line in _lines(fitted)))
        console.note(f"written to {path}; --policy infini uses it.")
    if fitted.losses["fitted"] > fitted.losses["off"]:
        console.note(
            "the fitted gates are worse than no memory on what they were not fitted on: give more "
            "text, or use --infini-gates off."
        )
    out.flush()


def _facts(request: FitRequest, reader: Reader, fitted: Fitted) -> dict[str, Any]:
    return {
        "model": reader.loaded.name,
        "documents": ", ".join(document.name for document in request.documents),
        "segment": reader.config.infini_segment_tokens,
        "update": reader.config.infini_update.value,
        "segments_trained": fitted.segments[0],
        "segments_held_out": fitted.segments[1],
        "loss": {name: round(loss, 6) for name, loss in fitted.losses.items()},
        "loss_trained": {name: round(loss, 6) for name, loss in fitted.trained.items()},
        "epochs": request.options.epochs,
        "learning_rate": request.options.learning_rate,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"),
    }


def _lines(fitted: Fitted) -> list[str]:
    """A table: loss by state of the gates."""
    trained, held_out = fitted.segments
    lines = [f"{'nats per token':<16}{'held out':>10}{'fitted on':>11}"]
    for name, meaning in STATES.items():
        lines.append(f"{meaning:<16}{fitted.losses[name]:>10.4f}{fitted.trained[name]:>11.4f}")
    gates = torch.sigmoid(fitted.beta)
    lines.append(
        f"{'segments':<16}{held_out:>10}{trained:>11}    gates {float(gates.min()):.3f} to "
        f"{float(gates.max()):.3f}, {float(gates.mean()):.3f} on average"
    )
    return lines
