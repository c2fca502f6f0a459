"""A memory whose blocks are stored by a codec: the same everywhere, and no question leaves a trace.

The codecs themselves are tested in `test_store_codec`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_saved import CONFIG, ROOMY, TEXT, begin, reading
from tiny_readers import make_reader, memory_contents, read_text, same_contents
from tiny_tokenizers import prose

from infllm_cli.limits import Limits
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.sampling import Answering, AnswerOptions

PACKING = [codec for codec in Codec if codec is not Codec.FULL]
OPTIONS = AnswerOptions(max_tokens=4, answering=Answering.BOTH)


def reader_of(codec: Codec, dtype: torch.dtype = torch.float32, kind: str = "llama"):
    return make_reader(dtype, kind=kind, config=replace(CONFIG, codec=codec))


def tokens(blocks: int, start: int = 0) -> torch.Tensor:
    """Keys [2, blocks * 8, 6]."""
    generator = torch.Generator().manual_seed(start)
    return torch.randn(2, blocks * 8, 6, generator=generator)


@pytest.mark.parametrize("codec", PACKING)
def test_blocks_and_stretches_come_out_alike_from_segments_and_tail(codec):
    arena = BlockArena(2, 8, 6, 6, torch.float32, segment_blocks=4, codec=codec)
    keys = tokens(11)
    arena.append(keys, -keys)
    assert [part.blocks for part in arena.parts()] == [4, 4, 3]
    assert [part.keys.kind for part in arena.parts()] == [codec.value, codec.value, "full"]
    all_keys, all_values = arena.stretch(0, 88)
    assert torch.equal(all_keys[:, 64:], keys[:, 64:])
    assert 0 < (all_keys - keys).abs().max() < 0.8
    chosen = torch.tensor([[0, 9, 3], [10, 4, 7]])
    for found, everything in zip(arena.gather(chosen), (all_keys, all_values), strict=True):
        blocks = everything.unflatten(1, (11, 8))
        for head, row in enumerate(chosen):
            assert torch.equal(found[head].unflatten(0, (3, 8)), blocks[head, row])
    for first, last in ((0, 1), (5, 70), (31, 33), (63, 88), (40, 40)):
        assert torch.equal(arena.stretch(first, last)[1], all_values[:, first:last])


@pytest.mark.parametrize("codec", PACKING)
def test_what_will_be_forgotten_is_not_packed_and_a_tail_is_one_again(codec):
    arena = BlockArena(2, 8, 6, 6, torch.float32, segment_blocks=4, codec=codec)
    arena.append(tokens(6), tokens(6))
    before = arena.stretch(0, 48)[0].clone()
    arena.temporary = True
    arena.append(tokens(7, 1), tokens(7, 1))
    assert [part.keys.kind for part in arena.parts()] == [codec.value, "full", "full", "full"]
    arena.truncate(6)
    arena.temporary = False
    assert torch.equal(arena.stretch(0, 48)[0], before)
    arena.append(tokens(2, 2), tokens(2, 2))
    assert [part.keys.kind for part in arena.parts()] == [codec.value] * 2
    assert arena.host_bytes == 2 * arena.segment_bytes


@pytest.mark.parametrize("codec", PACKING)
@pytest.mark.parametrize(
    ("kind", "dtype"), {"llama": torch.bfloat16, "gemma3_text": torch.float32}.items()
)
def test_saved_moved_and_read_again_it_is_the_same_memory(cache, codec, kind, dtype):
    reader = reader_of(codec, dtype, kind)
    with reading(reader, cache, TEXT) as cold:
        contents = memory_contents(cold.memory)[1:]
        answer = reader.ask(cold.memory, "Who?", OPTIONS)
        assert same_contents(memory_contents(cold.memory)[1:], contents)
        segment = cold.memory.state.segment_bytes
    full = Limits(4 * segment, None, ROOMY.budget, save=False)
    with reading(reader, cache / "other", TEXT, limits=full) as moved:
        assert moved.keeper.moved and moved.memory.state.mapped_bytes > 0
        assert same_contents(memory_contents(moved.memory)[1:], contents)
        assert reader.ask(moved.memory, "Who?", OPTIONS).text == answer.text
    with reading(reader, cache, TEXT) as warm:
        assert warm.memory.read_tokens == 0 and warm.memory.state.mapped_bytes > 0
        assert same_contents(memory_contents(warm.memory)[1:], contents)
        again = reader.ask(warm.memory, "Who?", OPTIONS)
        assert (again.text, again.evidence) == (answer.text, answer.evidence)


@pytest.mark.parametrize("codec", PACKING)
def test_an_interrupted_reading_ends_with_the_same_memory(cache, codec, monkeypatch):
    from infllm_cli import keeping, saved

    monkeypatch.setattr(keeping, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(keeping, "CHECKPOINT_SHARE", 0)
    monkeypatch.setattr(saved.Writer, "busy", property(lambda self: self.wait()))
    reader = reader_of(codec)
    contents = memory_contents(read_text(reader, TEXT))[1:]
    steps = 0
    while True:
        found = begin(reader, cache, TEXT)
        reused = found.memory.reused_tokens
        assert (reused > 0) == (steps > 0)
        for _, _ in zip(reader.read_steps(found.memory), range(9), strict=False):
            found.keeper.chunk_read()
        found.keeper.finish()
        done = found.memory.complete
        if done:
            assert same_contents(memory_contents(found.memory)[1:], contents)
        found.close()
        steps += 1
        if done:
            break
    assert steps > 2


def test_each_codec_has_a_memory_of_its_own(cache: Path):
    for codec in Codec:
        with reading(reader_of(codec), cache, prose(800)) as found:
            assert found.memory.reused_tokens == 0
    for codec in Codec:
        with reading(reader_of(codec), cache, prose(800)) as found:
            assert found.memory.read_tokens == 0
