"""One question to one memory: recall its passages, re-read them, ask, answer.

All of it happens between the memory's mark and its rollback: a question leaves no trace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infllm_cli import prompts, recall
from infllm_cli.contrast import Continuation, contrasted
from infllm_cli.decoding import IncrementalDecoder
from infllm_cli.events import Answer, Looked, TokenOut
from infllm_cli.evidence import AttentionRecord, mass_on_document
from infllm_cli.likelihood import can_judge, question_likelihood
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.recall import Impression
from infllm_cli.sampling import Answering, AnswerOptions, Sampler, is_looping

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader


class Asking:
    """The course of one question; `steps` yields its events, the last of them the `Answer`."""

    def __init__(
        self, reader: Reader, memory: Memory, question: str, options: AnswerOptions
    ) -> None:
        self.reader = reader
        self.memory = memory
        self.question = question
        self.options = options
        self.prompt = reader.prompt
        self.state = memory.state

    def steps(self) -> Iterator[Looked | TokenOut | Answer]:
        """Ask; the memory is as before when the iterator ends or is closed."""
        began = time.perf_counter()
        memory = self.memory
        alone = self.options.answering is Answering.PASSAGES
        if alone:
            self.state = self._fresh()
        passages: list[int] = []
        if alone or (self.options.answering is Answering.BOTH and not memory.whole):
            passages = self._recall()
        neutral = None if alone else self._neutral()
        record = AttentionRecord(
            memory.document,
            memory.tokens,
            memory.passages,
            None if alone else memory.first_position,
            neutral_ask=neutral and neutral.asked,
            neutral_answer=neutral and neutral.closed,
        )
        with self.state.question():
            start = self.state.tokens
            if passages:
                self._reread(passages, record, start)
            self._pass(Phase.READ, self._turn(), start)
            yield from self._answer(passages, record, start, began)

    def _fresh(self) -> ModelMemory:
        """A memory of nothing but the prompt's beginning, for passages without their document."""
        reader = self.reader
        trained = reader.loaded.trained_length
        state = ModelMemory(
            reader.loaded.layers_for(reader.config.context_tokens),
            reader.config,
            trained_length=trained,
            whole_tokens=trained,
        )
        if len(self.prompt.prefix):
            reader.forward(state, Phase.READ, torch.from_numpy(self.prompt.prefix))
        return state

    def _turn(self) -> np.ndarray:
        """Ids [n] between the document and the turn that asks."""
        return self.prompt.shown if self.options.contrast else self.prompt.turn

    # -- recall -------------------------------------------------------------------------------

    def _neutral(self) -> Impression:
        """Where a question about nothing in particular looks; found once, the same for all."""
        shown = bool(self.options.contrast)
        if shown not in self.memory.neutral:
            self.memory.neutral[shown] = self._impression(recall.NEUTRAL_QUESTION, closing=True)
        return self.memory.neutral[shown]

    def _impression(self, question: str, *, closing: bool = False) -> Impression:
        """Put a question to the memory without an answer: where do its own words look?

        `closing` also tells where what follows the question looks.
        """
        prompt, memory = self.prompt, self.memory

        def mass(steps: list[Step]) -> np.ndarray:
            first, count = memory.first_position, len(memory.tokens)
            return np.mean([mass_on_document(step, first, count) for step in steps], axis=0)

        with memory.state.question():
            start = memory.state.tokens
            # Nobody asks where these look: a cheap lookup is enough.
            self._pass(Phase.READ, np.concatenate([self._turn(), prompt.task_ids()]), start)
            asked = self._pass(Phase.ASK, prompt.question_ids(question), start)
            closed = self._pass(Phase.ASK, prompt.closing, start) if closing else asked
        return Impression(recall.attention_profile(asked), mass(asked), mass(closed))

    def _recall(self) -> list[int]:
        """The passages to re-read, in document order."""
        memory, most = self.memory, self.options.candidates
        words = memory.words.scores(self.question)
        rankings, weights = [words], [1.0]
        if self.options.answering is Answering.PASSAGES or most == 0:
            pass
        elif can_judge(memory.state):
            judged = recall.candidates(words, most)
            if judged:
                rankings.append(self._likelihood(words, judged))
                weights.append(recall.LIKELIHOOD_WEIGHT)
        else:
            profile = self._impression(self.question).profile
            if profile.size:
                per_block = recall.attention_scores(profile, self._neutral().profile)
                rankings.append(memory.to_passages(per_block))
                weights.append(recall.ATTENTION_WEIGHT)
        fused = recall.fuse(rankings, weights)
        sizes = np.diff(memory.passages.borders)
        return recall.choose(fused, sizes, self.options.reread_tokens)

    def _likelihood(self, words: np.ndarray, judged: list[int]) -> np.ndarray:
        """Of the question behind each passage [P]; those not judged are all the same, and least."""
        memory, prompt = self.memory, self.prompt
        borders = memory.passages.borders + memory.first_position
        found = question_likelihood(
            self.reader.model,
            memory.state,
            [(int(borders[index]), int(borders[index + 1])) for index in judged],
            prompt.plain_ids("\n\n" + prompts.QUESTION),
            prompt.plain_ids(self.question.strip()),
        )
        likelihood = np.full(len(words), found.min() - 1)
        likelihood[judged] = found
        return likelihood

    def _reread(self, chosen: list[int], record: AttentionRecord, start: int) -> None:
        """Let passages go through the model again, as text behind the document."""
        memory = self.memory
        parts: list[np.ndarray] = []
        position = self.state.tokens
        between = self.prompt.plain_ids(prompts.BETWEEN_PASSAGES)
        for index in chosen:
            if parts or record.first is not None:
                parts.append(between)
                position += len(between)
            first, last = memory.passages.borders[index : index + 2]
            parts.append(memory.tokens.ids[first:last].astype(np.int64))
            record.reread(position, int(first), int(last - first))
            position += int(last - first)
        # Read like the document: scoring every stored key for each of these tokens would cost
        # more than it finds.
        self._pass(Phase.READ, np.concatenate(parts), start)

    # -- answer -------------------------------------------------------------------------------

    def _answer(
        self, passages: list[int], record: AttentionRecord, start: int, began: float
    ) -> Iterator[Looked | TokenOut | Answer]:
        prompt, state = self.prompt, self.state
        task = prompt.task_ids()
        # The task is the same for every question: where it looks is no evidence.
        record.calibrate(self._pass(Phase.ASK, task, start)[-1])
        ids = np.concatenate([prompt.question_ids(self.question), prompt.closing])
        logits = None
        for index, piece in enumerate(self._pieces(ids)):
            before = time.perf_counter()
            step, logits = self.reader.forward(
                state, Phase.ASK, piece, keep_from=start, want_logits=True
            )
            yield _looked(step, index, "", record, before)
        assert logits is not None
        strength = self.options.contrast
        with contextlib.ExitStack() as stack:
            without = None
            if strength:
                asked = self.reader.contrast.question(np.concatenate([task, ids]))
                without = stack.enter_context(asked)
            yield from self._write(logits, without, strength, passages, record, start, began)

    def _write(
        self,
        logits: Tensor,
        without: Continuation | None,
        strength: float,
        passages: list[int],
        record: AttentionRecord,
        start: int,
        began: float,
    ) -> Iterator[Looked | TokenOut | Answer]:
        """The answer, token by token, from the logits [V] of its first."""
        prompt, state = self.prompt, self.state
        sampler = Sampler(self.options)
        decoder = IncrementalDecoder(self.reader.loaded.tokenizer.backend_tokenizer)
        written: list[int] = []
        text = ""
        first_token_seconds = 0.0
        finish = "length"
        # The examples' own answers are none, unless the passages say the same.
        reread = [record.passage(index) for index in passages]
        foreign = prompt.foreign_to("\n".join(passage.text for passage in reread))
        while True:
            if without is not None:
                logits = contrasted(logits, without.logits, strength, foreign)
            token = sampler(logits)
            if not written:
                first_token_seconds = time.perf_counter() - began
            if token in prompt.stop_ids:
                finish = "stop"
                break
            written.append(token)
            certain = decoder.push(token)
            text += certain
            if certain:
                yield TokenOut(certain)
            if len(written) >= self.options.max_tokens:
                break
            if is_looping(written):
                finish = "repeat"
                break
            before = time.perf_counter()
            if without is not None:
                without.follow(token)
            step, logits = self.reader.forward(
                state, Phase.ANSWER, torch.tensor([token]), keep_from=start, want_logits=True
            )
            assert logits is not None
            yield _looked(step, len(written) - 1, certain, record, before)
        self.memory.note_device_bytes()
        rest = decoder.finish()
        if rest:
            text += rest
            yield TokenOut(rest)
        yield Answer(
            question=self.question,
            text=text.strip(),
            finish=finish,
            tokens=len(written),
            seconds=time.perf_counter() - began,
            first_token_seconds=first_token_seconds,
            evidence=record.passages(),
            reread=reread,
        )

    # -- passes ---------------------------------------------------------------------------------

    def _pieces(self, ids: np.ndarray) -> list[Tensor]:
        return list(torch.from_numpy(ids).split(self.reader.config.chunk_tokens))

    def _pass(self, phase: Phase, ids: np.ndarray, keep_from: int) -> list[Step]:
        """Let ids [n] go through the model, a chunk at a time."""
        forward, state = self.reader.forward, self.state
        return [forward(state, phase, ids, keep_from=keep_from)[0] for ids in self._pieces(ids)]


def _looked(step: Step, index: int, token: str, record: AttentionRecord, before: float) -> Looked:
    share, per_passage = record.add(step)
    return Looked(
        phase=step.phase,
        index=index,
        token=token,
        loaded_blocks=step.loaded_blocks,
        share=share,
        passages=record.best(per_passage, 3),
        seconds=time.perf_counter() - before,
        mass=per_passage,
        layers=record.layers,
    )
