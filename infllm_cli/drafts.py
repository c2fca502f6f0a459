"""Sentences that the model writes, as far as the text vouches for them.

A sentence is kept when every name and number in it stands in what it was written from, when most of
its words do, and when it does not say again what was said. A loop ends the draft.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.sampling import is_looping
from infllm_cli.sentences import split_sentences
from infllm_cli.words import words_of

if TYPE_CHECKING:
    from infllm_cli.reader import Reader

LEAST_SHARED = 0.5  # of a sentence's longer words, those that its source has, too
MOST_REPEATED = 0.5  # of a sentence's 3-grams, those that were said before
NO_REPEAT = 4  # tokens: no run of so many is written twice
TOKENS_PER_WORD = 2.2  # at most, in most languages and vocabularies
_NAMES = re.compile(r"(?<=[\w,;:’')] )[^\W\d_a-z][^\W\d_]+|\d+(?:[.,]\d+)*")
# "Here is a summary:", "The text is about ...:" and the like introduce; they tell nothing.
_PREAMBLE = re.compile(r"^[^.!?\n]{0,80}:\s*\n+")
_LIST_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+", re.M)


class Source:
    """The text that sentences are written from."""

    def __init__(self, text: str) -> None:
        self._words = set(words_of(text))

    def vouches_for(self, sentence: str, said: list[str]) -> bool:
        """Whether a sentence may be kept after those already said."""
        words = words_of(sentence)
        long = [word for word in words if len(word) > 3]
        if len(words) < 4 or not long:
            return False
        named = [word for name in _NAMES.findall(sentence) for word in words_of(name)]
        if any(word not in self._words for word in named):
            return False
        if sum(word in self._words for word in long) < LEAST_SHARED * len(long):
            return False
        grams = set(zip(words, words[1:], words[2:], strict=False))
        before = {g for s in said for g in _grams(words_of(s))}
        return len(grams & before) <= MOST_REPEATED * len(grams)


def _grams(words: list[str]) -> Iterator[tuple[str, ...]]:
    return zip(words, words[1:], words[2:], strict=False)


class Draft:
    """One draft: `sentences` yields what is kept of it.

    Attributes:
        steps: one per token: where it looked.
        dropped: sentences that nothing vouched for.
    """

    def __init__(
        self,
        reader: Reader,
        state: ModelMemory,
        logits: Tensor,
        *,
        keep_from: int | None,
        most_words: int,
    ) -> None:
        self._reader = reader
        self._state = state
        self._logits = logits
        self._keep_from = keep_from
        self._most_words = most_words
        self._most_tokens = int(TOKENS_PER_WORD * most_words) + 16
        self.steps: list[Step] = []
        self.dropped = 0

    def sentences(self, source: Source) -> Iterator[str]:
        """Write; each sentence as soon as it is complete."""
        said: list[str] = []
        text = ""
        done = 0
        for piece, last in self._pieces():
            text += piece
            body = _LIST_MARK.sub("", _PREAMBLE.sub("", text))
            # The last one may go on, unless the model has ended.
            complete = [s.text for s in split_sentences(body)]
            complete = complete if last == "stop" else complete[:-1]
            for sentence in complete[done:]:
                done += 1
                if sentence[-1:] in ".!?。！？…\"'”’)" and source.vouches_for(sentence, said):
                    said.append(sentence)
                    yield sentence
                else:
                    self.dropped += 1
            if sum(len(s.split()) for s in said) >= self._most_words:
                return

    def _pieces(self) -> Iterator[tuple[str, str]]:
        """Text as it becomes certain, and how the draft ended: "", "stop", "length" or "repeat"."""
        reader, logits = self._reader, self._logits
        decoder = IncrementalDecoder(reader.loaded.tokenizer.backend_tokenizer)
        written: list[int] = []
        while True:
            token = int(_without_repeats(logits, written).argmax())
            if token in reader.prompt.stop_ids:
                yield decoder.finish(), "stop"
                return
            written.append(token)
            if len(written) >= self._most_tokens or is_looping(written):
                yield decoder.push(token), "length"
                return
            yield decoder.push(token), ""
            step, logits = reader.forward(
                self._state,
                Phase.ANSWER,
                torch.tensor([token]),
                keep_from=self._keep_from,
                want_logits=True,
            )
            self.steps.append(step)


def _without_repeats(logits: Tensor, written: list[int]) -> Tensor:
    """Logits [V] with the lowest number for what would end a run of tokens for a second time."""
    tail = tuple(written[len(written) - NO_REPEAT + 1 :])
    if len(tail) < NO_REPEAT - 1:
        return logits
    ends = [
        written[i + NO_REPEAT - 1]
        for i in range(len(written) - NO_REPEAT + 1)
        if tuple(written[i : i + NO_REPEAT - 1]) == tail
    ]
    if not ends:
        return logits
    lowest = torch.finfo(logits.dtype).min
    return logits.index_fill(0, torch.tensor(ends, device=logits.device), lowest)


def push(
    reader: Reader, state: ModelMemory, phase: Phase, ids: np.ndarray, keep_from: int | None = None
) -> tuple[list[Step], Tensor | None]:
    """Let ids [n] go through the model, a chunk at a time: the steps, and the last logits [V]."""
    steps, logits = [], None
    for piece in torch.from_numpy(ids).split(reader.config.chunk_tokens):
        step, logits = reader.forward(
            state, phase, piece, keep_from=keep_from, want_logits=phase is Phase.ASK
        )
        steps.append(step)
    return steps, logits
