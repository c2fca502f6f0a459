"""The ways in which `infllm eval summaries` lets one model summarize one document."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infllm_cli.digests import PassDone, PieceTold, Summary
from infllm_cli.drafts import TOKENS_PER_WORD
from infllm_cli.evaluate.map_reduce import ChunkTold, MapReduce, Reduced
from infllm_cli.evaluate.summary_scores import parts_under
from infllm_cli.events import Answer
from infllm_cli.model_size import reread_tokens
from infllm_cli.parts import Part
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions, Quoting
from infllm_cli.summarizing import PIECE_WORDS, Summarizing, request_for
from infllm_cli.summary_options import SummaryOptions, Wording

if TYPE_CHECKING:
    from infllm_cli.commands.groups import RecallFlags
    from infllm_cli.console import Console


class Way(str, enum.Enum):
    """How a document is summarized."""

    QUOTED = "quoted"  # `infllm summarize --wording quoted`
    OWN = "own"  # `infllm summarize --wording own`
    QUESTION_MEMORY = "question-memory"  # one question, `infllm ask --answering memory`
    QUESTION_BOTH = "question-both"  # the same, `--answering both`
    MAP_REDUCE = "map-reduce"  # without a memory, see `map_reduce`

    @property
    def answering(self) -> Answering | None:
        """What the answer of one question rests on; None where none is put."""
        asked = {Way.QUESTION_MEMORY: Answering.MEMORY, Way.QUESTION_BOTH: Answering.BOTH}
        return asked.get(self)

    @property
    def needs_memory(self) -> bool:
        """Whether the document is read into a memory first."""
        return self is not Way.MAP_REDUCE


@dataclass(frozen=True, slots=True)
class Written:
    """A summary, and what it is said to rest on.

    Attributes:
        evidence: indices of parts: for `quoted` and `own` those of `Summary.told`; for a question
            those that the passages of its evidence lie in, of which there are 8 at most; for
            map-reduce all, since all text went in.
        seconds: reading into the memory left out. Map-reduce reads for itself: all it took.
        facts: what only this way has to tell.
    """

    text: str
    evidence: Sequence[int]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


class Summarizers:
    """Writes summaries of documents in every way.

    Args:
        words: asked for, about.
        map_tokens: of a chunk of map-reduce; None: what is usual.

    Raises:
        UsageError: --words that are no length; map-reduce is wanted and does not fit the model.
    """

    def __init__(
        self,
        reader: Reader,
        ways: Sequence[Way],
        words: int,
        map_tokens: int | None,
        recall: RecallFlags,
        console: Console,
    ) -> None:
        self.reader, self.ways, self.console = reader, ways, console
        self.words, self._map_tokens = words, map_tokens
        SummaryOptions(words=words)
        if Way.MAP_REDUCE in ways:
            self._map_tokens = MapReduce(reader, words, map_tokens).map_tokens
        self.question = question_for(words)
        self._options = AnswerOptions(
            max_tokens=int(TOKENS_PER_WORD * words) + 48,
            reread_tokens=recall.reread_tokens,
            encoder=recall.encoder,
            candidates=recall.candidates,
            quote=Quoting.NEVER,
        )

    @property
    def reserve_tokens(self) -> int:
        """What is asked and answered behind a document, at most."""
        return self.reader.reserve_for([self.question], self._options)

    def settings(self, way: Way, memory: Memory) -> dict[str, Any]:
        """All that decides a summary but the document."""
        loaded = self.reader.loaded
        found: dict[str, Any] = {
            "model": loaded.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": loaded.device.type,
            "words": self.words,
        }
        if way is Way.MAP_REDUCE:
            return {
                **found,
                "map_tokens": self._map_tokens,
                "chunk_words": PIECE_WORDS,
                "request": request_for(self.words, None),
            }
        found |= {"memory": memory.state.config.as_dict(), "attended_whole": memory.whole}
        if way.answering is not None:
            found |= {
                "question": self.question,
                "max_tokens": self._options.max_tokens,
                "reread_tokens": reread_tokens(self._options.reread_tokens, self.reader.parameters),
                "encoder": self._options.encoder,
                "candidates": self._options.candidates,
            }
        return found

    def write(
        self, way: Way, memory: Memory, parts: Sequence[Part], check: Callable[[], None]
    ) -> Written:
        """Summarize one document in one way; the memory is as before.

        Args:
            memory: read to its end, but for map-reduce, which takes its text alone.
            check: called again and again; what it raises ends the summary.
        """
        if way is Way.MAP_REDUCE:
            return self._reduced(memory, parts, check)
        if way.answering is not None:
            return self._answered(way.answering, memory, parts, check)
        return self._summarized(Wording(way.value), memory, check)

    def _summarized(self, wording: Wording, memory: Memory, check: Callable[[], None]) -> Written:
        options = SummaryOptions(words=self.words, wording=wording)
        passes = []
        steps = Summarizing(self.reader, memory, options).steps()
        for event in steps:
            if isinstance(event, Summary):
                whose = "quoted" if event.quoted else "own"
                facts = {"wording": whose, "passes": passes}
                return Written(event.text, event.told, event.seconds, facts)
            if isinstance(event, PieceTold):
                self.console.piece_told(event)
            else:
                passes.append(_shrunk(event))
                self.console.pass_done(event)
            check()
        raise AssertionError("a summary comes last")

    def _answered(
        self,
        answering: Answering,
        memory: Memory,
        parts: Sequence[Part],
        check: Callable[[], None],
    ) -> Written:
        options = replace(self._options, answering=answering)
        for event in self.reader.ask_steps(memory, self.question, options):
            if isinstance(event, Answer):
                evidence = parts_under(memory.document, parts, event.evidence)
                facts = {
                    "finish": event.finish,
                    "answer_tokens": event.tokens,
                    "first_token_seconds": round(event.first_token_seconds, 3),
                }
                return Written(event.text, evidence, event.seconds, facts)
            check()
        raise AssertionError("an answer comes last")

    def _reduced(self, memory: Memory, parts: Sequence[Part], check: Callable[[], None]) -> Written:
        began = time.perf_counter()
        passes = []
        course = MapReduce(self.reader, self.words, self._map_tokens, check)
        for event in course.steps(memory.tokens, memory.passages):
            if isinstance(event, Reduced):
                seconds = time.perf_counter() - began
                facts = {
                    "finish": event.finish,
                    "chunks": event.chunks,
                    "tokens": event.tokens,
                    "passes": passes,
                }
                return Written(event.text, range(len(parts)), seconds, facts)
            if isinstance(event, ChunkTold):
                self.console.stage(
                    f"{memory.document.name}, map-reduce: summarized {event.number} of "
                    f"{event.total} chunks"
                )
            else:
                passes.append(_shrunk(event))
                self.console.pass_done(event)
        raise AssertionError("a summary comes last")


def question_for(words: int) -> str:
    """The one question that asks for a summary."""
    sentences = max(1, round(words / 20))
    count = "one sentence" if sentences == 1 else f"{sentences} sentences"
    return f"Summarize the document in {count}, about {words} words."


def _shrunk(done: PassDone) -> dict[str, int]:
    return {
        "inputs": done.inputs,
        "outputs": done.outputs,
        "words_in": done.words_in,
        "words_out": done.words_out,
    }
