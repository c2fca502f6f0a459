"""Which passages of the document belong to a question: by words and by likelihood, fused.

Exact lookup finds literal strings; an ordinary question needs its passages re-read as text beside
it. The words know (BM25) which passages speak of the same things; the memory knows (`likelihood`)
which of them make the question likely, in whatever words it is asked. Of long documents the words
choose alone: of 20 questions on a novel of 1,350 passages, one that holds the answer is among the
first four for 18 by words, 14 by the likelihood, 15 to 18 by both fused with any weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from infllm_cli.memory.step import Step

NEUTRAL_QUESTION = "What is this text about?"
# Reciprocal rank fusion (Cormack et al., SIGIR 2009) with a small constant: the first few ranks
# are what gets re-read.
FUSION = 10.0
# On the sample story (13 questions that share no word with their passage), passages whose rank is
# among the first four: words 0, attention 2, likelihood 6, words and likelihood 7; and of 8 that do
# share words: 8, 6, 7 and 8. Attention beside these two adds nothing.
LIKELIHOOD_WEIGHT = 1.0
# Where the best passage by words and its neighbours hold so much of what a question's words weigh,
# nothing else is asked: judging all passages takes longer than the rest of a question. On the
# sample story it is more for 20 of 24 ordinary questions and for none of 13 in other words.
SURE = 0.45
# Of attention, where layers that forget make likelihoods impossible.
ATTENTION_WEIGHT = 0.4


@dataclass(frozen=True, slots=True)
class Impression:
    """What a question's own words look at: see `attention_profile` and `evidence`."""

    profile: np.ndarray  # [heads, N]
    asked: np.ndarray  # [document tokens] mass of the question's words
    closed: np.ndarray  # [document tokens] mass of what follows them: where an answer begins


def attention_profile(steps: list[Step]) -> np.ndarray:
    """Of exact lookups: mass [heads, N] of each block, one row per layer and KV head.

    Rows sum to 1; every query of every step has the same say. Empty where nothing was looked up.
    """
    rows = []
    blocks = min((m.shape[1] for step in steps for m in step.block_mass.values()), default=0)
    for layer in sorted(steps[0].block_mass):
        rows.append(sum(step.block_mass[layer][:, :blocks].double() for step in steps))
    if not rows:
        return np.zeros((0, 0))
    mass = torch.cat(rows)
    return (mass / mass.sum(dim=1, keepdim=True)).numpy()


def attention_scores(profile: np.ndarray, neutral: np.ndarray) -> np.ndarray:
    """Mass [N] per block beyond what any question draws to it, summed over heads."""
    blocks = min(profile.shape[1], neutral.shape[1])
    return (profile[:, :blocks] - neutral[:, :blocks]).sum(axis=0)


def fuse(scores: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Fused scores [P] of several rankings [P]; higher is better in all of them.

    A ranking has a say only about what it scored above its own floor: BM25 knows nothing of
    passages that share no word.
    """
    fused = np.zeros(len(scores[0]))
    for score, weight in zip(scores, weights, strict=False):
        fused += np.where(score > score.min(), weight / (FUSION + ranks(score)), 0.0)
    return fused


def ranks(scores: np.ndarray) -> np.ndarray:
    """The rank [P] of each score, 0 for the highest, the first of equals before the others."""
    found = np.empty(len(scores))
    found[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return found


def choose(
    fused: np.ndarray, sizes: np.ndarray, budget: int, *, neighbours: bool = False
) -> list[int]:
    """The best passages that fit `budget` tokens together, in document order.

    Args:
        neighbours: where they are so few that some of it is left, those beside the best join them:
            of a text without sentences, a passage may end between a key and its value.
    """
    chosen: list[int] = []
    left = budget
    for index in np.argsort(-fused, kind="stable"):
        if fused[index] <= 0:
            break
        if sizes[index] > left:
            return sorted(chosen)
        chosen.append(int(index))
        left -= int(sizes[index])
    beside = [other for index in chosen for other in (index + 1, index - 1) if neighbours]
    for near in beside:
        if 0 <= near < len(sizes) and near not in chosen and sizes[near] <= left:
            chosen.append(near)
            left -= int(sizes[near])
    return sorted(chosen)
