"""Questions one after the other on one memory, each knowing what was said before.

What was asked and answered stays in the memory's window behind the document and, when it outgrows
that, goes into blocks, where lookup finds it like any text. The passages that are re-read for a
question do not stay: only question and answer do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from infllm_cli import model_size
from infllm_cli.errors import ModelError
from infllm_cli.events import Answer, AskEvent, TokenOut
from infllm_cli.memory.step import Phase
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.statements import NOTED, asks, only_tells

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

_MARKS = ("\x02question\x03", "\x02answer\x03", "\x02next\x03")
PLAIN_NEXT = "\n\n"  # where there is no chat template, or none that takes answers


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, its answer, and the tokens that both take in the memory."""

    question: str
    answer: Answer
    tokens: int


class Conversation:
    """Turns on one memory; use `converse` to begin one.

    Attributes:
        turns: what was said, oldest first.
    """

    def __init__(self, reader: Reader, memory: Memory) -> None:
        self.reader, self.memory = reader, memory
        self.turns: list[Turn] = []
        self._began = memory.state.tokens
        self._next = _next_turn(reader)

    @property
    def tokens(self) -> int:
        """Tokens of all turns."""
        return self.memory.state.tokens - self._began

    @property
    def tokens_in_window(self) -> int | None:
        """Of these, those that every layer still has in its window; None: the policy has none."""
        if not self.memory.state.tiered:
            return None
        starts = [layer.window.start for layer in self.memory.state.tiered]
        return self.memory.state.tokens - max([self._began, *starts])

    @property
    def told(self) -> list[str]:
        """What the user has said and not asked."""
        return [turn.question.strip() for turn in self.turns if not asks(turn.question)]

    def ask_steps(self, question: str, options: AnswerOptions | None = None) -> Iterator[AskEvent]:
        """Ask a question; events as of `Reader.ask_steps`. The answer becomes part of the memory.

        Closed before its end, it leaves the memory as before: see `remember`. What only tells
        something (`only_tells`) is noted, and no model asked, where the model is a small one.
        """
        options = options or AnswerOptions()
        assert options.answering is not Answering.PASSAGES, "a conversation is in the memory"
        if only_tells(question) and self.reader.parameters < model_size.QUOTED_BELOW:
            noted = Answer(question, NOTED, "noted", 0, 0.0, 0.0)
            self.remember(noted)
            yield TokenOut(NOTED)
            yield noted
            return
        answer = None
        for event in self.reader.ask_steps(self.memory, question, options, told=self.told):
            if isinstance(event, Answer):
                answer = event
            else:
                yield event
        # Only now is the memory as before the question.
        assert answer is not None
        self.remember(answer)
        yield answer

    def remember(self, answer: Answer) -> None:
        """Let a question and its answer, however far it went, become part of the memory."""
        prompt, state = self.reader.prompt, self.memory.state
        ids = np.concatenate(
            [
                prompt.turn if not self.turns else self._next[:0],
                # Not in the form that a question is asked in: a small model that sees the same form
                # again gives the same answer again.
                prompt.plain_ids(answer.question.strip()),
                prompt.closing,
                prompt.plain_ids(answer.text),
                self._next,
            ]
        )
        for piece in torch.from_numpy(ids).split(self.reader.config.chunk_tokens):
            self.reader.forward(state, Phase.READ, piece)
        self.memory.note_device_bytes()
        self.turns.append(Turn(answer.question, answer, len(ids)))

    def transcript(self) -> str:
        """All turns as Markdown, with the lines of the best evidence."""
        from infllm_cli.wording import place

        lines = [f"# {self.memory.document.name}"]
        for turn in self.turns:
            lines += ["", f"**{turn.question}**", "", turn.answer.text]
            if turn.answer.evidence:
                best = "; ".join(place(passage) for passage in turn.answer.evidence[:3])
                lines += ["", f"(Evidence: {best}.)"]
        return "\n".join(lines) + "\n"


@contextlib.contextmanager
def converse(reader: Reader, memory: Memory) -> Iterator[Conversation]:
    """Begin a conversation; when it is over the memory is as before."""
    assert memory.complete, "a document is talked about after it has been read"
    with memory.state.question():
        yield Conversation(reader, memory)


def _next_turn(reader: Reader) -> np.ndarray:
    """Ids [n] between an answer and the next question, as the chat template writes them."""
    tokenizer = reader.loaded.tokenizer
    between = PLAIN_NEXT
    if reader.prompt.is_chat:
        question, answer, after = _MARKS
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": after},
        ]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs: anything may be raised
            raise ModelError(f"the model's chat template takes no conversation: {error}") from error
        if text.count(answer) == text.count(after) == 1:
            between = text.partition(answer)[2].partition(after)[0]
    ids = tokenizer.encode(between, add_special_tokens=False)
    return np.asarray(ids, dtype=np.int64)
