"""Which sentences of a document mean what a question asks, in whatever words.

Words find what is asked in the text's own words; a question in other words shares none of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from infllm_cli.quoting import Sentence, standard


@dataclass(frozen=True, eq=False)
class Meanings:
    """The sentences of a document as vectors.

    Attributes:
        sentences: [n] in document order.
        vectors: [n, width] unit vectors, float16.
        encoder: which one made them: see `SentenceEncoder.identity`.
    """

    sentences: list[Sentence]
    vectors: np.ndarray
    encoder: str

    def near(self, question: np.ndarray) -> np.ndarray:
        """How near [n] each sentence is to a question's unit vector [width]: the cosine."""
        return (self.vectors @ question.astype(np.float16)).astype(np.float64)

    def of_passages(self, question: np.ndarray, near: np.ndarray, count: int) -> np.ndarray:
        """How near [P] passages are to a question: by their nearest sentence and by their mean.

        Both are standardised over the passages, so that 0 is the usual one. Of 20 questions in
        other words than a novel's, a passage that holds the answer is then among the first four for
        6 (by words 1), of 13 on the sample story for 6 (by words 1, by likelihood 4).

        Args:
            question: [width] unit vector.
            near: [n] of the sentences.
        """
        where = np.array([sentence.passage for sentence in self.sentences], dtype=np.int64)
        nearest = np.full(count, -1.0)
        np.maximum.at(nearest, where, near)
        held, firsts = np.unique(where, return_index=True)
        sums = np.zeros((count, self.vectors.shape[1]), dtype=np.float32)
        sums[held] = np.add.reduceat(self.vectors.astype(np.float32), firsts)
        lengths = np.maximum(np.linalg.norm(sums, axis=1), 1e-9)
        return standard(nearest) + standard(sums @ question / lengths)
