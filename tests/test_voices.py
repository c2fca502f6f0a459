"""Several contexts that answer together."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tiny_readers import make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.voices import Voice, follow, fresh_state, mixture, weigh


def voices(*probabilities: list[float], weights: tuple[float, ...] = (0.0, 0.0)) -> list:
    """Voices that say these probabilities next, with logits off by a constant each."""
    return [
        SimpleNamespace(logits=torch.tensor(p).log() + 7 * number, weight=weight)
        for number, (p, weight) in enumerate(zip(probabilities, weights, strict=False))
    ]


def test_one_voice_is_not_changed() -> None:
    (one,) = voices([0.2, 0.8])
    assert mixture([one]) is one.logits
    weigh([one], 0)
    assert one.weight == 0


def test_equal_voices_say_the_mean_of_what_each_says() -> None:
    both = voices([0.2, 0.8], [0.6, 0.4])
    torch.testing.assert_close(mixture(both).softmax(0), torch.tensor([0.4, 0.6]))


def test_weights_are_the_posterior_of_each_voice() -> None:
    both = voices([0.2, 0.8], [0.6, 0.4])
    weigh(both, 0)
    expected = torch.tensor([0.2, 0.6]) / 0.8
    got = torch.tensor([voice.weight for voice in both]).exp()
    torch.testing.assert_close(got, expected)
    mixed = expected[0] * torch.tensor([0.2, 0.8]) + expected[1] * torch.tensor([0.6, 0.4])
    torch.testing.assert_close(mixture(both).softmax(0), mixed)
    weigh(both, 1)
    expected = torch.tensor([0.2 * 0.8, 0.6 * 0.4])
    got = torch.tensor([voice.weight for voice in both]).exp()
    torch.testing.assert_close(got, expected / expected.sum())


def test_a_voice_that_foretold_nothing_falls_silent() -> None:
    both = voices([1e-6, 1 - 1e-6], [0.5, 0.5])
    for _ in range(3):
        weigh(both, 0)
    assert both[0].weight < -30
    assert sum(pytest.approx(0, abs=1e-6) == voice.weight for voice in both) == 1


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
def test_two_voices_in_one_pass_say_what_each_says_alone(kind: str) -> None:
    reader = make_reader(kind=kind)
    memory = read_text(reader, prose(3000))
    ids = memory.tokens.ids.astype("int64")

    def said(together: bool) -> list[torch.Tensor]:
        found = []
        with memory.state.question():
            heard = [Voice(reader, memory.state), Voice(reader, fresh_state(reader))]
            for voice in heard:
                voice.ask(ids[:9])
            for token in ids[20:26].tolist():
                if together:
                    steps = follow(heard, token)
                else:
                    steps = [step for voice in heard for step in follow([voice], token)]
                found += [voice.logits for voice in heard] + [step.mass for step in steps]
        return found

    for one, both in zip(said(False), said(True), strict=True):
        torch.testing.assert_close(both, one, atol=1e-4, rtol=1e-4)
