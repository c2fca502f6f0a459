"""Blocks that an answer keeps choosing among, between two scans of everything."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_readers import SMALL, make_reader, memory_contents, read_text, same_contents
from tiny_tokenizers import prose

from infllm_cli.errors import UsageError
from infllm_cli.identity import key_facts
from infllm_cli.memory import shortlist
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Relevance, Sharing
from infllm_cli.memory.shortlist import Shortlist
from infllm_cli.memory.step import Phase

TOKENS = 9


def answered(every: int, monkeypatch, *, per_loaded: int, least: int = 1, long: int = TOKENS):
    """Logits and blocks of each answer token, which of them scanned, and the reader's memory."""
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", least)
    monkeypatch.setattr(shortlist, "PER_LOADED", per_loaded)
    reader = make_reader(config=replace(SMALL, scan_every=every))
    memory = read_text(reader, prose(4000))
    before = memory_contents(memory)
    ids = torch.from_numpy(memory.tokens.ids.astype("int64"))
    logits, blocks, scanned = [], [], []
    with memory.state.question():
        start = memory.state.tokens
        reader.forward(memory.state, Phase.ASK, ids[:9], keep_from=start, want_logits=True)
        for token in ids[60 : 60 + long]:
            step, said = reader.forward(
                memory.state, Phase.ANSWER, token[None], keep_from=start, want_logits=True
            )
            logits.append(said)
            blocks.append(dict(step.loaded))
            scanned.append(bool(step.block_mass))
    assert same_contents(memory_contents(memory), before)
    assert all(layer._shortlist is None for layer in memory.state.tiered)
    return logits, blocks, scanned


def test_where_all_blocks_are_listed_the_answer_is_the_same(monkeypatch):
    always = answered(1, monkeypatch, per_loaded=1000)
    seldom = answered(4, monkeypatch, per_loaded=1000)
    assert always[2] == [True] * TOKENS
    assert seldom[2] == [index % 4 == 0 for index in range(TOKENS)]
    for a, b in zip(always[0], seldom[0], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for a, b in zip(always[1], seldom[1], strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[layer], b[layer]) for layer in a)


def test_between_scans_only_what_is_listed_is_chosen(monkeypatch):
    _, blocks, scanned = answered(3, monkeypatch, per_loaded=1)
    last = None
    for chosen, scan in zip(blocks, scanned, strict=True):
        if scan:
            last = chosen
        else:  # as many are listed as are loaded: nothing else can be chosen
            assert all(torch.equal(chosen[layer], last[layer]) for layer in chosen)


def test_a_short_memory_is_scanned_at_every_token(monkeypatch):
    assert answered(4, monkeypatch, per_loaded=2, least=10**6)[2] == [True] * TOKENS


def test_a_block_that_is_added_is_seen(monkeypatch):
    # So long an answer outgrows the window.
    length = SMALL.window_tokens + 60
    monkeypatch.setattr(shortlist, "LEAST_BLOCKS", 1)
    reader = make_reader(config=replace(SMALL, scan_every=10**6))
    memory = read_text(reader, prose(3000))
    counts = []
    with memory.state.question():
        for token in range(5, 5 + length):
            step, _ = reader.forward(
                memory.state, Phase.ANSWER, torch.tensor([token]), want_logits=True
            )
            if step.block_mass:
                counts.append(memory.state.blocks)
    assert len(counts) > 1


def test_how_often_is_no_matter_of_what_was_read(tmp_path):
    keys = []
    for every in (1, 4):
        reader = make_reader(config=replace(SMALL, scan_every=every))
        memory = read_text(reader, prose(2500))
        keys.append(key_facts(reader, memory, tmp_path, lambda *_: None))
    assert keys[0] == keys[1]


def test_a_negative_number_is_refused():
    with pytest.raises(UsageError, match="--scan-every is -1"):
        MemoryConfig(scan_every=-1)


class Arena:
    dropped = 0

    def __init__(self, count):
        self.count = count


@pytest.mark.parametrize(
    ("count", "every", "native", "between"),
    [
        (191, 0, True, 0),
        (192, 0, True, 1),
        (10**4, 0, False, 0),  # in torch only where it was asked for
        (10**4, 1, True, 0),
        (2, 3, True, 2),
        (191, 4, False, 0),
        (192, 4, False, 3),
    ],
)
def test_how_many_tokens_a_list_serves(count, every, native, between):
    assert Shortlist.between(Arena(count), every, native=native) == between
    arena = Arena(count)
    arena.dropped = 1
    assert Shortlist.between(arena, every, native=native) == 0


@pytest.mark.parametrize("other", [{"relevance": Relevance.MAX}, {"sharing": Sharing.PER_LAYER}])
def test_other_rankings_are_scanned_at_every_token(other):
    with pytest.raises(UsageError, match="--scan-every is 4"):
        MemoryConfig(scan_every=4, **other)
