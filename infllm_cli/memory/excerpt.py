"""A stretch of a memory as a context of its own: the sinks, the stretch, and what is added then.

Lookup restricted to the blocks of one part of a document: since all of them fit, every one is
attended, and nothing is looked up. The stored keys and values are used as they are; no token of
the stretch passes through the model again.
"""

from __future__ import annotations

from collections.abc import Sequence

from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.model_memory import ModelMemory


def excerpt(
    memory: ModelMemory,
    layers: Sequence[LayerGeometry],
    first: int,
    last: int,
    *,
    trained_length: int,
    reserve_tokens: int,
) -> ModelMemory:
    """A memory of the sinks and the positions [first, last) of another one, at consecutive places.

    Token i of the stretch stands at `sinks + i` of the result (at its own place, where the stretch
    begins within the sinks). What follows sees all of it.

    Args:
        memory: every layer keeps blocks (see `likelihood.can_judge`).
        layers: geometry with rotations for `trained_length` tokens.
        reserve_tokens: what will be added.
    """
    assert len(memory.tiered) == len(memory.layers), "a sliding layer forgets its stretch"
    sinks = min(memory.config.sink_tokens, first)
    held = sinks + last - first
    assert held + reserve_tokens <= trained_length, "a part fits what the model was trained on"
    twin = ModelMemory(
        layers,
        memory.config,
        trained_length=trained_length,
        whole_tokens=trained_length,
        device=memory.device_path.options,
    )
    twin.reserve(held + reserve_tokens)
    tables: dict[int, object] = {}
    for source, target in zip(memory.tiered, twin.tiered, strict=True):
        g, window = target.geometry, target.window
        window.make_room(held, reserve_tokens)
        done = 0
        for begin, end in ((0, sinks), (first, last)):
            if begin == end:
                continue
            keys, values = source.stretch(begin, end)
            keys, values = keys.to(g.device), values.to(g.device)
            key = (id(g.rotary), done, end - begin)
            if key not in tables:
                tables[key] = g.rotary.table(done, end - begin)
            window.push(keys, g.rotary.rotate(keys, tables[key]), values, None)
            done += end - begin
    twin.tokens = held
    return twin
