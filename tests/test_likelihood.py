"""How likely a question is behind a stretch of the memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_readers import SMALL, make_reader, memory_contents, read_text, same_contents
from tiny_tokenizers import prose

from infllm_cli.likelihood import can_judge, question_likelihood
from infllm_cli.memory import branches
from infllm_cli.reader import Memory, Reader


def by_library(reader: Reader, ids: np.ndarray, judged: int) -> float:
    """Mean log-probability of the last tokens of ids, by the library's own attention."""
    model = reader.model
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ours)
    told = logits[-judged - 1 : -1].log_softmax(dim=-1)
    return float(told.gather(1, torch.from_numpy(ids[-judged:])[:, None]).mean())


def parts(reader: Reader, question: str = "what did the whale say?") -> tuple[np.ndarray, ...]:
    return reader.prompt.plain_ids("\n\nQuestion: "), reader.prompt.plain_ids(question)


def context_of(reader: Reader, memory: Memory) -> np.ndarray:
    return np.concatenate([reader.prompt.prefix, memory.tokens.ids.astype(np.int64)])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "granite", "glm4"])
def test_a_stretch_that_is_the_whole_context_is_judged_as_by_the_library(kind: str) -> None:
    reader = make_reader(kind=kind)
    memory = read_text(reader, prose(700), whole=True)
    opening, question = parts(reader)
    context = context_of(reader, memory)
    found = question_likelihood(
        reader.model, memory.state, [(SMALL.sink_tokens, len(context))], opening, question
    )
    expected = by_library(reader, np.concatenate([context, opening, question]), len(question))
    assert found[0] == pytest.approx(expected, abs=1e-4)


def test_branches_do_not_see_each_other() -> None:
    reader = make_reader()
    memory = read_text(reader, prose(4000))
    opening, question = parts(reader)
    spans = [(5, 60), (33, 34), (100, 171), (2, 9), (memory.state.tokens - 40, memory.state.tokens)]

    def judge(spans: list[tuple[int, int]]) -> np.ndarray:
        return question_likelihood(reader.model, memory.state, spans, opening, question)

    together = judge(spans)
    # The longest stretch sets where the question stands: give every branch the same one.
    longest = spans[2]
    apart = [judge([span, longest])[0] for span in spans]
    np.testing.assert_allclose(together, apart, atol=1e-5)
    assert len(set(np.round(together, 6))) == len(spans)


@pytest.mark.parametrize("most", [1, 40, 100_000])
def test_the_size_of_a_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    reader = make_reader()
    memory = read_text(reader, prose(4000))
    opening, question = parts(reader)
    spans = [(start, start + 30) for start in range(4, 304, 30)]
    usual = question_likelihood(reader.model, memory.state, spans, opening, question)
    monkeypatch.setattr("infllm_cli.likelihood.PASS_TOKENS", most)
    split = question_likelihood(reader.model, memory.state, spans, opening, question)
    np.testing.assert_allclose(split, usual, atol=1e-5)


def test_a_stretch_is_the_same_wherever_it_is_held() -> None:
    reader = make_reader()
    text = prose(4000)
    tiered, whole = read_text(reader, text), read_text(reader, text, whole=True)
    first = tiered.state.tiered[0]  # later layers saw another context
    second = whole.state.tiered[0]
    total = tiered.state.tokens
    assert first.sinks is not None and first.arena.count > 2
    for span in ((0, total), (0, 3), (2, 7), (4, 20), (3, 61), (total - 9, total), (50, total)):
        for ours, theirs in zip(first.stretch(*span), second.stretch(*span), strict=True):
            assert torch.equal(ours, theirs)


def test_judging_leaves_no_trace() -> None:
    reader = make_reader()
    memory = read_text(reader, prose(4000))
    before = memory_contents(memory)
    opening, question = parts(reader)
    with memory.state.question():
        question_likelihood(reader.model, memory.state, [(5, 60), (70, 90)], opening, question)
    assert same_contents(before, memory_contents(memory))


def test_a_softcap_is_honoured() -> None:
    torch.manual_seed(3)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 7, 8)
    v = torch.randn(2, 2, 7, 8)
    visible = torch.ones(2, 1, 3, 7, dtype=torch.bool)
    visible[1, :, :, 2:4] = False
    plain = branches._attend(q, k, v, visible, 0.3, None)
    # A cap far above every score bends nothing; a low one does.
    torch.testing.assert_close(branches._attend(q, k, v, visible, 0.3, 1e4), plain)
    assert not torch.allclose(branches._attend(q, k, v, visible, 0.3, 0.5), plain, atol=1e-3)


def test_layers_that_forget_cannot_judge() -> None:
    sliding = make_reader(kind="gemma2")
    assert not can_judge(read_text(sliding, prose(500)).state)
    assert can_judge(read_text(make_reader(), prose(500)).state)
