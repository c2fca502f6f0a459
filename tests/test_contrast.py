"""What the document adds to an answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_readers import make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.contrast import PLAUSIBLE, Contrast, contrasted
from infllm_cli.errors import UsageError
from infllm_cli.sampling import AnswerOptions


def test_what_the_document_raises_wins_over_what_is_said_anyway() -> None:
    with_document = torch.tensor([0.40, 0.35, 0.20, 0.05]).log()
    without = torch.tensor([0.70, 0.10, 0.10, 0.10]).log()
    assert int(contrasted(with_document, without, 0.0).argmax()) == 0
    assert int(contrasted(with_document, without, 1.0).argmax()) == 1


def test_scores_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(50), torch.randn(50)
    scores = contrasted(a, b, 0.7)
    p, q = a.double().softmax(0), b.double().softmax(0)
    expected = 1.7 * p.log() - 0.7 * q.log()
    plausible = p >= PLAUSIBLE * p.max()
    assert 0 < int(plausible.sum()) < 50
    torch.testing.assert_close(scores[plausible].double(), expected[plausible], atol=1e-5, rtol=0)
    assert float(scores[~plausible].max()) < -1e30 and bool(torch.isfinite(scores).all())


def test_what_is_held_back_is_not_said() -> None:
    with_document = torch.tensor([0.90, 0.06, 0.04]).log()
    without = torch.tensor([0.1, 0.5, 0.4]).log()
    assert int(contrasted(with_document, without, 1.0).argmax()) == 0
    scores = contrasted(with_document, without, 1.0, [0])
    # The rest is weighed as if it had never been there.
    torch.testing.assert_close(
        scores[1:].softmax(0), contrasted(with_document[1:], without[1:], 1.0).softmax(0)
    )
    assert int(scores.argmax()) != 0 and bool(torch.isfinite(scores).all())


def test_an_unlikely_token_is_not_chosen_because_it_is_unlikelier_elsewhere() -> None:
    with_document = torch.tensor([0.98, 0.02]).log()
    without = torch.tensor([0.999999, 0.000001]).log()
    assert int(contrasted(with_document, without, 5.0).argmax()) == 0


def test_the_question_without_its_document_is_as_by_a_plain_pass() -> None:
    reader = make_reader()
    contrast = Contrast(reader)
    prompt = reader.prompt
    for question in ("where is the sea?", "who?", "where is the sea?"):
        ids = np.concatenate([prompt.task_ids(), prompt.question_ids(question), prompt.closing])
        context = np.concatenate([prompt.prefix, prompt.shown, ids, [11, 12]])
        with contrast.question(ids) as without:
            without.follow(11)
            without.follow(12)
            found = without.logits
        model = reader.model
        ours = model.config._attn_implementation
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(context)[None], use_cache=False).logits
        model.set_attn_implementation(ours)
        torch.testing.assert_close(found, logits[0, -1].float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("strength", [-0.1, 5.1, float("nan")])
def test_a_strength_out_of_range_is_refused(strength: float) -> None:
    with pytest.raises(UsageError, match="--contrast"):
        AnswerOptions(contrast=strength)


def test_contrast_changes_an_answer_and_nothing_else() -> None:
    reader = make_reader()
    memory = read_text(reader, prose(4000))
    answers = [
        reader.ask(memory, "what did the whale say?", AnswerOptions(max_tokens=12, contrast=c)).text
        for c in (0.0, 3.0, 0.0, 3.0)
    ]
    assert answers[0] == answers[2] and answers[1] == answers[3]
    assert answers[0] != answers[1]
