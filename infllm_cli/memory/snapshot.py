"""A memory as named tensors, and back: what a file of it holds.

Two kinds: a *segment* holds the same run of blocks of every layer and never changes; the *state*
holds the rest at the end of some chunk (window, sinks, blocks that fill no segment yet). All
segments and one state make the memory again, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from infllm_cli.kernels.store_codec import Packed
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.segment import Segment
from infllm_cli.memory.window import Window

Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class State:
    """What a memory holds besides its full segments.

    Attributes:
        tokens: of the context, prompt included.
        segments: how many full segments belong to it.
        starts: absolute position of the window's first token, per layer.
        tensors: by name, on the host; blocks of the tail are not copied unless their memory will be
            used again.
    """

    tokens: int
    segments: int
    starts: list[int]
    tensors: Tensors


def segments_of(memory: ModelMemory) -> int:
    """Segments that every layer has."""
    return min((len(layer.arena.segments) for layer in memory.tiered), default=0)


def segment_tensors(memory: ModelMemory, index: int) -> Tensors:
    """Segment `index` of every layer, with the representatives of its blocks; not copied."""
    found: Tensors = {}
    start = index * memory.config.segment_blocks
    for number, layer in _tiered(memory):
        segment = layer.arena.segments[index]
        kept = layer.representatives
        blocks = slice(start, start + segment.blocks)
        found |= {
            f"{number}.{name}.{part}": tensor
            for name, packed in (("keys", segment.keys), ("values", segment.values))
            for part, tensor in packed.tensors().items()
        }
        found |= {f"{number}.{name}": getattr(kept, name)[:, blocks] for name in kept.names}
    return found


def place_segment(
    memory: ModelMemory,
    index: int,
    tensors: Tensors,
    release: Callable[[str], Callable[[], None]] | None,
) -> None:
    """Put a segment that was mapped from a file in place of segment `index`, or behind the last.

    Args:
        release: for a layer's part of the file (by the prefix of its names), what gives back the
            pages that reading it has brought in; None where they may stay.
    """
    for number, layer in _tiered(memory):
        prefix = f"{number}."
        g, kind = layer.geometry, layer.config.codec.value
        segment = Segment(
            Packed(kind, g.head_dim, **_part(tensors, f"{prefix}keys.")),
            Packed(kind, g.value_dim, **_part(tensors, f"{prefix}values.")),
            mapped=True,
            release=release(prefix) if release is not None else None,
        )
        if index == len(layer.arena.segments):
            layer.representatives.put(_part(tensors, prefix))
        layer.arena.place(index, segment)


def state_of(memory: ModelMemory) -> State:
    """The state at the end of a chunk. Reading on does not change what this returns."""
    tensors: Tensors = {}
    starts = []
    for number, layer in enumerate(memory.layers):
        window: Window = layer.window
        starts.append(window.start)
        prefix = f"{number}."
        tensors |= {f"{prefix}window.{name}": t.cpu() for name, t in window.held().items()}
        if not isinstance(layer, LayerMemory):
            continue
        if layer.sinks is not None:
            tensors |= {
                f"{prefix}sinks.{name}": t.cpu()
                for name, t in zip(("keys", "values"), layer.sinks, strict=True)
            }
        tail = layer.arena.tail
        if tail is not None:
            for name, codes in (("keys", tail.keys.codes), ("values", tail.values.codes)):
                copied = codes.clone() if layer.arena.reuses_tail else codes
                tensors[f"{prefix}tail.{name}"] = copied
            kept = layer.representatives.held(layer.arena.sealed)
            tensors |= {f"{prefix}tail.{name}": t.cpu() for name, t in kept.items()}
    return State(memory.tokens, segments_of(memory), starts, tensors)


def restore_state(memory: ModelMemory, state: State) -> None:
    """Bring an empty memory, all of whose segments are in place, to `state`."""
    assert memory.tokens == 0 and segments_of(memory) == state.segments
    for number, layer in enumerate(memory.layers):
        prefix = f"{number}."
        layer.window.put(state.starts[number], _part(state.tensors, f"{prefix}window."))
        if not isinstance(layer, LayerMemory):
            continue
        sinks = _part(state.tensors, f"{prefix}sinks.")
        if sinks:
            device = layer.geometry.device
            layer.sinks = tuple(sinks[name].to(device, copy=True) for name in ("keys", "values"))
        tail = _part(state.tensors, f"{prefix}tail.")
        if tail:
            layer.arena.append(tail["keys"].flatten(1, 2), tail["values"].flatten(1, 2))
            layer.representatives.put(tail)
    memory.tokens = state.tokens


def _tiered(memory: ModelMemory) -> list[tuple[int, LayerMemory]]:
    return [(n, x) for n, x in enumerate(memory.layers) if isinstance(x, LayerMemory)]


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
