"""How an answer is compared with what is known: the published scorers of the tasks.

Each takes the model's answer and the known ones, and gives 0 to 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Scorer = Callable[[str, Sequence[str]], float]

# InfiniteBench takes these for the borders of words when it looks for a value.
_BORDERS = re.compile(r"""[\n:"'.,?!{}\s]+""")


def first_integer(text: str, answers: Sequence[str]) -> float:
    """1 if the first run of digits is the answer: PassKey and Number.String of InfiniteBench
    (arXiv 2402.13718).
    """
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found.group() == answers[0])


def last_integer(text: str, answers: Sequence[str]) -> float:
    """1 if the last run of digits is the answer: the lines of LongEval (Li et al., 2023)."""
    found = re.findall(r"[0-9]+", text)
    return float(bool(found) and int(found[-1]) == int(answers[0]))


def whole_word(text: str, answers: Sequence[str]) -> float:
    """1 if the answer is one of the words of the text: Retrieve.KV of InfiniteBench."""
    return float(answers[0] in _BORDERS.split(text))


def share_of_strings(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand somewhere in the text, in any case: RULER's
    `string_match_all` (arXiv 2404.06654), and of one answer the recall of the needle tests.
    """
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def first_label(text: str, answers: Sequence[str]) -> float:
    """1 if the first letter A or B that stands alone is the answer: SORT (arXiv 2410.08133)."""
    found = re.search(r"\b[AB]\b", text)
    return float(found is not None and found.group() == answers[0])
