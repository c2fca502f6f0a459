"""One question to one memory: recall its passages, re-read them, ask, answer.

All of it happens between the memory's mark and its rollback: a question leaves no trace.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from infllm_cli import model_size, prompts, quoting, recall
from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.echo import Echo
from infllm_cli.events import Answer, AskEvent, Looked, Quoted, TokenOut
from infllm_cli.evidence import AttentionRecord, Passage
from infllm_cli.plain_answer import PlainAnswer
from infllm_cli.quotable import is_prose, stands_alone, widen
from infllm_cli.recalling import Recalling
from infllm_cli.sampling import (
    Answering,
    AnswerOptions,
    Quoting,
    Sampler,
    is_looping,
    lists_again,
)
from infllm_cli.voices import Voice, follow, fresh_state, mixture, weigh
from infllm_cli.watching import Watching

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader


class Asking:
    """The course of one question; `steps` yields its events, the last of them the `Answer`.

    Args:
        told: what the user has said before, and not asked.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        question: str,
        options: AnswerOptions,
        told: Sequence[str] = (),
    ) -> None:
        self.reader = reader
        self.memory = memory
        self.question = question
        self.options = options
        self.told = told
        self.prompt = reader.prompt
        self.alone = options.answering is Answering.PASSAGES
        self._quoted_after: float | None = None  # seconds

    def steps(self) -> Iterator[AskEvent]:
        """Ask; the memory is as before when the iterator ends or is closed."""
        began = time.perf_counter()
        memory = self.memory
        recalling = Recalling(self.reader, memory, self.question, self.options, self._is_small)
        told = None
        if self._is_small and self.options.answering is Answering.BOTH:
            told = recalling.told(self.told)
        fused = np.zeros(len(memory.passages))
        if told is None:
            fused = yield from recalling.passages()
        first = None if self.alone else memory.first_position
        record = AttentionRecord(memory.document, memory.tokens, memory.passages, first)
        quote = sentence = None
        if told is None and (self._quotes() or self.options.answering is Answering.BOTH):
            sentence = recalling.sentence(fused)
        if sentence is not None:
            if self._quotes():
                quote = self._quote(sentence, record)
                self._quoted_after = time.perf_counter() - began
                yield Quoted(quote)
            if fused.any():  # what is quoted is re-read, too
                fused[sentence.passage] = fused.max() + 1
        if not self.alone:  # behind the quotation, which need not wait for it
            neutral = recalling.neutral()
            record.expect(neutral.asked, neutral.closed)
        sizes = np.diff(memory.passages.borders)
        budget = model_size.reread_tokens(self.options.reread_tokens, self.reader.parameters)
        # More of them distract the smallest models.
        passages = recall.choose(fused, sizes, budget, neighbours=not self._is_tiny)
        with ExitStack() as stack:
            voices = []
            if not self.alone:
                stack.enter_context(memory.state.question())
                # What is attended whole need not be read again.
                behind = [] if memory.whole or not self._is_tiny else passages
                voices.append(self._memory_voice(behind, record))
            if self.alone:
                voices.append(self._passages_voice(passages, record))
            elif told is not None:
                voices.append(self._text_voice(told))
            elif passages and self._wants_sentence and sentence and self._stands_alone(sentence):
                voices.append(self._sentence_voice(sentence))
                passages = [] if memory.whole else passages
            elif passages:
                beside = AttentionRecord(memory.document, memory.tokens, memory.passages, None)
                voices.append(self._passages_voice(passages, beside))
                if not (memory.whole or self._is_tiny):
                    voices[0].weight = model_size.MEMORY_BESIDE_PASSAGES
            answer = yield from self._answer(voices, passages, quote, began)
            yield replace(answer, supported=False if recalling.foreign else None)

    def _quotes(self) -> bool:
        wish, both = self.options.quote, self.options.answering is Answering.BOTH
        return wish is Quoting.ALWAYS or (wish is Quoting.AUTO and both and self._is_small)

    @property
    def _is_small(self) -> bool:
        """Whether the model misremembers what it has just read."""
        return self.reader.parameters < model_size.QUOTED_BELOW

    @property
    def _is_tiny(self) -> bool:
        """Whether it reads a sentence better than passages."""
        return self.reader.parameters < model_size.SENTENCE_BELOW

    @property
    def _wants_sentence(self) -> bool:
        """Whether a sentence is asked alone rather than the passages."""
        return self._is_small and (self.memory.whole or self._is_tiny)

    # -- quotation ----------------------------------------------------------------------------

    def _quote(self, sentence: quoting.Sentence, record: AttentionRecord) -> Passage:
        """What is shown of a sentence: itself and what stands around it."""
        document = self.memory.document
        text = document.text
        if self._stands_alone(sentence):
            return record.span(*self._around(sentence))
        _, start, end = document.own(*widen(text, *sentence.chars))
        passage = record.span(start, end)
        return replace(passage, text=textwrap.dedent(text[start:end]))

    def _stands_alone(self, sentence: quoting.Sentence) -> bool:
        return stands_alone(self.memory.document.text, *sentence.chars)

    def _around(self, sentence: quoting.Sentence, **limits: float) -> tuple[int, int]:
        """First and last (excluded) character of a sentence and those around it: `surround`."""
        memory = self.memory
        text = memory.document.text
        near = range(max(0, sentence.passage - 2), sentence.passage + 3)
        near = [index for index in near if index < len(memory.passages)]
        around = quoting.sentences_of(text, memory.tokens, memory.passages, near)
        return quoting.surround(self.question, text, memory.words, around, sentence.chars, **limits)

    # -- contexts -----------------------------------------------------------------------------

    def _memory_voice(self, passages: list[int], record: AttentionRecord) -> Voice:
        """The memory, with passages once more behind the document."""
        prompt = self.prompt
        voice = Voice(self.reader, self.memory.state, record)
        if passages:
            # Read like the document: scoring every stored key for each of these tokens would cost
            # more than it finds.
            voice.read(self._reread(passages, record, voice.start, leading=True))
        voice.read(prompt.turn)
        # The task is the same for every question: where it looks is no evidence.
        record.calibrate(voice.skim(prompt.task_ids())[-1])
        return voice

    def _sentence_voice(self, sentence: quoting.Sentence) -> Voice:
        """What stands around the best sentence, alone.

        With it instead of all passages the default model answers 13 instead of 9 of 24 questions
        on the sample story, and as many (4 of 24) on a novel, in a quarter of the tokens.
        """
        document = self.memory.document
        shown = self._around(sentence, most=quoting.SHOWN_CHARS, enough=math.inf)
        _, start, end = document.own(*shown)
        return self._text_voice(document.text[start:end])

    def _text_voice(self, text: str) -> Voice:
        """A few sentences, alone."""
        prompt = self.prompt
        voice = Voice(self.reader, fresh_state(self.reader))
        ids = prompt.plain_ids(text.strip() + "\n\n")
        voice.read(np.concatenate([prompt.one_turn[0], ids, prompt.task_ids()]))
        return voice

    def _passages_voice(self, passages: list[int], record: AttentionRecord) -> Voice:
        """The passages alone, as text."""
        prompt = self.prompt
        voice = Voice(self.reader, fresh_state(self.reader), record)
        voice.state.watch_layers = self.memory.state.watch_layers
        opening = prompt.one_turn[0]
        text = self._reread(passages, record, voice.start + len(opening))
        ids = np.concatenate([opening, text, prompt.plain_ids("\n\n" if passages else "")])
        voice.read(ids)
        record.calibrate(voice.skim(prompt.task_ids())[-1])
        return voice

    def _reread(
        self,
        chosen: list[int],
        record: AttentionRecord,
        position: int,
        *,
        leading: bool = False,
    ) -> np.ndarray:
        """Ids [n] of passages, to stand from `position` on; `leading`: behind other text."""
        memory = self.memory
        parts: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        between = self.prompt.plain_ids(prompts.BETWEEN_PASSAGES)
        for number, index in enumerate(chosen):
            joined = number > 0 and chosen[number - 1] == index - 1 and self._is_cut_before(index)
            if (number or leading) and not joined:
                parts.append(between)
                position += len(between)
            first, last = memory.passages.borders[index : index + 2]
            parts.append(memory.tokens.ids[first:last].astype(np.int64))
            record.reread(position, int(first), int(last - first))
            position += int(last - first)
        return np.concatenate(parts)

    def _is_cut_before(self, index: int) -> bool:
        """Whether a passage begins within a line or sentence, because there was no better border.

        Only there do neighbours stand together as they are: of 24 questions on the sample story the
        default model answers 15 from passages parted by dots, and 14 where neighbours are not.
        """
        memory = self.memory
        text, start = memory.document.text, int(memory.passages.borders[index])
        end, begin = int(memory.tokens.spans[start - 1, 1]), int(memory.tokens.spans[start, 0])
        around = text[max(end - 8, 0) : begin + 2]
        return "\n" not in around and not is_prose(text[max(end - 8, 0) : end])

    # -- answer -------------------------------------------------------------------------------

    def _answer(
        self,
        voices: list[Voice],
        passages: list[int],
        quote: Passage | None,
        began: float,
    ) -> Iterator[Looked | TokenOut]:
        """Ask, and write the answer token by token; it is returned."""
        prompt, heard = self.prompt, voices[0]
        watching = Watching(voices)
        asked = prompt.question_ids(self.question)
        prefill = prompt.prefill_ids(self.options.prefill)
        for voice in voices:
            own = voice is heard and not self.alone
            closing = prompt.closing if own else prompt.one_turn[1]
            ids = np.concatenate([asked, closing, prefill])
            for index, step in enumerate(voice.ask(ids)):
                looked = watching.asked(voice, step, index)
                if looked is not None:
                    yield looked
        sampler = Sampler(self.options)
        echo = Echo(self.reader.loaded.tokenizer, self.question)
        decoder = IncrementalDecoder(self.reader.loaded.tokenizer.backend_tokenizer)
        plain = None if prompt.is_chat else PlainAnswer()
        written: list[int] = []
        text = ""
        first_token_seconds = 0.0
        finish = "length"
        while True:
            token = sampler(echo.forbid(mixture(voices), text))
            if not written:
                first_token_seconds = time.perf_counter() - began
            if token in prompt.stop_ids:
                finish = "stop"
                break
            written.append(token)
            certain = decoder.push(token)
            if plain is not None:
                certain = plain.push(certain)
            text += certain
            if certain:
                yield TokenOut(certain)
            if plain is not None and plain.ended:
                finish = "stop"
                break
            if len(written) >= self.options.max_tokens:
                break
            if is_looping(written) or lists_again(text):
                finish = "repeat"
                break
            weigh(voices, token)
            watching.before = time.perf_counter()
            yield watching.answered(follow(voices, token), len(written) - 1, certain)
        self.memory.note_device_bytes()
        rest = decoder.finish()
        if plain is not None:
            rest = plain.push(rest) + plain.finish()
        if rest:
            text += rest
            yield TokenOut(rest)
        return Answer(
            question=self.question,
            text=text.strip(),
            finish=finish,
            tokens=len(written),
            seconds=time.perf_counter() - began,
            first_token_seconds=first_token_seconds,
            quote=quote,
            quote_seconds=self._quoted_after,
            evidence=watching.passages(),
            reread=[watching.record.passage(index) for index in passages],
        )
