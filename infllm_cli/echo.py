"""A small model sometimes says the question again instead of an answer; where, and what forbids it.

"The answer to this question is: "Where did he bury it?"" tells nothing. The words of a question may
well stand in an answer ("The name of the goose is ..."), but hardly ever its beginning at the
beginning.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from infllm_cli.words import ASKING

# Behind these an answer begins, or begins anew.
OPENING = ':"\u201c\n'
FORBIDDEN = -1e9  # finite: a logit that is not is a sign of broken numbers


class Echo:
    """Forbids a question's own beginning where an answer begins.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any, question: str) -> None:
        first, second, *_ = [*question.split(), "", ""]
        asks = first.lower() in ASKING  # any other ("In which town") may begin an answer, too
        self._before = "" if asks else first.lower()
        word = first if asks else second
        forms = {word, word.lower(), word.capitalize()} if word else set()
        found = (
            tokenizer.encode(space + form, add_special_tokens=False)
            for form in forms
            for space in ("", " ")
        )
        self._ids = sorted({ids[0] for ids in found if ids})

    def forbid(self, logits: Tensor, text: str) -> Tensor:
        """Logits [V] of what follows the text of an answer, without what would only ask again."""
        said = text.rstrip()
        if self._before:
            if not said.lower().endswith(self._before):
                return logits
            said = said[: -len(self._before)].rstrip()
        if not self._ids or (said and said[-1] not in OPENING):
            return logits
        logits = logits.clone()
        logits[self._ids] = FORBIDDEN
        return logits
