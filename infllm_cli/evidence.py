"""Where in the document the model looked: attention mass per token -> passages -> lines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from infllm_cli.document import Document
from infllm_cli.memory.step import Phase, Step
from infllm_cli.passages import Passages
from infllm_cli.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Passage:
    """A span of the document, verbatim.

    Attributes:
        lines: first and last line, 1-based, both included, as the file counts them.
        text: the document's own text.
        score: share of the attention mass, see `AttentionRecord`.
        file: which one, where the document was joined from several.
    """

    lines: tuple[int, int]
    text: str
    score: float
    file: str | None = None


def mass_on_document(step: Step, first: int, tokens: int) -> np.ndarray:
    """Mass [tokens] per query row of a step on a document whose first token is at `first`."""
    assert step.mass is not None
    on_document = step.mass[first : first + tokens].double().numpy()
    return on_document / max(float(step.mass.sum()), 1e-9)


class AttentionRecord:
    """Collects the attention of one question's steps and tells the passages it lay on.

    A token of the document can be attended in two places: in the memory, and in a passage that was
    re-read as text next to the question. Both count for the same passage.

    Args:
        first_position: absolute position of the document's first token in the memory, or None where
            the model sees no memory but only re-read passages.

    Attributes:
        layers: of the last step, where it tells them apart: share [P] of each layer's mass.
    """

    def __init__(
        self,
        document: Document,
        tokens: Tokens,
        passages: Passages,
        first_position: int | None,
    ) -> None:
        self.document = document
        self.tokens = tokens
        self.units = passages
        self.first = first_position
        self._excess = np.zeros(len(tokens))
        self._mass = np.zeros(len(tokens))
        nothing = np.zeros(len(tokens))
        self._neutral = {Phase.ASK: nothing, Phase.ANSWER: nothing}
        self._steps = 0
        self._reread: list[tuple[int, int, int]] = []
        self.layers: dict[int, np.ndarray] = {}
        self._reread_neutral = nothing

    def expect(self, asked: np.ndarray, answer: np.ndarray) -> None:
        """Mass [n] per token that a neutral question and the beginning of its answer draw.

        Sinks, the document's end and tokens that every question looks at are no evidence.
        """
        self._neutral = {Phase.ASK: asked, Phase.ANSWER: answer}

    def reread(self, position: int, token: int, count: int) -> None:
        """Tokens [token, token + count) of the document stand again at `position`."""
        self._reread.append((position, token, count))

    def calibrate(self, step: Step) -> None:
        """A step that has not seen the question yet tells what draws it to re-read passages anyway.

        The passage nearest to the question is looked at most, whatever is asked.
        """
        self._reread_neutral = self._mass_on_reread(step)

    def _mass_on_reread(self, step: Step) -> np.ndarray:
        mass = np.zeros(len(self.tokens))
        for position, token, count in self._reread:
            again = step.mass[position : position + count].double().numpy()
            mass[token : token + count] += again / max(float(step.mass.sum()), 1e-9)
        return mass

    def add(self, step: Step, part: float = 1.0) -> tuple[float, np.ndarray]:
        """Record a step; its share of mass on the document, and its mass per passage [P].

        `part`: what it counts of 1 in the record.
        """
        in_memory = np.zeros(len(self.tokens))
        if self.first is not None:
            in_memory = mass_on_document(step, self.first, len(self.tokens))
        reread = self._mass_on_reread(step)
        if step.by_layer is not None:
            self.layers = {
                index: self._of_layer(mass) for index, mass in sorted(step.by_layer.items())
            }
        excess = in_memory - self._neutral[step.phase] + reread - self._reread_neutral
        self._excess += part * excess
        self._mass += part * (in_memory + reread)
        self._steps += 1
        return float(in_memory.sum() + reread.sum()), np.maximum(self._per_passage(excess), 0)

    def _of_layer(self, mass: Tensor) -> np.ndarray:
        """Share [P] of one layer's mass [positions] that lies on each passage."""
        on = np.zeros(len(self.tokens))
        if self.first is not None:
            on += mass[self.first : self.first + len(on)].double().numpy()
        for position, token, count in self._reread:
            on[token : token + count] += mass[position : position + count].double().numpy()
        return self._per_passage(on) / max(float(mass.sum()), 1e-9)

    def _per_passage(self, mass: np.ndarray) -> np.ndarray:
        return np.add.reduceat(mass, self.units.borders[:-1])

    @property
    def excess(self) -> np.ndarray:
        """Mass [P] per step beyond the neutral question."""
        return self._per_passage(self._excess) / max(self._steps, 1)

    @property
    def mass(self) -> np.ndarray:
        """Mass [P] per step."""
        return self._per_passage(self._mass) / max(self._steps, 1)

    def best(self, mass: np.ndarray, most: int) -> list[Passage]:
        """The `most` highest of mass [P] that are not zero; scores are parts of the whole step."""
        found = []
        for index in np.argsort(-mass, kind="stable")[:most]:
            if mass[index] > 0:
                found.append(self.passage(int(index), float(mass[index])))
        return found

    def passage(self, index: int, score: float = 0.0) -> Passage:
        """Passage `index` of the document."""
        first, last = self.units.borders[index], self.units.borders[index + 1] - 1
        return self.span(int(self.tokens.spans[first, 0]), int(self.tokens.spans[last, 1]), score)

    def span(self, start: int, end: int, score: float = 0.0) -> Passage:
        """Characters [start, end) of the document, without white space around them."""
        _, start, end = self.document.own(start, end)
        text = self.document.text[start:end]
        # Lines of the words, not of the blank lines around them.
        start += len(text) - len(text.lstrip())
        end -= len(text) - len(text.rstrip())
        file, lines = self.document.place(start, max(end, start + 1))
        return Passage(lines, text.strip(), score, file)
