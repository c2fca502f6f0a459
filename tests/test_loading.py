"""Blocks that stay where they are are not loaded again, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.step import Phase


@pytest.mark.parametrize("codec", [Codec.FULL, Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("kind", ["llama", "glm4"])  # halves rotate, neighbours do
def test_loading_only_what_changed_gives_the_same_bits(monkeypatch, codec, kind):
    reader = make_reader(kind=kind, config=replace(SMALL, codec=codec, answer_blocks=4))
    memory = read_text(reader, prose(4000))
    ids = torch.from_numpy(memory.tokens.ids.astype("int64"))
    loaded: list[int] = []
    pick = BlockArena.pick
    monkeypatch.setattr(
        BlockArena, "pick", lambda self, h, b: (loaded.append(len(b)), pick(self, h, b))[1]
    )
    load = LayerMemory._load

    def answer() -> list[torch.Tensor]:
        found = []
        with memory.state.question():
            start = memory.state.tokens
            reader.forward(memory.state, Phase.ASK, ids[:9], keep_from=start, want_logits=True)
            for token in ids[60:72]:
                step, logits = reader.forward(
                    memory.state, Phase.ANSWER, token[None], keep_from=start, want_logits=True
                )
                found += [logits, step.mass]
        return found

    partly = answer()
    fewer = sum(loaded)
    loaded.clear()
    monkeypatch.setattr(
        LayerMemory, "_load", lambda self, blocks, table, there: load(self, blocks, table, None)
    )
    wholly = answer()
    assert 0 < fewer < sum(loaded)
    assert all(torch.equal(a, b) for a, b in zip(partly, wholly, strict=True))
