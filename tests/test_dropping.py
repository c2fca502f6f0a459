"""Blocks that neither RAM nor disk hold: given up only where that is allowed, and counted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from test_saved import CONFIG, OPTIONS, ROOMY, TEXT, begin, files_of, reading
from tiny_folder import save_folder
from tiny_readers import make_reader, memory_contents, same_contents
from tiny_tokenizers import prose

from infllm_cli import memory_file, saved
from infllm_cli.capacity import Room
from infllm_cli.errors import CapacityError
from infllm_cli.limits import disk_room, memories_folder
from infllm_cli.memory import lookup
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.dropping import drop_least_used
from infllm_cli.shelf import Shelf


def arena_of(codec, blocks=11):
    arena = BlockArena(2, 8, 6, 6, torch.float32, segment_blocks=4, codec=codec)
    keys = torch.randn(2, blocks * 8, 6, generator=torch.Generator().manual_seed(3))
    arena.append(keys, -keys)
    return arena


@pytest.mark.parametrize("codec", list(Codec))
def test_what_is_left_stays_where_it_was_and_what_is_gone_is_not_found(codec):
    arena, whole = arena_of(codec), arena_of(codec)
    held = arena.host_bytes
    arena.drop([1])
    arena.drop([2])
    assert arena.dropped == 2 and arena.count == 11 and arena.host_bytes < held
    assert arena.missing().nonzero()[:, 0].tolist() == [1, 2]
    kept = torch.tensor([[0, 3, 9], [3, 6, 10]])
    for ours, theirs in zip(arena.gather(kept), whole.gather(kept), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(arena.stretch(0, 88), whole.stretch(0, 88), strict=True):
        assert torch.equal(ours[:, :8], theirs[:, :8]) and torch.equal(ours[:, 24:], theirs[:, 24:])
        assert (ours[:, 8:24] == 0).all()
    q = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(4))
    _, mass = lookup.exact(q, arena, 1.0, 2)
    _, full = lookup.exact(q, whole, 1.0, 2)
    assert (mass[:, 1:3] == 0).all() and torch.allclose(mass.sum(1), full.sum(1))
    others = [0, *range(3, 11)]
    ratio = mass[:, others] / full[:, others]
    assert (ratio > 0.99).all()
    arena.drop([0, 3])  # nothing of the first segment is left
    assert (arena.stretch(0, 33)[0][:, :32] == 0).all()
    blocks, mass = lookup.exact(q, arena, 1.0, 2)
    assert (mass[:, :4] == 0).all() and blocks.min() >= 4


def test_the_least_used_go_first_and_of_them_the_oldest(cache):
    reader = make_reader(config=replace(CONFIG, read_blocks=0))
    with reading(reader, cache, TEXT, limits=replace(ROOMY, save=False)) as found:
        state = found.memory.state
        arena = state.tiered[0].arena
        candidates = arena.droppable()
        assert candidates == list(range(arena.sealed - arena.segments[-1].blocks))
        for layer in state.tiered:
            layer.arena.note_use(torch.tensor([[0, 3], [5, 3]]))
        assert drop_least_used(state, 3) == 3
        assert arena.missing().nonzero()[:, 0].tolist() == [1, 2, 4]
        assert {layer.arena.dropped for layer in state.tiered} == {3} and state.dropped == 3
        assert drop_least_used(state, 10**6) == len(candidates) - 3
        assert drop_least_used(state, 10**6) == 0
        assert reader.ask(found.memory, "Who?", OPTIONS).tokens > 0


@pytest.mark.parametrize(("codec", "host"), [(Codec.FULL, 3), (Codec.INT8, 5)])
@pytest.mark.parametrize("room", [0, 1])
def test_the_limit_holds_and_a_question_leaves_no_trace(cache, codec, host, room, tmp_path):
    config = replace(CONFIG, codec=codec)
    reader = make_reader(config=config)
    segment = begin(reader, cache, "x").memory.state.segment_bytes
    limits = replace(ROOMY, host=host * segment, disk=room * segment, save=True)
    with pytest.raises(CapacityError):
        document = begin(reader, cache, TEXT).memory.document
        reader.open(
            document,
            allow_whole=False,
            room=Room(limits.host, disk_room(Shelf(memories_folder(cache)), limits.disk)),
        )
    found = begin(reader, cache / "2", TEXT, replace(limits, allow_drop=True))
    for event in reader.read_steps(found.memory):
        found.keeper.chunk_read()
        assert found.memory.state.host_bytes <= limits.host
        assert event.tokens <= event.total
    found.keeper.finish()
    state = found.memory.state
    assert state.dropped > 0 and state.mapped_bytes <= room * segment
    assert (state.mapped_bytes > 0) == (room > 0)
    assert sum("are dropped (--allow-drop)" in note for note in found.notes) == 1
    assert found.keeper.saved_path() is None and files_of(cache / "2") == []
    contents = memory_contents(found.memory)
    answers = [reader.ask(found.memory, "Who?", OPTIONS) for _ in range(2)]
    assert answers[0].text == answers[1].text
    assert same_contents(memory_contents(found.memory), contents)
    with pytest.raises(CapacityError, match="blocks are missing"):
        memory_file.write(tmp_path / "x", reader, found.memory, cache, lambda *given: None)
    found.close()


def test_a_disk_that_fills_up_while_reading_is_no_end(cache, monkeypatch):
    reader = make_reader(config=CONFIG)
    segment = begin(reader, cache, "x").memory.state.segment_bytes
    limits = replace(ROOMY, host=4 * segment, allow_drop=True)
    found = begin(reader, cache, TEXT, limits)

    def full(*given, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved, "write_tensors", full)
    for _ in reader.read_steps(found.memory):
        found.keeper.chunk_read()
        assert found.memory.state.host_bytes <= limits.host
    found.keeper.finish()
    assert found.memory.state.dropped > 0 and found.memory.complete
    found.close()


def test_the_command_says_what_is_missing(server, tmp_path):
    save_folder(tmp_path / "model")
    (tmp_path / "book.txt").write_text(prose(40_000))
    common = ["--model", tmp_path / "model", "--cache-dir", tmp_path / "cache", "--dtype", "f32"]
    sizes = ["--host-limit", "1500kB", "--disk-limit", "1kB", "--answering", "memory"]
    arguments = ["ask", tmp_path / "book.txt", "Who?", "--json", "--max-tokens", 4, *common, *sizes]
    refused = server.run(arguments)
    assert refused.returncode == 5 and refused.stdout == b""
    done = server.run([*arguments, "--allow-drop"])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["read"]["truncated"] is True and told["memory"]["dropped_blocks"] > 0
    assert told["read"]["tokens"] == told["document"]["tokens"]
    assert b"are dropped" in done.stderr and b"of these blocks" in done.stderr
    roomy = server.run([*arguments[:-6], "--allow-drop", "--answering", "memory"])
    told = json.loads(roomy.stdout)
    assert told["read"]["truncated"] is False and told["memory"]["dropped_blocks"] == 0
