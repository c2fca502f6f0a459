"""Memories of several texts as one, without reading anything again.

Keys are stored un-rotated, so a block may stand behind any other. What must hold is that blocks
begin at whole blocks behind the sinks. So the segments are taken over as they are; what lies
between two memories (the window of the first, the sinks of the second) is put into blocks of its
own; and where it does not fill them, the first memory's last tokens stand there once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.memory.layer import HOST, Layer
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory

Pair = tuple[Tensor, Tensor]  # un-rotated keys and values [H_kv, n, d]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a memory's positions lie in the joined one.

    Attributes:
        offset: from its own positions to the joined ones.
        first: its first own position that is taken over.
        repeated: tokens of the memory before it that stand once more in front of it.
    """

    offset: int
    first: int
    repeated: int


def lay_out(memories: Sequence[ModelMemory], prefix: int) -> list[Place]:
    """Place memories one behind the other.

    Args:
        prefix: tokens at the beginning that are the same in all of them, and are needed once.
    """
    config = memories[0].config
    places = [Place(0, 0, 0)]
    end = memories[0].tokens
    for memory in memories[1:]:
        first = min(prefix, memory.tokens)
        repeated = 0
        if memory.blocks:
            first = min(first, config.sink_tokens)  # blocks are taken whole
            repeated = (first - end) % config.block_tokens
        places.append(Place(end + repeated - first, first, repeated))
        end = places[-1].offset + memory.tokens
    return places


@torch.inference_mode()
def join(
    memories: Sequence[ModelMemory], places: Sequence[Place], *, trained_length: int
) -> ModelMemory:
    """A memory of all of them, placed by `lay_out`; it shares their segments.

    All have the same geometry and the same sizes; their codecs may differ.
    """
    config = memories[0].config
    geometries = [layer.geometry for layer in memories[0].layers]
    options = memories[0].device_path.options
    joined = ModelMemory(geometries, config, trained_length=trained_length, device=options)
    for index, target in enumerate(joined.layers):
        layers = [memory.layers[index] for memory in memories]
        if isinstance(target, LayerMemory):
            _join_tiers(target, layers, places)
        else:
            _take_window(target, layers[-1], places[-1].offset)
    joined.tokens = places[-1].offset + memories[-1].tokens
    return joined


def _join_tiers(target: LayerMemory, layers: Sequence[Layer], places: Sequence[Place]) -> None:
    config = target.config
    loose = _Loose(target)
    before: LayerMemory | None = None
    for layer, place in zip(layers, places, strict=True):
        assert isinstance(layer, LayerMemory)
        if place.repeated:
            assert before is not None
            loose.add(_repeat_last(before, place.repeated))
        begin, end = place.first, layer.window.end
        if layer.arena.count:
            if begin < config.sink_tokens:
                loose.add(layer.stretch(begin, config.sink_tokens))
            loose.seal_all()
            _take_segments(target, layer)
            begin = layer.window.start
        if begin < end:
            loose.add(layer.stretch(begin, end))
        before = layer
    keys, values = loose.rest(config.window_tokens)
    g, start = target.geometry, places[-1].offset + layers[-1].window.end - keys.shape[1]
    keys, values = keys.to(g.device), values.to(g.device)
    window = target.window
    # Nobody chooses representatives by what followed a token in another text.
    window.query_sums = window.mass = None
    rotated = g.rotary.rotate(keys, g.rotary.table(start, keys.shape[1]))
    window.put(start, {"raw": keys, "rotated": rotated, "values": values})


class _Loose:
    """Tokens that no segment holds, on their way into sinks, blocks or window of `target`."""

    def __init__(self, target: LayerMemory) -> None:
        self.target = target
        self.pairs: list[Pair] = []

    def add(self, pair: Pair) -> None:
        self.pairs.append((pair[0].to(HOST), pair[1].to(HOST)))

    def _all(self) -> Pair:
        keys, values = (torch.cat(tensors, dim=1) for tensors in zip(*self.pairs, strict=True))
        return keys, values

    def seal_all(self) -> None:
        """Put all of it into sinks and blocks; it fills them."""
        if self.pairs:
            left = self._seal(*self._all(), 0)
            assert left[0].shape[1] == 0, "memories begin at whole blocks"
        self.pairs = []

    def rest(self, most: int) -> Pair:
        """Put all but the last `most` tokens and a rest of a block into blocks; what is left."""
        keys, values = self._all()
        waiting = keys.shape[1] - most - (self.target.config.sink_tokens if self._first else 0)
        return (keys, values) if waiting < 0 else self._seal(keys, values, most)

    @property
    def _first(self) -> bool:
        return self.target.sinks is None

    def _seal(self, keys: Tensor, values: Tensor, most: int) -> Pair:
        target, size = self.target, self.target.config.block_tokens
        device = target.geometry.device
        if self._first:
            sinks = target.config.sink_tokens
            assert keys.shape[1] >= sinks
            target.sinks = (
                keys[:, :sinks].to(device, copy=True),
                values[:, :sinks].to(device, copy=True),
            )
            keys, values = keys[:, sinks:], values[:, sinks:]
        tokens = (keys.shape[1] - most) // size * size
        if tokens > 0:
            sealed = keys[:, :tokens].to(device)
            lengths = sealed.float().square().sum(dim=-1)  # as `LayerMemory` chooses without sums
            target.representatives.append(sealed, lengths, size)
            arena = target.arena
            # As the model made them: the files that are joined are packed already.
            arena.temporary = True
            arena.append(keys[:, :tokens], values[:, :tokens])
            arena.freeze()
            arena.temporary = False
            keys, values = keys[:, tokens:], values[:, tokens:]
        return keys, values


def _take_segments(target: LayerMemory, layer: LayerMemory) -> None:
    for segment in _parts(layer):
        target.arena.place(len(target.arena.segments), segment)
    kept = layer.representatives.held(0)
    target.representatives.put(kept)


def _parts(layer: LayerMemory) -> Iterator:
    assert layer.arena.tail is None, "a document that has been read has no tail"
    return layer.arena.parts()


def _repeat_last(layer: LayerMemory, count: int) -> Pair:
    """The layer's last `count` tokens, from the beginning again where there are not so many."""
    end = layer.window.end
    held = layer.stretch(max(0, end - count), end)
    while held[0].shape[1] < count:
        held = tuple(torch.cat([tensor, tensor], dim=1) for tensor in held)
    return held[0][:, -count:], held[1][:, -count:]


def _take_window(target: Layer, layer: Layer, offset: int) -> None:
    """A sliding layer sees the last memory only; its keys are turned on to where they stand now."""
    rotary = target.geometry.rotary
    held = layer.window.held()
    held["rotated"] = rotary.rotate(held["rotated"], rotary.table(offset, 1))
    target.window.put(layer.window.start + offset, held)
