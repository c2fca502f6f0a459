"""The chat template around, never through, the document.

The template is rendered once with markers in place of the document and of the question, and its
pieces are tokenized apart: only they may contain control tokens. Document and question are plain
text whatever they contain.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from infllm_cli.errors import ModelError
from infllm_cli.tokens import PlainTokenizer

MARKER = "\x02infllm\x03"
FIRST_MARKER = "\x02document\x03"
# The document is a turn of its own, answered by this: what follows it is then read as a question
# about the text and not as its continuation. On the sample story the default model then answers 12
# instead of 10 of 24 questions from four passages.
ACKNOWLEDGED = "I have read the text. What is your question?"
TASK = "Answer the question from the text above, in a few words.\n\n"
QUESTION = "Question: "
PLAIN_ANSWER = "\nAnswer:"  # where there is no chat template
BETWEEN_PASSAGES = "\n\n...\n\n"


@dataclass(frozen=True)
class Prompt:
    """What stands around a document.

    Attributes:
        prefix: [n] ids before the document (system message, opening of the user's turn, BOS).
        turn: [n] ids between the document and the turn that asks.
        closing: [n] ids after the question (end of the user's turn, opening of the answer).
        one_turn: [n] and [m] ids before and after a text and its question that share one turn.
        stop_ids: ids that end an answer.
        is_chat: whether the model has a chat template.
        task, question: what is said before the question, and what it begins with.
    """

    tokenizer: PlainTokenizer
    prefix: np.ndarray
    turn: np.ndarray
    closing: np.ndarray
    one_turn: tuple[np.ndarray, np.ndarray]
    stop_ids: frozenset[int]
    is_chat: bool
    task: str = TASK
    question: str = QUESTION

    def in_one_turn(self) -> Prompt:
        """The form in which benchmarks are published: text and question as one message, and not a
        word of ours between them.

        The default model finds a pass key in 2,000 tokens that way and not in the usual form, even
        where it attends everything.
        """
        opening, ending = self.one_turn
        return replace(
            self, prefix=opening, turn=self.turn[:0], closing=ending, task="\n\n", question=""
        )

    def plain_ids(self, text: str) -> np.ndarray:
        """Ids [n] of a text, never a control token among them."""
        return self.tokenizer.encode(text).ids.astype(np.int64)

    def task_ids(self) -> np.ndarray:
        """Ids [n] of what is said before the question."""
        return self.plain_ids(self.task)

    def question_ids(self, question: str) -> np.ndarray:
        """Ids [n] of the question alone."""
        return self.plain_ids(self.question + question.strip())

    def prefill_ids(self, prefill: str) -> np.ndarray:
        """Ids [n] of what an answer is made to begin with."""
        text = prefill.strip()
        if not text:
            return np.zeros(0, dtype=np.int64)
        # Behind a turn's opening stands no space, behind "Answer:" there is one.
        return self.plain_ids(text if self.is_chat else f" {text}")

    def around_tokens(self, question: str, prefill: str = "") -> int:
        """Tokens of a context whose document is left out, up to the answer's first own token."""
        parts = (self.prefix, self.turn, self.task_ids(), self.closing)
        asked = (self.question_ids(question), self.prefill_ids(prefill))
        return sum(map(len, (*parts, *asked)))


def build_prompt(tokenizer: Any, generation_config: Any) -> Prompt:
    """Take a transformers tokenizer's chat template apart.

    Raises:
        ModelError: a template that drops or repeats the user's message.
    """
    control = _stop_ids(generation_config, tokenizer)
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    before, between, after = "", "\n\n", PLAIN_ANSWER
    opening, ending = before, after
    if is_chat:
        before, between, after = _turns(tokenizer)
        opening, ending = _one_turn(tokenizer)
        control |= _turn_end(tokenizer)
    prefix = _one_bos(tokenizer, _ids(tokenizer, before))
    plain = PlainTokenizer(tokenizer.backend_tokenizer, control)
    return Prompt(
        tokenizer=plain,
        prefix=prefix,
        turn=_ids(tokenizer, between),
        closing=_ids(tokenizer, after),
        one_turn=(_one_bos(tokenizer, _ids(tokenizer, opening)), _ids(tokenizer, ending)),
        stop_ids=frozenset(control),
        is_chat=is_chat,
    )


def _turns(tokenizer: Any) -> tuple[str, str, str]:
    """What the template writes before the document, between it and the question, and after."""
    conversation = [
        {"role": "user", "content": FIRST_MARKER},
        {"role": "assistant", "content": ACKNOWLEDGED},
        {"role": "user", "content": MARKER},
    ]
    with contextlib.suppress(ModelError):  # a template that takes no answers
        text = _render(tokenizer, conversation)
        before, _, rest = text.partition(FIRST_MARKER)
        if text.count(FIRST_MARKER) == rest.count(MARKER) == text.count(MARKER) == 1:
            between, _, after = rest.partition(MARKER)
            return before, between, after
    # A template that drops earlier turns: document and question share one.
    opening, ending = _one_turn(tokenizer)
    return opening, "\n\n", ending


def _one_turn(tokenizer: Any) -> tuple[str, str]:
    """What the template writes around a user's only message."""
    pieces = _render(tokenizer, [{"role": "user", "content": MARKER}]).split(MARKER)
    if len(pieces) != 2:
        raise ModelError("the model's chat template does not keep the user's message as it is.")
    return pieces[0], pieces[1]


def _render(tokenizer: Any, conversation: list[dict[str, str]]) -> str:
    try:
        return tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # templates are programs: anything may be raised
        raise ModelError(f"the model's chat template cannot be rendered: {error}") from error


def _ids(tokenizer: Any, text: str) -> np.ndarray:
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return np.asarray(ids, dtype=np.int64)


def _one_bos(tokenizer: Any, prefix: np.ndarray) -> np.ndarray:
    """Exactly one BOS where the tokenizer adds one by itself; none where it does not.

    A template that writes the BOS and a tokenizer that adds it must not give two.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return prefix
    added = tokenizer.encode("a", add_special_tokens=True)[:1] == [bos]
    rest = prefix
    if added:
        while len(rest) and rest[0] == bos:
            rest = rest[1:]
        return np.concatenate([[bos], rest]).astype(np.int64)
    return prefix


def _stop_ids(generation_config: Any, tokenizer: Any) -> set[int]:
    named = getattr(generation_config, "eos_token_id", None)
    ids = set(named) if isinstance(named, (list, tuple)) else {named}
    ids.add(tokenizer.eos_token_id)
    return {int(i) for i in ids if i is not None}


def _turn_end(tokenizer: Any) -> set[int]:
    """The control token that the template writes after an answer, if any."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": MARKER},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # a template that takes no answers names no end token
        return set()
    _, found, after = text.partition(MARKER)
    ids = tokenizer.encode(after, add_special_tokens=False) if found and after else []
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {int(ids[0])} if ids and ids[0] in added else set()
