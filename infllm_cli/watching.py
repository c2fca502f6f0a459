"""Where all voices of a question look in the document, each counted by its part in the answer."""

from __future__ import annotations

import time

import numpy as np

from infllm_cli.events import Looked
from infllm_cli.evidence import AttentionRecord, Passage
from infllm_cli.memory.step import Step
from infllm_cli.voices import Voice, parts


class Watching:
    """The records of the voices that have one, the first voice's among them.

    Where passages are a voice of their own, evidence is what they attend as much as what the
    memory does: of 32 questions on a novel its best three then hold the answer for 17, and for 9
    by the memory alone.
    """

    def __init__(self, voices: list[Voice]) -> None:
        self.voices = voices
        self.before = time.perf_counter()  # when the last step ended
        self._watched = [index for index, voice in enumerate(voices) if voice.record is not None]
        assert self._watched[0] == 0

    @property
    def record(self) -> AttentionRecord:
        """That of the first voice."""
        record = self.voices[0].record
        assert record is not None
        return record

    def asked(self, voice: Voice, step: Step, index: int) -> Looked | None:
        """A step of the question's words, of one voice; told of the first one."""
        if voice.record is None:
            return None
        which = self.voices.index(voice)
        share, mass = voice.record.add(step, self._parts()[which])
        if which:
            return None
        return self._looked(step, index, "", share, mass, voice.record.layers)

    def answered(self, steps: list[Step], index: int, token: str) -> Looked:
        """A step of the answer, of all voices."""
        share, mass = 0.0, np.zeros(len(self.record.units))
        layers: dict[int, np.ndarray] = {}
        for which, part in self._parts().items():
            own = self.voices[which].record
            assert own is not None
            its_share, its_mass = own.add(steps[which], part)
            share, mass = share + part * its_share, mass + part * its_mass
            for layer, its in own.layers.items():
                layers[layer] = layers.get(layer, 0) + part * its
        return self._looked(steps[0], index, token, share, mass, layers)

    def passages(self, most: int = 8) -> list[Passage]:
        """The passages attended most beyond the neutral question, best first.

        Where none is (a question about nothing in particular), those attended most.
        """
        records = [self.voices[which].record for which in self._watched]
        excess = sum(record.excess for record in records if record)
        if not (excess > 0).any():
            excess = sum(record.mass for record in records if record)
        return self.record.best(np.maximum(excess, 0), most)

    def _parts(self) -> dict[int, float]:
        """Of the voices that are watched, by their number; together 1."""
        found = parts([self.voices[which] for which in self._watched])
        return dict(zip(self._watched, found, strict=True))

    def _looked(
        self,
        step: Step,
        index: int,
        token: str,
        share: float,
        mass: np.ndarray,
        layers: dict[int, np.ndarray],
    ) -> Looked:
        now = time.perf_counter()
        seconds, self.before = now - self.before, now
        return Looked(
            phase=step.phase,
            index=index,
            token=token,
            loaded_blocks=step.loaded_blocks,
            share=share,
            passages=self.record.best(mass, 3),
            seconds=seconds,
            mass=mass,
            layers=layers,
        )
