"""The chat template around, never through, the document.

The template is rendered once with markers in place of the document and of the question, and its
pieces are tokenized apart: only they may contain control tokens. Document and question are plain
text whatever they contain.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
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
# Two worked examples between document and question show a small model that an answer is a few words
# of the text. It also takes them for the text: `contrast` mends most of that (without it they do
# harm: 4 instead of 10 of 24 questions), and what they answer is held back unless the passages say
# it, too. So their answers begin with words of one token in the default model's vocabulary.
EXAMPLES = (
    (
        "The old lighthouse on Gull Rock was painted red and white in 1902, and its keeper, a "
        "widower named Leon Pell, grew leeks behind it.",
        "What is the name of the keeper of the lighthouse?",
        "Leon Pell.",
    ),
    (
        "She paid the carter twenty shillings and waited. It was only after supper that her "
        "brother came, carrying a lantern and a wet umbrella.",
        "How much did she pay the carter?",
        "Twenty shillings.",
    ),
)
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
        shown: [n] the same, with examples of questions and answers on the way.
        closing: [n] ids after the question (end of the user's turn, opening of the answer).
        stop_ids: ids that end an answer.
        example_words: the words of the examples' answers in lower case, by their ids.
        is_chat: whether the model has a chat template.
    """

    tokenizer: PlainTokenizer
    prefix: np.ndarray
    turn: np.ndarray
    shown: np.ndarray
    closing: np.ndarray
    stop_ids: frozenset[int]
    example_words: dict[int, str]
    is_chat: bool

    def plain_ids(self, text: str) -> np.ndarray:
        """Ids [n] of a text, never a control token among them."""
        return self.tokenizer.encode(text).ids.astype(np.int64)

    def foreign_to(self, text: str) -> list[int]:
        """Ids of what the examples answered and a text does not say."""
        said = text.lower()
        return [index for index, word in self.example_words.items() if word not in said]

    def task_ids(self) -> np.ndarray:
        """Ids [n] of what is said before the question."""
        return self.plain_ids(TASK)

    def question_ids(self, question: str) -> np.ndarray:
        """Ids [n] of the question alone."""
        return self.plain_ids(QUESTION + question.strip())


def build_prompt(tokenizer: Any, generation_config: Any) -> Prompt:
    """Take a transformers tokenizer's chat template apart.

    Raises:
        ModelError: a template that drops or repeats the user's message.
    """
    control = _stop_ids(generation_config, tokenizer)
    is_chat = bool(getattr(tokenizer, "chat_template", None))
    before, between, after = "", "\n\n", PLAIN_ANSWER
    shown = between
    if is_chat:
        before, between, after = _turns(tokenizer, [])
        _, shown, _ = _turns(tokenizer, _example_turns())
        control |= _turn_end(tokenizer)
    prefix = _one_bos(tokenizer, _ids(tokenizer, before))
    plain = PlainTokenizer(tokenizer.backend_tokenizer, control)
    return Prompt(
        tokenizer=plain,
        prefix=prefix,
        turn=_ids(tokenizer, between),
        shown=_ids(tokenizer, shown),
        closing=_ids(tokenizer, after),
        stop_ids=frozenset(control),
        example_words=_example_words(plain, tokenizer),
        is_chat=is_chat,
    )


def _turns(tokenizer: Any, examples: list[dict[str, str]]) -> tuple[str, str, str]:
    """What the template writes before the document, between it and the question, and after."""
    conversation = [
        {"role": "user", "content": FIRST_MARKER},
        {"role": "assistant", "content": ACKNOWLEDGED},
        *examples,
        {"role": "user", "content": MARKER},
    ]
    with contextlib.suppress(ModelError):  # a template that takes no answers
        text = _render(tokenizer, conversation)
        before, _, rest = text.partition(FIRST_MARKER)
        if text.count(FIRST_MARKER) == rest.count(MARKER) == text.count(MARKER) == 1:
            between, _, after = rest.partition(MARKER)
            return before, between, after
    # A template that drops earlier turns: document and question share one.
    pieces = _render(tokenizer, conversation[-1:]).split(MARKER)
    if len(pieces) != 2:
        raise ModelError("the model's chat template does not keep the user's message as it is.")
    return pieces[0], "\n\n", pieces[1]


def _example_turns() -> list[dict[str, str]]:
    turns = []
    for text, question, answer in EXAMPLES:
        asked = f"{text}\n\n{TASK}{QUESTION}{question}"
        turns.append({"role": "user", "content": asked})
        turns.append({"role": "assistant", "content": answer})
    return turns


def _example_words(plain: PlainTokenizer, tokenizer: Any) -> dict[int, str]:
    """Ids of whole words only: a piece of a word stands in too many others."""
    words = {}
    for _, _, answer in EXAMPLES:
        whole = re.findall(r"\w+", answer.lower())
        for text in (answer, " " + answer):
            for index in plain.encode(text).ids.tolist():
                word = tokenizer.decode([index]).strip().lower()
                if len(word) > 3 and word in whole:
                    words[int(index)] = word
    return words


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
