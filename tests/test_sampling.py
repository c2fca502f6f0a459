"""The next token from its logits, and loops."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from infllm_cli.errors import InfllmError, UsageError
from infllm_cli.sampling import (
    LEAST_REPEATED,
    LONGEST_PERIOD,
    AnswerOptions,
    Sampler,
    is_looping,
    lists_again,
)

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "--max-tokens is 0"),
        ({"temperature": -0.1}, "--temperature is -0.1"),
        ({"temperature": 11.0}, "--temperature is 11"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_p": 0.0}, "--top-p is 0"),
        ({"top_p": 1.1}, "--top-p is 1.1"),
    ],
)
def test_options_out_of_range_are_refused_by_their_flag(
    options: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        AnswerOptions(**options)


def draw(options: AnswerOptions, count: int, logits: Tensor = LOGITS) -> list[int]:
    sampler = Sampler(options)
    return [sampler(logits) for _ in range(count)]


def test_temperature_zero_takes_the_highest() -> None:
    assert draw(AnswerOptions(), 5) == [0] * 5
    assert draw(AnswerOptions(seed=9), 1, torch.tensor([0.0, 3.0, -2.0])) == [1]


def test_the_same_seed_draws_the_same_tokens() -> None:
    drawn = [draw(AnswerOptions(temperature=1.5, seed=seed), 50) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_draws_do_not_depend_on_what_others_draw() -> None:
    torch.manual_seed(0)
    first = draw(AnswerOptions(temperature=1.0), 20)
    torch.manual_seed(1)
    assert draw(AnswerOptions(temperature=1.0), 20) == first


def test_tokens_are_drawn_by_their_probability() -> None:
    counts = Counter(draw(AnswerOptions(temperature=2.0), 8000))
    expected = torch.softmax(LOGITS / 2.0, dim=-1)
    for token in range(4):
        assert counts[token] / 8000 == pytest.approx(float(expected[token]), abs=0.03)


def test_top_p_leaves_the_smallest_set_that_holds_it() -> None:
    # Probabilities: 0.61, 0.22, 0.14, 0.03.
    for top_p, kept in ((0.6, {0}), (0.7, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        drawn = draw(AnswerOptions(temperature=1.0, top_p=top_p), 1500)
        assert set(drawn) == kept
    assert set(draw(AnswerOptions(temperature=1.0, top_p=1e-9), 50)) == {0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error(value: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[3] = value
    with pytest.raises(InfllmError, match="--dtype f32"):
        Sampler(AnswerOptions(temperature=temperature))(logits)


@pytest.mark.parametrize("period", [1, 2, 7, 13, LONGEST_PERIOD])
def test_a_loop_is_seen_at_its_fourth_round_and_not_before(period: int) -> None:
    start = list(range(1000, 1025))
    loop = list(range(period))
    rounds = max(4 * period, LEAST_REPEATED)
    repeated = (loop * rounds)[:rounds]
    assert is_looping(start + repeated)
    assert not is_looping(start + repeated[:-1])


def test_ordinary_text_is_no_loop() -> None:
    assert not is_looping([])
    assert not is_looping([7] * 30)  # a row of dots
    assert not is_looping([1, 2, 3] * 11)  # a refrain
    assert not is_looping(list(range(LONGEST_PERIOD + 1)) * 10)  # a long list
    assert not is_looping([i % 7 * (i % 5) for i in range(200)] + [3, 1, 4])


def numbered(items):
    return "They are:\n\n" + "".join(f"{n}. {item}\n" for n, item in enumerate(items, 1))


def test_one_item_under_new_numbers_is_a_loop():
    again = numbered(["Piotr", "Ruth", "Tom"] + ["Ruth"] * 6)
    assert lists_again(again) and lists_again(again + "10. Ru")
    assert not lists_again(numbered(["Piotr", "Tom"] + ["Ruth"] * 5))


@pytest.mark.parametrize(
    "text",
    [
        "",
        numbered([f"Chapter {n}" for n in range(9)]),
        numbered(["yes", "no"] * 9),
        "Ruth\n" * 9,  # verse and the like: `is_looping` knows how much is too much
        "\n" * 9,
    ],
)
def test_lists_that_go_on_are_none(text):
    assert not lists_again(text)
