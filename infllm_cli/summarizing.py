"""A summary of a document that has been read: each piece alone, then parts, then the whole.

Each piece of the document is looked at with the memory restricted to its own blocks and the sinks
(`memory.excerpt`); no token is read again. What it says in short goes into the summary of its part,
and the parts, in as many passes as it takes, into the whole. Two ways of wording:

* quoted: the document's own sentences, those that tell most and that the model attends when it is
  asked what matters. What a small model writes freely is not to be trusted.
* own: what the model writes, as far as the text vouches for it; for larger models.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from infllm_cli.candidates import sentences_by_piece
from infllm_cli.digests import Digest, PassDone, PieceTold, Summary, groups_of
from infllm_cli.drafts import Draft, Source, push
from infllm_cli.evidence import Passage
from infllm_cli.inquiry import Inquiry, mass_on
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase
from infllm_cli.parts import MOST_TOKENS, Part, Piece, parts_for, reserved
from infllm_cli.publishing import around_the_text, within
from infllm_cli.sentences import Sentence, as_text, split_sentences
from infllm_cli.summary_options import SummaryOptions, Wording
from infllm_cli.telling import Candidate, Vocabulary, choose, most_named, overlap

if TYPE_CHECKING:
    from infllm_cli.reader import Memory, Reader

# From here on a model's own words are taken by default.
OWN_WORDS_PARAMETERS = 1_000_000_000
PIECE_WORDS = 60
LINE_WORDS = 25
# Sentences taken apart name people at random: from this length on a line says who matters.
LEAST_NAMED, MOST_NAMED = 100, 8
# What a pass takes as one: so much a small model still has in view.
GROUP_WORDS = 700


class Summarizing:
    """The course of one summary; `steps` yields its events, the last of them the `Summary`.

    Args:
        most_tokens: of a piece.

    Attributes:
        parts: of the document.
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory,
        options: SummaryOptions,
        most_tokens: int = MOST_TOKENS,
    ) -> None:
        assert memory.complete, "a document is summarized after it has been read"
        self.reader, self.memory, self.options = reader, memory, options
        self.document = memory.document
        trained = reader.loaded.trained_length
        reserve = reserved(trained)
        self.parts = parts_for(reader, memory, most_tokens)
        self.pieces = [piece for part in self.parts for piece in part.pieces]
        self.own = options.wording is Wording.OWN or (
            options.wording is Wording.AUTO and reader.parameters >= OWN_WORDS_PARAMETERS
        )
        share = 1.5 * options.words / len(self.pieces)
        self._piece_words = PIECE_WORDS if self.own else max(PIECE_WORDS, round(share))
        self._sentences = sentences_by_piece(self.document.text, self.parts)
        self._around = around_the_text(self.document)
        every = [s for sentences in self._sentences for s in sentences]
        self._vocabulary = Vocabulary(every)
        self._wanted = self._vocabulary.focus_words(options.focus)
        self._layers = reader.loaded.layers_for(trained)
        request = request_for(PIECE_WORDS, options.focus) if self.own else None
        self._inquiry = Inquiry(
            reader, memory, self._layers, focus=options.focus, request=request, reserve=reserve
        )

    def steps(self) -> Iterator[PieceTold | PassDone | Summary]:
        """Summarize; the memory is as before when the iterator ends or is closed."""
        began = time.perf_counter()
        told: list[Digest] = []
        for piece in self.pieces:
            before = time.perf_counter()
            told.append(self._tell_piece(piece))
            seconds = time.perf_counter() - before
            yield PieceTold(piece, self.parts[piece.part], told[-1], len(self.pieces), seconds)
        took_part = sorted(index for digest in told for index in digest.pieces)
        assert took_part == list(range(len(self.pieces))), "every piece takes part"
        per_part = self._by_part(told)
        if self.options.outline:
            whole = self._outline(per_part)
        else:
            whole = yield from self._reduce(per_part)
        assert sorted(whole.pieces) == took_part, "every piece takes part"
        yield Summary(
            text=whole.text,
            quoted=whole.quoted,
            parts=self.parts,
            digests=per_part,
            evidence=whole.evidence,
            told=sorted(self._parts_of(whole.evidence)),
            seconds=time.perf_counter() - began,
        )

    def _reduce(self, digests: list[Digest]) -> Generator[PassDone, None, Digest]:
        """Passes until the rest is short enough to make the whole of: returns the whole."""
        number = 0
        most = max(GROUP_WORDS, self.options.words)
        while _words(digests) > most and len(digests) > 1:
            grouped = groups_of(digests, most)
            smaller = [self._merge(group, self._share(group, len(grouped))) for group in grouped]
            # What ends a summary of any number of parts.
            assert len(smaller) < len(digests), "every pass shrinks"
            number += 1
            yield PassDone(number, len(digests), len(smaller), _words(digests), _words(smaller))
            digests = smaller
        return self._whole(digests)

    def _share(self, group: list[Digest], groups: int) -> int:
        """Words for a group of so many."""
        if self.own:
            return max(PIECE_WORDS, self.options.words // groups)
        # What has been left out cannot be chosen any more.
        return max(PIECE_WORDS, _words(group) // 2)

    def _outline(self, digests: list[Digest]) -> Digest:
        """A line per part."""
        lines, evidence = [], []
        for part, digest in zip(self.parts, digests, strict=True):
            if digest.quoted:
                sentences = [s for p in part.pieces for s in self._sentences[p.index]]
                weights = self._vocabulary.weights(sentences, self._wanted)
                best = choose(digest.candidates, weights, LINE_WORDS)[:1]
                text = " ".join(c.sentence.whole for c in best)
                evidence += [self._quoted(c) for c in best]
            else:
                text = split_sentences(digest.text)[0].text
                evidence += digest.evidence[:1]
            lines.append(f"{heading_of(part)}: {text}")
        pieces = tuple(index for digest in digests for index in digest.pieces)
        quoted = all(digest.quoted for digest in digests)
        return Digest("\n".join(lines), pieces, quoted, [], evidence)

    # -- pieces -------------------------------------------------------------------------------

    def _tell_piece(self, piece: Piece) -> Digest:
        """What one piece says in short, from its own blocks and the sinks."""
        asked = self._inquiry.ask(piece)
        candidates = self._candidates(piece, asked.mass)
        if self.own:
            state, logits = asked.state, asked.logits
            assert logits is not None
            draft = Draft(self.reader, state, logits, keep_from=None, most_words=PIECE_WORDS)
            source = Source(self.document.text[piece.start : piece.end])
            sentences = list(draft.sentences(source))
            if sentences:
                mass = sum(mass_on(piece, step, asked.offset) for step in draft.steps)
                evidence = self._passages(piece, mass / max(len(draft.steps), 1))
                return Digest(" ".join(sentences), (piece.index,), False, candidates, evidence)
        weights = self._vocabulary.weights(self._sentences[piece.index], self._wanted)
        return self._quote(candidates, weights, self._piece_words, (piece.index,))

    def _candidates(self, piece: Piece, attended: np.ndarray) -> list[Candidate]:
        """The piece's sentences; the rank of the attention that each drew makes its factor."""
        sentences = self._sentences[piece.index]
        starts = self.memory.tokens.spans[piece.first : piece.last, 0]
        per_token = []
        for sentence in sentences:
            first = int(starts.searchsorted(sentence.start))
            last = max(first + 1, int(starts.searchsorted(sentence.end)))
            tokens = attended[first:last]
            per_token.append(tokens.sum() / max(len(tokens), 1) ** 0.5 if len(tokens) else 0.0)
        rank = np.argsort(np.argsort(per_token, kind="stable"), kind="stable")
        factors = 0.5 + rank / max(len(rank) - 1, 1)
        if self._wanted:
            factors = factors * [0.25 + 2 * overlap(s.text, self._wanted) for s in sentences]
        # A licence stands for its own part only.
        own = [not within(self._around, sentence.start) for sentence in sentences]
        return [
            Candidate(sentence, piece.part, float(factor))
            for sentence, factor in zip(sentences, factors * own, strict=True)
        ]

    # -- parts and passes -----------------------------------------------------------------------

    def _by_part(self, told: list[Digest]) -> list[Digest]:
        """One digest per part: of a part of one piece, the piece's own."""
        by_part: dict[int, list[Digest]] = {}
        for digest in told:
            by_part.setdefault(self.pieces[digest.pieces[0]].part, []).append(digest)
        return [
            group[0] if len(group) == 1 else self._merge(group, self._part_words(group))
            for _, group in sorted(by_part.items())
        ]

    def _part_words(self, group: list[Digest]) -> int:
        """Words for a part of several pieces."""
        return PIECE_WORDS if self.own else max(PIECE_WORDS, _words(group) // 3)

    def _merge(self, group: list[Digest], words: int) -> Digest:
        """One digest of several, shorter than all of them."""
        pieces = tuple(index for digest in group for index in digest.pieces)
        if len(group) == 1:
            return group[0]
        candidates = [c for digest in group for c in digest.candidates]
        if self.own:
            written = self._write(group, pieces, words, None)
            if written is not None:
                return replace(written, candidates=candidates)
        sentences = [s for index in pieces for s in self._sentences[index]]
        return self._quote(
            candidates, self._vocabulary.weights(sentences, self._wanted), words, pieces
        )

    def _whole(self, digests: list[Digest]) -> Digest:
        pieces = tuple(index for digest in digests for index in digest.pieces)
        words = self.options.words
        if self.own:
            written = self._write(digests, pieces, words, self.memory.state)
            if written is not None:
                return written
        candidates = [c for digest in digests for c in digest.candidates]
        sentences = [s for found in self._sentences for s in found]
        weights = self._vocabulary.weights(sentences, self._wanted)
        whole = self._quote(candidates, weights, words, pieces, again=0.5)
        names = []
        if words >= LEAST_NAMED and not any(part.is_file for part in self.parts):
            told = [s for s in sentences if not within(self._around, s.start)]
            names = most_named(told, self._vocabulary.names, MOST_NAMED)
        if len(names) < 2:
            return whole
        return replace(whole, text=f"{whole.text}\n\nNamed most: {', '.join(names)}.")

    def _quote(
        self,
        candidates: list[Candidate],
        weights: dict[str, float],
        words: int,
        pieces: tuple[int, ...],
        again: float = 0.8,
    ) -> Digest:
        """The sentences that tell most, as the document has them."""
        chosen = choose(candidates, weights, words, again=again)
        evidence = [self._quoted(candidate) for candidate in chosen]
        text = "\n\n".join(self._paragraphs(chosen))
        return Digest(text, pieces, True, chosen, evidence)

    def _paragraphs(self, chosen: list[Candidate]) -> list[str]:
        """A paragraph per part; of a file, behind its name."""
        paragraphs: dict[int, list[Sentence]] = {}
        for candidate in chosen:
            paragraphs.setdefault(candidate.group, []).append(candidate.sentence)
        lines = []
        for index, sentences in paragraphs.items():
            part = self.parts[index]
            name = f"{part.title}: " if part.is_file and len(self.parts) > 1 else ""
            lines.append(name + as_text(sentences))
        return lines

    # -- the model's own words ----------------------------------------------------------------

    def _write(
        self, group: list[Digest], pieces: tuple[int, ...], words: int, state: ModelMemory | None
    ) -> Digest | None:
        """Let the model write from summaries; with the memory, lookup into all of it is free.

        None where the text vouches for nothing of it.
        """
        reader, prompt = self.reader, self.reader.prompt
        named = []
        for digest in group:
            part = self.parts[self.pieces[digest.pieces[0]].part]
            named.append(f"{part.title}: {digest.text}" if part.title else digest.text)
        text = "\n\n".join(named)
        source = Source(text)
        task = prompt.plain_ids(f"\n\n{request_for(words, self.options.focus)}")
        request = np.concatenate([task, prompt.closing])
        if state is None:
            trained = reader.loaded.trained_length
            fresh = ModelMemory(
                self._layers, reader.config, trained_length=trained, whole_tokens=trained
            )
            push(reader, fresh, Phase.READ, np.concatenate([prompt.prefix, prompt.plain_ids(text)]))
            _, logits = push(reader, fresh, Phase.ASK, request)
            draft = Draft(reader, fresh, logits, keep_from=None, most_words=words)
            sentences = list(draft.sentences(source))
            evidence = [passage for digest in group for passage in digest.evidence[:1]]
            return Digest(" ".join(sentences), pieces, False, [], evidence) if sentences else None
        with state.question():
            start = state.tokens
            push(reader, state, Phase.READ, prompt.turn, start)
            push(reader, state, Phase.READ, prompt.plain_ids(text), start)
            asked, logits = push(reader, state, Phase.ASK, request, start)
            draft = Draft(reader, state, logits, keep_from=start, most_words=words)
            sentences = list(draft.sentences(source))
            steps = [*asked, *draft.steps]
            first, count = self.memory.first_position, len(self.memory.tokens)
            mass = np.mean(
                [
                    s.mass[first : first + count].double().numpy() / float(s.mass.sum())
                    for s in steps
                ],
                axis=0,
            )
        self.memory.note_device_bytes()
        if not sentences:
            return None
        looked = self._passages(None, mass)
        # It was written from what the parts' summaries rest on, and from where it looked itself.
        evidence = [p for digest in group for p in digest.evidence[:1]] + looked[:4]
        return Digest(" ".join(sentences), pieces, False, [], evidence)

    # -- evidence ---------------------------------------------------------------------------------

    def _quoted(self, candidate: Candidate) -> Passage:
        sentence = candidate.sentence
        file, lines = self.document.place(sentence.start, sentence.end)
        text = self.document.text[sentence.start : sentence.end]
        return Passage(lines, text, candidate.factor, file)

    def _passages(self, piece: Piece | None, mass: np.ndarray, most: int = 4) -> list[Passage]:
        """The passages of a piece, or of all, that drew most of mass [tokens]."""
        from infllm_cli.evidence import AttentionRecord

        memory = self.memory
        record = AttentionRecord(memory.document, memory.tokens, memory.passages, None)
        full = np.zeros(len(memory.tokens))
        full[slice(None) if piece is None else slice(piece.first, piece.last)] = mass
        return record.best(np.add.reduceat(full, memory.passages.borders[:-1]), most)

    def _parts_of(self, evidence: list[Passage]) -> set[int]:
        """The parts that passages lie in."""
        found = set()
        for passage in evidence:
            for part in self.parts:
                if part.file == passage.file and part.lines[0] <= passage.lines[0] <= part.lines[1]:
                    found.add(part.index)
        return found


def heading_of(part: Part) -> str:
    """A part's title and lines, as in "CHAPTER I (lines 3-90)"."""
    first, last = part.lines
    lines = f"line {first}" if first == last else f"lines {first}-{last}"
    title = part.title or part.file
    return f"{title} ({lines})" if title else lines


def request_for(words: int, focus: str | None) -> str:
    """What the model is asked to write."""
    sentences = max(1, round(words / 20))
    count = "one sentence" if sentences == 1 else f"{sentences} sentences"
    about = f", and say what it tells about {focus}" if focus else ""
    return f"Summarize the text above in {count}: who does what, and what happens{about}."


def _words(digests: list[Digest]) -> int:
    return sum(len(digest.text.split()) for digest in digests)
