"""A text of any length to measure on: the same at every place and time."""

from __future__ import annotations

import random

_OPENINGS = ["after", "before", "because", "while", "when", "although", "until", "since"]
_PEOPLE = [
    "the ferryman",
    "the clerk",
    "an old captain",
    "the youngest sister",
    "our neighbour",
    "the surveyor",
    "a travelling actor",
    "the doctor's wife",
    "the baker",
    "nobody in the village",
    "the magistrate",
    "a boy of twelve",
    "the lamplighter",
    "the widow",
    "the two brothers",
    "a stranger",
]
_DEEDS = [
    "walked along",
    "remembered",
    "painted",
    "locked",
    "looked for",
    "measured",
    "sold",
    "described",
    "came back to",
    "borrowed",
    "dreamed of",
    "crossed",
    "guarded",
    "forgot",
    "drew a map of",
    "wrote about",
]
_THINGS = [
    "the bridge",
    "a brass key",
    "the orchard",
    "seven letters",
    "the northern road",
    "a green coat",
    "the mill",
    "the harbour",
    "an unpaid bill",
    "the cellar",
    "a lame horse",
    "the church tower",
    "the frozen pond",
    "a box of nails",
    "the schoolroom",
    "the weather",
]


def made_text(chars: int) -> str:
    """Sentences that mean nothing much, in paragraphs, at least so many characters."""
    draw = random.Random(4).choice
    numbers = random.Random(5)
    lines: list[str] = []
    written = 0
    while written < chars:
        sentences = []
        for _ in range(numbers.randint(3, 7)):
            first, second = draw(_PEOPLE), draw(_PEOPLE)
            main = f"{first} {draw(_DEEDS)} {draw(_THINGS)}"
            rest = f"{draw(_OPENINGS)} {second} {draw(_DEEDS)} {draw(_THINGS)}"
            year = f" in {numbers.randint(1700, 1899)}" if numbers.random() < 0.2 else ""
            sentences.append(f"{main[0].upper()}{main[1:]}{year} {rest}.")
        lines.append(" ".join(sentences))
        written += len(lines[-1]) + 2
    return "\n\n".join(lines) + "\n"


def repeated(text: str, chars: int) -> str:
    """A text behind itself until it has so many characters."""
    times = -(-chars // max(1, len(text)))
    return "\n\n".join([text] * times)
