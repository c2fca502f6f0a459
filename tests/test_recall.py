"""Passages, the words they share with a question, and which of them are read again."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_tokenizers import backend_of, prose

from infllm_cli.memory.step import Phase, Step
from infllm_cli.passages import LEAST_TOKENS, MOST_TOKENS, TARGET_TOKENS, Passages, cut_passages
from infllm_cli.recall import (
    FUSION,
    attention_profile,
    attention_scores,
    choose,
    fuse,
)
from infllm_cli.tokens import PlainTokenizer, Tokens
from infllm_cli.words import WordIndex, stem, words_of


def tokens_of(text: str, kind: str = "byte_level") -> Tokens:
    return PlainTokenizer(backend_of(kind)).encode(text)


def texts_of(text: str, tokens: Tokens, passages: Passages) -> list[str]:
    starts = [int(tokens.spans[border, 0]) for border in passages.borders[:-1]]
    return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


# --- passages ------------------------------------------------------------------------------------

TEXTS = {
    "prose": prose(12_000),
    "one word": "whale",
    "no space": "whaleship" * 600,
    "no sentence": "the whale of the sea " * 200,
    "blank lines": "\n" * 3000,
    "chinese": "孔乙己是站着喝酒而穿长衫的唯一的人" * 80,
    "lines": "sea 12\n" * 500,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
def test_passages_tile_the_tokens_in_bounded_sizes(text: str, kind: str) -> None:
    tokens = tokens_of(text, kind)
    borders = cut_passages(text, tokens).borders
    assert borders[0] == 0 and borders[-1] == len(tokens)
    sizes = np.diff(borders)
    assert (sizes >= 1).all() and (sizes <= MOST_TOKENS).all()
    assert (sizes[:-1] >= LEAST_TOKENS).all()
    if len(tokens) <= MOST_TOKENS:
        assert len(borders) == 2


@pytest.mark.parametrize("kind", ["byte_level", "llama3_like", "neox_like"])
def test_passages_of_prose_end_where_a_sentence_does(kind: str) -> None:
    words = prose(9_000, seed=4).split()
    sentences = [" ".join(words[i : i + 9]).strip(".,;!") + "." for i in range(0, len(words), 9)]
    paragraphs = [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
    text = "\n\n".join(paragraphs)
    tokens = tokens_of(text, kind)
    pieces = texts_of(text, tokens, cut_passages(text, tokens))
    assert len(pieces) > 10
    blank = 0
    for piece, following in pairwise(pieces):
        assert re.search(r"[.!?]\s*$", piece), piece[-20:]
        between = piece[len(piece.rstrip()) :] + following[: -len(following.lstrip())]
        blank += between == "\n\n"
    assert blank > len(pieces) / 3  # one sentence in five ends a paragraph


def test_a_paragraph_border_near_the_target_is_preferred() -> None:
    sentence = "the whale and the ship. "
    before = 1
    while len(tokens_of(sentence * (before + 1))) < TARGET_TOKENS - 5:
        before += 1
    opening = (sentence * before).rstrip()
    for text, ends_there in (
        (opening + "\n\n" + sentence * 60, True),
        (opening + " " + sentence * 60, False),
    ):
        tokens = tokens_of(text)
        first = texts_of(text, tokens, cut_passages(text, tokens))[0]
        assert (first.rstrip() == opening) == ends_there


def test_spreading_conserves_mass_and_goes_by_overlap() -> None:
    passages = Passages(np.array([0, 10, 25, 40]))
    spread = passages.spread(np.array([1.0, 4.0]), np.array([0, 20, 40]))
    np.testing.assert_allclose(spread, [0.5, 0.5 + 1.0, 3.0])
    rng = np.random.default_rng(0)
    mass = rng.random(7)
    borders = np.sort(rng.choice(np.arange(1, 40), 6, replace=False))
    spread = passages.spread(mass, np.array([0, *borders, 40]))
    assert spread.sum() == pytest.approx(mass.sum()) and (spread >= 0).all()


def test_passages_outside_all_units_get_nothing() -> None:
    passages = Passages(np.array([0, 10, 20, 30, 40]))
    np.testing.assert_allclose(
        passages.spread(np.array([1.0, 1.0]), np.array([10, 15, 20])), [0, 2, 0, 0]
    )


# --- words ---------------------------------------------------------------------------------------

FIVE = [
    "The white whale swims in the sea.",
    "A captain walks on his ship; the ship sails.",
    "Sailing ships and whales, whales, whales!",
    "Nothing here.",
    "The captain's whale whaled the captains.",
]


def index_of(sentences: list[str]) -> WordIndex:
    """With a passage for each of the sentences, which must have different beginnings."""
    text = " ".join(sentences)
    tokens = tokens_of(text)
    at = np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)])
    borders = np.searchsorted(tokens.spans[:, 0], at[:-1] - 1)
    borders[0] = 0
    return WordIndex(text, tokens, Passages(np.array([*borders, len(tokens)])))


@pytest.mark.parametrize("reaches", [(0,), (1,), (0, 1, 2), (7,)])
def test_scores_are_those_of_the_formula(reaches: tuple[int, ...]) -> None:
    index = index_of(FIVE)
    question = "Which whales does the captain see from the ship? And unicorns?"

    expected = [0.0] * 5
    for reach in reaches:
        # Words of neighbours count as its own; there are none beyond the ends.
        windows = [" ".join(FIVE[max(0, i - reach) : i + reach + 1]) for i in range(5)]
        counts = [Counter(words_of(window)) for window in windows]
        lengths = [count.total() for count in counts]
        mean = sum(lengths) / 5
        for at, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            for word in set(words_of(question)) - {"which", "doe"}:  # these only ask
                holding = sum(word in other for other in counts)
                idf = math.log(1 + (5 - holding + 0.5) / (holding + 0.5))
                tf = count[word]
                expected[at] += idf * tf * 2.2 / (tf + 1.2 * (1 - 0.75 + 0.75 * length / mean))
    np.testing.assert_allclose(index.scores(question, reaches), expected, rtol=1e-9)
    assert index.scores("unicorns!", reaches).tolist() == [0.0] * 5
    assert index.scores("???", reaches).tolist() == index.scores("Who?", reaches).tolist()
    assert reaches == (7,) or int(index.scores("white", reaches).argmax()) == 0


def test_a_passage_is_found_by_whom_its_neighbours_name() -> None:
    index = index_of(
        [
            "The harbour was grey and the tide was low.",
            "Old Gideon Marl came to the harbour in the spring.",
            "He paid nine shillings for the boat.",
            "Then it rained.",
            "Somebody paid for a boat in the autumn, and for a boat in the winter.",
            "It rained again.",
        ]
    )
    question = "What did Gideon Marl pay for the boat?"
    assert int(index.scores(question, (0,)).argmax()) in (1, 4)
    assert int(index.scores(question).argmax()) in (1, 2)
    ranked = np.argsort(-index.scores(question)).tolist()
    assert ranked.index(2) < ranked.index(4)


def test_texts_are_judged_with_their_neighbours() -> None:
    index = index_of(FIVE)
    alone, held = index.judge("white ships", FIVE)
    near, around = index.judge("white ships", FIVE, reach=1)
    assert [i for i in range(5) if alone[i]] == [0, 1, 2]
    assert [i for i in range(5) if near[i]] == [0, 1, 2, 3] and near[1] > near[2]
    assert held[:, 0].tolist() == [False, True, True, False, False]  # ship
    assert around[:, 0].tolist() == [True, True, True, True, False]
    assert around[:, 1].tolist() == [True, True, False, False, False]  # white


@pytest.mark.parametrize("passages", [12, 30])
def test_coverage_is_the_part_of_the_words_weight_that_stands_near(passages: int) -> None:
    numbers = [f"{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(passages)]
    index = index_of([f"The {n}xa stands alone in the harbour at night." for n in numbers])
    # Words that are everywhere say nothing; all others weigh the same.
    assert index.telling("The harbour, alone?").tolist() == [0.0] * 3
    question = "aaxa, abxa, acxa, adxa alone at night?"
    found = [index.coverage(question, i) for i in range(5)]
    np.testing.assert_allclose(found, [0.5, 0.75, 0.75, 0.5, 0.25])
    # A word that is nowhere weighs as well, and more.
    assert 0.3 < index.coverage("aaxa unicorn", 0) < 0.5
    assert index.coverage("alone", 2) == index.coverage("???", 0) == 0.0


def test_numbers_are_looked_for_as_they_are_written() -> None:
    index = index_of(
        [
            "Aron paid invoice 5523 late, by 14 days.",
            "Bert never paid 5523a.",
            "Carl lives at 77 Elm Road.",
            "Dora was born in 1858.",
            "Elsa was born in 1858 as well, in the lighthouse.",
            "Finn holds key 7d786d24-3ee3-95e6.",
        ]
    )
    holding = {
        "What about 5523?": [0, 1],  # its neighbours count
        "What about 5523 and 9999?": [0, 1],  # a number that is nowhere is asked of nobody
        "Who was born in 1858?": [2, 3, 4, 5],
        "What has 7d786d24-3ee3-95e6 to do with 5523?": [],
        "Which key is 7d786d24-3ee3-95e6?": [4, 5],
        "Who lives at 77?": [],  # too short to be one
        "Who was born?": [],
    }
    for question, expected in holding.items():
        assert [i for i in range(6) if index.holds_numbers(question, i)] == expected, question


def test_in_a_short_text_sentences_tell_which_words_are_rare() -> None:
    things = ["door", "roof", "wall", "gate", "yard", "hall", "lamp", "well", "path", "step"]
    sentences = [f"The {thing} of the house is as old as the house itself." for thing in things]
    text = " ".join([*sentences, "The dog of the house is called Rufus, and the cat is not."])
    tokens = tokens_of(text)
    index = WordIndex(text, tokens, Passages(np.array([0, len(tokens)])))
    asked = sorted({"call", "dog", "hous", "is", "of", "the", "what"})
    weights = index.telling("What is the dog of the house called?")
    told = dict(zip(asked, weights, strict=True))
    # Nor does a word that asks, however rare it is.
    assert not any(told[word] for word in ("hous", "is", "of", "the", "what"))
    assert told["call"] == told["dog"] > 0


def test_forms_of_a_word_are_one_word() -> None:
    for forms in (
        ["whales", "whale"],
        ["walked", "walking", "walks", "walk"],
        ["Ahab's", "ahab"],
        ["copied", "copies", "copy"],
        ["stopped", "stopping", "stops", "stop"],
    ):
        assert len({stem(word.lower()) for word in forms}) == 1
    assert words_of("Ships, SHIP; ship") == ["ship"] * 3
    assert words_of("naïve Москва 1851") == ["naiv", "москва", "1851"]
    assert words_of("Rostóv") == words_of("Rostov")
    assert words_of("window_tokens") == ["window_token", "window", "token"]
    assert words_of("HTTPServerError") == ["httpservererror", "http", "server", "error"]
    assert words_of("USA Jabez don't") == ["usa", "jabez", "don", "t"]
    assert stem("is") == "is" and stem("his") == "his"


# --- attention ------------------------------------------------------------------------------------


def test_a_profile_has_a_row_per_head_that_sums_to_one() -> None:
    steps = [Step(Phase.ASK, 100, 3), Step(Phase.ASK, 103, 1)]
    assert attention_profile(steps).size == 0
    # A block that was sealed between the steps has no say.
    for step, queries, blocks in zip(steps, (3, 1), (2, 3), strict=True):
        step.block_mass[2] = queries * torch.tensor([[2.0, 2.0, 9.0], [0.0, 4.0, 9.0]])[:, :blocks]
        step.block_mass[0] = queries * torch.tensor([[1.0, 3.0, 9.0]])[:, :blocks]
    np.testing.assert_allclose(attention_profile(steps), [[0.25, 0.75], [0.5, 0.5], [0.0, 1.0]])
    steps[1].block_mass[0] = torch.tensor([[4.0, 0.0]])
    # Three queries gave [3, 9], one gives [4, 0].
    np.testing.assert_allclose(attention_profile(steps)[0], [7 / 16, 9 / 16])


def test_what_any_question_looks_at_counts_for_nothing() -> None:
    neutral = np.array([[0.9, 0.1, 0.0], [0.5, 0.5, 0.0]])
    asked = np.array([[0.8, 0.1, 0.1], [0.5, 0.2, 0.3]])
    np.testing.assert_allclose(attention_scores(asked, neutral), [-0.1, -0.3, 0.4])
    assert attention_scores(neutral, neutral).tolist() == [0.0] * 3


# --- both ----------------------------------------------------------------------------------------


def test_ranks_are_fused_by_their_weights() -> None:
    fused = fuse([np.array([5.0, 1.0, 3.0]), np.array([0.0, 2.0, 9.0])], [1.0, 0.4])
    ranks = [(0, None), (None, 1), (1, 0)]
    for index, (a, b) in enumerate(ranks):
        expected = (1 / (FUSION + a) if a is not None else 0) + (
            0.4 / (FUSION + b) if b is not None else 0
        )
        assert fused[index] == pytest.approx(expected)


def test_a_ranking_without_an_opinion_has_no_say() -> None:
    attention = np.array([0.1, 0.3, 0.2])
    silent = fuse([np.zeros(3), attention], [1.0, 0.4])
    np.testing.assert_allclose(silent, fuse([attention], [0.4]))
    assert fuse([np.zeros(3)], [1.0]).tolist() == [0.0] * 3


def test_the_best_that_fit_are_chosen_in_document_order() -> None:
    fused = np.array([0.1, 0.5, 0.0, 0.4, 0.3])
    sizes = np.array([50, 100, 100, 80, 100])
    assert choose(fused, sizes, 280) == [1, 3, 4]
    assert choose(fused, sizes, 279) == [1, 3]
    assert choose(fused, sizes, 10_000) == [0, 1, 3, 4]  # never one without any score
    assert choose(fused, sizes, 10_000, neighbours=True) == [0, 1, 2, 3, 4]
    assert choose(fused, sizes, 99) == []


def test_few_are_joined_by_their_neighbours() -> None:
    """What is behind the best one first; never one without any score that stands apart."""
    fused = np.array([0, 0, 0.5, 0, 0, 0, 0.9, 0])
    sizes = np.full(8, 100)
    take = partial(choose, neighbours=True)
    assert take(fused, sizes, 200) == [2, 6]
    assert take(fused, sizes, 300) == [2, 6, 7]
    assert take(fused, sizes, 400) == [2, 5, 6, 7]
    assert take(fused, sizes, 10_000) == [1, 2, 3, 5, 6, 7]
    assert take(fused, np.array([100] * 7 + [101]), 300) == [2, 5, 6]
    assert take(np.zeros(8), sizes, 10_000) == []
