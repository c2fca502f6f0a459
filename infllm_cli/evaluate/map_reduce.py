"""Map-reduce, the usual way around a short context, to compare with: summaries of summaries.

The text is cut into chunks that the model takes as a whole; each is summarized on its own, then
neighbouring summaries together, again and again, until one is left. No chunk knows of another, no
memory is kept, and what the model writes stands as it is: what a script around a chat model does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.digests import PassDone
from infllm_cli.drafts import TOKENS_PER_WORD, push
from infllm_cli.errors import UsageError
from infllm_cli.memory.step import Phase
from infllm_cli.passages import Passages
from infllm_cli.plain_answer import PlainAnswer
from infllm_cli.reader import Reader
from infllm_cli.sampling import is_looping
from infllm_cli.summarizing import PIECE_WORDS, request_for
from infllm_cli.tokens import Tokens

USUAL_TOKENS = 3000  # of a chunk, where the model takes so many
LEAST_TOKENS = 64
BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class ChunkTold:
    """Chunk `number` of `total` has been summarized, in so many words."""

    number: int
    total: int
    words: int


@dataclass(frozen=True, slots=True)
class Reduced:
    """The one summary that is left.

    Attributes:
        finish: why it ends: the model ended it ("stop"), or it was cut at its greatest length
            ("length") or in a loop ("repeat").
        tokens: that the model read and wrote, all together.
    """

    text: str
    finish: str
    chunks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Told:
    """A summary, and what a further one is made from: never more ids than the model wrote."""

    text: str
    ids: np.ndarray
    finish: str


class MapReduce:
    """The course of one summary; `steps` yields its events, the last of them `Reduced`.

    Args:
        words: of the last summary, about; those before have `PIECE_WORDS`.
        map_tokens: of a chunk, at most; None: `USUAL_TOKENS`, or what the model takes.
        check: called between passes through the model; what it raises ends the summary.

    Attributes:
        map_tokens: of a chunk, and of summaries that are summarized together unless two are more.

    Raises:
        UsageError: the model's trained length does not hold such a chunk with request and answer.
    """

    def __init__(
        self,
        reader: Reader,
        words: int,
        map_tokens: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.reader, self.words, self._check = reader, words, check
        self._between = reader.prompt.plain_ids(BETWEEN)
        self._trained = reader.loaded.trained_length
        room = min(self._room(PIECE_WORDS), self._room(words))
        # Any two summaries can be made one: that is why there is an end.
        least = max(LEAST_TOKENS, 2 * self.most_written(PIECE_WORDS) + len(self._between))
        name = f"{reader.loaded.name}, trained on {self._trained:,} tokens,"
        if room < least:
            raise UsageError(f"--way map-reduce: {name} is too short for it; leave that way out.")
        if map_tokens is not None and not LEAST_TOKENS <= map_tokens <= room:
            raise UsageError(
                f"--map-tokens is {map_tokens}; {name} takes {LEAST_TOKENS} to {room:,} beside "
                "the request and its answer."
            )
        self.map_tokens = map_tokens or min(USUAL_TOKENS, room)
        self._tokens = 0

    def steps(self, tokens: Tokens, passages: Passages) -> Iterator[ChunkTold | PassDone | Reduced]:
        """Summarize a document."""
        chunks = cut_chunks(len(tokens), passages.borders, self.map_tokens)
        each = self.words if len(chunks) == 1 else PIECE_WORDS
        told: list[_Told] = []
        for number, (first, last) in enumerate(chunks, 1):
            told.append(self._write(tokens.ids[first:last].astype(np.int64), each))
            yield ChunkTold(number, len(chunks), _words(told[-1:]))
        done = 0
        while len(told) > 1:
            groups = groups_of([len(one.ids) for one in told], len(self._between), self.map_tokens)
            each = self.words if len(groups) == 1 else PIECE_WORDS
            fewer = [self._merge(told[first:last], each) for first, last in groups]
            assert len(fewer) < len(told), "every pass shrinks"
            done += 1
            yield PassDone(done, len(told), len(fewer), _words(told), _words(fewer))
            told = fewer
        yield Reduced(told[0].text, told[0].finish, len(chunks), self._tokens)

    def most_written(self, words: int) -> int:
        """Tokens of a summary of so many words, at most."""
        return min(int(TOKENS_PER_WORD * words) + 16, self._trained // 4)

    def _room(self, words: int) -> int:
        """Tokens of a text that is to be summarized in so many words, at most."""
        opening, asked = self._around(words)
        return self._trained - len(opening) - len(asked) - self.most_written(words)

    def _around(self, words: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids before [n] and behind [m] a text: both are one message of the user's."""
        opening, ending = self.reader.prompt.one_turn
        request = self.reader.prompt.plain_ids(f"{BETWEEN}{request_for(words, None)}")
        return opening, np.concatenate([request, ending])

    def _merge(self, group: Sequence[_Told], words: int) -> _Told:
        """One summary of several; of one, itself."""
        if len(group) == 1:
            return group[0]
        joined: list[np.ndarray] = []
        for one in group:
            if len(one.ids):
                joined += [self._between, one.ids] if joined else [one.ids]
        return self._write(np.concatenate(joined), words) if joined else group[0]

    def _write(self, ids: np.ndarray, words: int) -> _Told:
        """Let the model summarize ids [n], attended whole; greedy, to its end or a loop's."""
        reader, prompt = self.reader, self.reader.prompt
        opening, asked = self._around(words)
        most = self.most_written(words)
        length = len(opening) + len(ids) + len(asked) + most
        assert length <= self._trained, "dense attention within what the model was trained on"
        state = reader.empty_state(length, whole_tokens=self._trained)
        state.reserve(length)
        text_ids = torch.from_numpy(np.concatenate([opening, ids]))
        for piece in text_ids.split(reader.config.chunk_tokens):
            reader.forward(state, Phase.READ, piece)
            self._check()
        _, logits = push(reader, state, Phase.ASK, asked)
        assert logits is not None
        decoder = IncrementalDecoder(reader.loaded.tokenizer.backend_tokenizer)
        plain = None if prompt.is_chat else PlainAnswer()
        written: list[int] = []
        text = ""
        while True:
            token = int(logits.argmax())
            if token in prompt.stop_ids:
                finish = "stop"
                break
            written.append(token)
            certain = decoder.push(token)
            text += certain if plain is None else plain.push(certain)
            if plain is not None and plain.ended:
                finish = "stop"
                break
            if len(written) == most or is_looping(written):
                finish = "length" if len(written) == most else "repeat"
                break
            _, logits = reader.forward(state, Phase.ANSWER, torch.tensor([token]), want_logits=True)
            assert logits is not None
            self._check()
        rest = decoder.finish()
        text += rest if plain is None else plain.push(rest) + plain.finish()
        self._tokens += length - most + len(written)
        text = text.strip()
        again = prompt.plain_ids(text)
        # What was no text comes back longer than it was written.
        if len(again) > len(written):
            again = np.array(written, dtype=np.int64)
        return _Told(text, again, finish)


def cut_chunks(total: int, borders: np.ndarray, most: int) -> list[tuple[int, int]]:
    """Spans that tile `total` tokens, about equal and none longer than `most`.

    Args:
        borders: [P + 1] tokens where a passage ends; a chunk does, too, where one is within reach.
    """
    spans = []
    low = 0
    while low < total:
        rest = total - low
        high = low + -(-rest // -(-rest // most))
        if high < total:
            near = borders[(borders > low) & (borders <= low + most)]
            if len(near):
                high = int(near[np.abs(near - high).argmin()])
        spans.append((low, high))
        low = high
    return spans


def groups_of(lengths: Sequence[int], between: int, most: int) -> list[tuple[int, int]]:
    """Neighbours together: spans [first, last) of summaries of these lengths in tokens.

    About `most` tokens in a group, `between` of them between two summaries, and never one summary
    alone but the last: so of two or more there are always fewer groups.
    """
    spans: list[tuple[int, int]] = []
    first, size = 0, 0
    for index, length in enumerate(lengths):
        if index - first >= 2 and size + between + length > most:
            spans.append((first, index))
            first, size = index, 0
        size += length + (between if index > first else 0)
    return [*spans, (first, len(lengths))]


def _words(told: Sequence[_Told]) -> int:
    return sum(len(one.text.split()) for one in told)
