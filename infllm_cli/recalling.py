"""What a question recalls of a document before it is asked: passages ranked, a sentence to quote.

Where the text holds the question's words, words choose. Else it is asked in other words, and the
sentences that mean the same are looked for (`meaning`). Without an encoder the memory is asked how
likely each passage makes the question.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from infllm_cli import prompts, quoting, recall
from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.events import Encoding, Remark
from infllm_cli.evidence import mass_on_document
from infllm_cli.likelihood import can_judge, question_likelihood
from infllm_cli.meaning import Meanings
from infllm_cli.meaning_files import recall_meanings
from infllm_cli.memory.step import Step
from infllm_cli.models.encoders import OFF, is_default
from infllm_cli.recall import Impression
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.voices import Voice
from infllm_cli.words import words_of

if TYPE_CHECKING:
    from infllm_cli.encoder import SentenceEncoder
    from infllm_cli.reader import Memory, Reader

# A question whose nearest sentence is farther than this, by the cosine, is about something else:
# among more sentences one is nearer by chance. Over stretches of 5 to 1,500 sentences of novels and
# dumps nine of ten such questions lie below `FOREIGN_LEAST` + `FOREIGN_GROWTH` ln n. Of 86 tuning
# questions that a story, a novel and a dump of sources answer, 2 lie below as well (both on the
# sources); of 16 about something else 14; of 24 on what they only do not tell none.
FOREIGN_LEAST, FOREIGN_GROWTH, FOREIGN_MOST = 0.13, 0.0345, 0.37
LOT = 512  # sentences that are encoded between two words about the progress


class Recalling:
    """Recall for one question.

    Args:
        is_small: whether what is recalled is needed even where the model attends everything.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        question: str,
        options: AnswerOptions,
        is_small: bool,
    ) -> None:
        self.reader, self.memory = reader, memory
        self.question, self.options = question, options
        self.is_small = is_small
        self.prompt = reader.prompt
        self.foreign = False  # whether nothing in the document comes near the question
        self._literal = False  # whether its numbers are found
        # Of all sentences and passages, where the question is in other words: [n] and [P].
        self._near: tuple[np.ndarray, np.ndarray] | None = None

    def passages(self) -> Iterator[Remark | Encoding]:
        """Find how well each passage fits the question; returned, [P]: 0 where nothing is known."""
        memory, answering = self.memory, self.options.answering
        script = answering is Answering.PASSAGES
        whole = memory.whole and not script
        if answering is Answering.MEMORY or (whole and not self.is_small):
            return np.zeros(len(memory.passages))
        if script:  # the usual one: plain BM25
            return recall.fuse([memory.words.scores(self.question, reaches=(0,))], [1.0])
        words = memory.words.scores(self.question)
        if self._sure(words):
            return recall.fuse([words], [1.0])
        encoder = yield from self._encoder()
        if encoder is not None and memory.sentences:
            meanings = yield from self._meanings(encoder)
            return self._by_meaning(words, meanings, encoder.encode([self.question])[0])
        return self._by_memory(words)

    def told(self, statements: Sequence[str]) -> str | None:
        """What the user said before, if it has more of the question's words than the document."""
        words = self.memory.words
        asked = sorted(set(words_of(self.question)))
        weights = words.telling(self.question)
        if not statements or not weights.any():
            return None
        scores = words.scores(self.question)
        best = words.coverage(self.question, int(scores.argmax())) if scores.any() else 0.0
        found = None
        for statement in statements:
            held = set(words_of(statement))
            part = float(weights[[word in held for word in asked]].sum() / weights.sum())
            if part >= recall.SURE and part > best:
                found, best = statement, part - 1e-9  # of equals the last one
        return found

    def sentence(self, fused: np.ndarray) -> quoting.Sentence | None:
        """The sentence to quote, out of the passages [P] that fit best."""
        memory = self.memory
        if self.foreign:
            return None
        if self._near is not None:
            return self._nearest_sentence(fused, *self._near)
        if not fused.any():  # nothing has been recalled: by words
            fused = memory.words.scores(self.question)
        best = [int(i) for i in np.argsort(-fused, kind="stable")[: quoting.PASSAGES] if fused[i]]
        text, last = memory.document.text, len(memory.passages) - 1
        around = {min(max(i + step, 0), last) for i in best for step in (-1, 0, 1)}
        return quoting.best_sentence(
            self.question,
            text,
            memory.words,
            quoting.sentences_of(text, memory.tokens, memory.passages, list(around)),
            best,
            least=0.0 if self._literal else quoting.LEAST_COVERAGE,
        )

    def _nearest_sentence(
        self, fused: np.ndarray, near: np.ndarray, of_passages: np.ndarray
    ) -> quoting.Sentence:
        """The one nearest by meaning, of those in the passages [P] that fit best, and by words.

        Of 96 questions whose words leave it open the quotation holds the answer to 24; by meaning
        alone to 18. Of the 13 in other words among them to 3 both times.

        Args:
            near: [n] of all sentences.
            of_passages: [P], standardised.
        """
        memory, text = self.memory, self.memory.document.text
        where = np.array([sentence.passage for sentence in memory.sentences], dtype=np.int64)
        best = np.argsort(-fused, kind="stable")[: quoting.PASSAGES]
        held = np.flatnonzero(np.isin(where, best))
        texts = [text[slice(*memory.sentences[index].chars)] for index in held]
        scores = quoting.standard(near)[held] + of_passages[where[held]]
        for reach in (0, 1):
            scores += quoting.standard(memory.words.judge(self.question, texts, reach)[0])
        return memory.sentences[held[int(scores.argmax())]]

    def neutral(self) -> Impression:
        """Where a question about nothing in particular looks; found once, the same for all."""
        if self.memory.neutral is None:
            self.memory.neutral = self._impression(recall.NEUTRAL_QUESTION, closing=True)
        return self.memory.neutral

    def _impression(self, question: str, *, closing: bool = False) -> Impression:
        """Put a question to the memory without an answer: where do its own words look?

        `closing` also tells where what follows the question looks.
        """
        prompt, memory = self.prompt, self.memory

        def mass(steps: list[Step]) -> np.ndarray:
            first, count = memory.first_position, len(memory.tokens)
            return np.mean([mass_on_document(step, first, count) for step in steps], axis=0)

        with memory.state.question():
            voice = Voice(self.reader, memory.state)
            # Nobody asks where these look: a cheap lookup is enough.
            voice.read(np.concatenate([prompt.turn, prompt.task_ids()]))
            asked = voice.ask(prompt.question_ids(question))
            closed = voice.ask(prompt.closing) if closing else asked
        return Impression(recall.attention_profile(asked), mass(asked), mass(closed))

    def _sure(self, words: np.ndarray) -> bool:
        """Whether the best passage by words [P] leaves little to ask others for."""
        best, index = int(words.argmax()), self.memory.words
        if not words[best] > 0:
            return False
        self._literal = index.holds_numbers(self.question, best)
        return self._literal or index.coverage(self.question, best) >= recall.SURE

    # -- in other words -----------------------------------------------------------------------

    def _encoder(self) -> Iterator[Remark]:
        """The encoder, returned, if one is wanted; the usual one may be missing.

        Raises:
            InfllmError: another one was asked for and cannot be had.
        """
        name = self.options.encoder
        if name is None or name == OFF:
            return None
        try:
            return self.reader.encoder(name)
        except (ModelError, CapacityError) as error:
            if not is_default(name):
                raise
            if not self.reader.lacks_encoder:
                self.reader.lacks_encoder = True
                yield Remark(
                    f"{error}. Until then what is asked in other words than the text's is hardly "
                    f"found (--encoder {OFF} does not try)."
                )
            return None

    def _meanings(self, encoder: SentenceEncoder) -> Iterator[Encoding]:
        """Those of the document, returned; encoded when first needed."""
        memory = self.memory
        if memory.meanings is None or memory.meanings.encoder != encoder.identity:
            sentences, text = memory.sentences, memory.document.text
            memory.meanings = recall_meanings(
                memory.folder, encoder.identity, sentences, encoder.width
            )
            if memory.meanings is None:
                vectors = np.zeros((len(sentences), encoder.width), dtype=np.float16)
                for start in range(0, len(sentences), LOT):
                    yield Encoding(start, len(sentences))
                    lot = [text[slice(*s.chars)] for s in sentences[start : start + LOT]]
                    vectors[start : start + LOT] = encoder.encode(lot)
                memory.meanings = Meanings(sentences, vectors, encoder.identity)
        return memory.meanings

    def _by_meaning(self, words: np.ndarray, meanings: Meanings, asked: np.ndarray) -> np.ndarray:
        """Passages [P]: one by words, then two by meaning, and so on.

        Of 248 ordinary questions on three novels, two dumps of sources and the sample story a
        passage with the answer is among the first four for 169, among the first eight or nine for
        194; with nothing but the first one by words for 166 and 189, with no meaning for 165 and
        189. Of 13 in other words on the story for 4 and 7, 6 and 8, 1 and 1.
        """
        near = meanings.near(asked)
        self.foreign = bool(near.max() < foreign_below(len(near)))
        of_passages = quoting.standard(meanings.of_passages(asked, near, len(words)))
        self._near = near, of_passages
        by_words = np.where(words > 0, recall.ranks(words), np.inf)
        return 1 / (1 + np.minimum(by_words, (recall.ranks(of_passages) + 0.5) / 2))

    # -- without an encoder -------------------------------------------------------------------

    def _by_memory(self, words: np.ndarray) -> np.ndarray:
        """Passages [P] by words and by how the memory takes the question."""
        memory, most = self.memory, self.options.candidates
        rankings, weights = [words], [1.0]
        if memory.whole or most == 0:
            pass
        elif can_judge(memory.state):
            # Of a long document words choose alone: there the likelihood costs passages and time.
            if len(words) <= most:
                rankings.append(self._likelihood())
                weights.append(recall.LIKELIHOOD_WEIGHT)
        else:
            profile = self._impression(self.question).profile
            if profile.size:
                per_block = recall.attention_scores(profile, self.neutral().profile)
                rankings.append(memory.to_passages(per_block))
                weights.append(recall.ATTENTION_WEIGHT)
        return recall.fuse(rankings, weights)

    def _likelihood(self) -> np.ndarray:
        """Of the question behind each passage [P]."""
        memory, first = self.memory, self.memory.first_position
        borders = memory.passages.borders
        return question_likelihood(
            self.reader.model,
            memory.state,
            [(int(a) + first, int(b) + first) for a, b in itertools.pairwise(borders)],
            self.prompt.plain_ids("\n\n" + prompts.QUESTION),
            self.prompt.plain_ids(self.question.strip()),
        )


def foreign_below(sentences: int) -> float:
    """The cosine below which nothing in a document of so many sentences comes near a question."""
    return min(FOREIGN_MOST, FOREIGN_LEAST + FOREIGN_GROWTH * math.log(max(sentences, 1)))
