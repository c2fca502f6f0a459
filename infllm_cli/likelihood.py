"""How likely a question is next to each stretch of the document, as the memory holds it.

Attention tells where the words of a question look; that a passage answers a question which shares
no word with it shows in how well the passage predicts the question (query likelihood: Ponte and
Croft, SIGIR 1998; with a frozen language model: Sachan et al., Improving Passage Retrieval with
Zero-Shot Question Generation, EMNLP 2022). There every passage goes through the model as text with
every question. Here its stored keys and values do, so a passage costs the question's tokens only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from infllm_cli.attention import ARGUMENT
from infllm_cli.memory.branches import Branches
from infllm_cli.memory.model_memory import ModelMemory

# Of question tokens in one pass: as many as a chunk or two.
PASS_TOKENS = 1024
# Of keys loaded in one pass, sinks left out: what bounds its memory.
PASS_KEYS = 16384


class _BranchCall:
    """An attention call that every layer answers from stretches of its own memory."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        """Scaling and the extra arguments were looked at once, by the probe."""
        return self.branches.attend(module.layer_idx, q, k, v)


def can_judge(state: ModelMemory) -> bool:
    """Whether every layer keeps its keys: a sliding layer forgets them."""
    return len(state.tiered) == len(state.layers)


def question_likelihood(
    model: nn.Module,
    state: ModelMemory,
    spans: list[tuple[int, int]],
    opening: np.ndarray,
    question: np.ndarray,
) -> np.ndarray:
    """Mean log-probability [C] of a question's tokens behind each stretch of the memory.

    Args:
        spans: first and last (excluded) absolute position of each stretch.
        opening: [m] ids that announce a question, at least one; they are not judged.
        question: [n] ids.
    """
    assert can_judge(state) and len(opening) and len(question)
    ids = torch.from_numpy(np.concatenate([opening, question]))
    longest = max(last - first for first, last in spans)
    batch = max(1, min(PASS_TOKENS // len(ids), PASS_KEYS // longest))
    found = [
        _one_pass(model, state, spans[start : start + batch], ids, len(question))
        for start in range(0, len(spans), batch)
    ]
    return torch.cat(found).numpy()


@torch.inference_mode()
def _one_pass(
    model: nn.Module,
    state: ModelMemory,
    spans: list[tuple[int, int]],
    ids: Tensor,
    judged: int,
) -> Tensor:
    """Mean log-probability [C] float64 of the last `judged` of ids [L]."""
    device = next(model.parameters()).device
    length = len(ids)
    call = _BranchCall(Branches(state.tiered, spans, length))
    tokens = ids.repeat(len(spans)).to(device)
    # Each judged token is told by the one before it; only those meet the output head.
    told = torch.arange(len(spans) * length, device=device).view(-1, length)[:, -judged - 1 : -1]
    logits = (
        model(
            input_ids=tokens[None],
            position_ids=torch.zeros(1, len(tokens), dtype=torch.long, device=device),
            use_cache=False,
            logits_to_keep=told.flatten(),
            **{ARGUMENT: call},
        )
        .logits[0]
        .float()
    )
    targets = tokens[told.flatten() + 1]
    chosen = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)
    return chosen.view(len(spans), judged).double().mean(dim=1).cpu()
