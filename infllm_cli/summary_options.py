"""What kind of summary is wanted."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from infllm_cli.errors import UsageError

LENGTHS = {"short": 60, "medium": 150, "long": 400}
LEAST_WORDS, MOST_WORDS = 10, 5000


class Wording(enum.Enum):
    """Whose words a summary is made of."""

    AUTO = "auto"
    OWN = "own"  # the model's
    QUOTED = "quoted"  # the document's


@dataclass(frozen=True, slots=True)
class SummaryOptions:
    """What is wanted.

    Raises:
        UsageError: a value out of range, naming the flag.
    """

    words: int = LENGTHS["medium"]
    focus: str | None = None
    wording: Wording = Wording.AUTO
    outline: bool = False  # the parts alone, not the whole

    def __post_init__(self) -> None:
        """Refuse what is no length."""
        if not LEAST_WORDS <= self.words <= MOST_WORDS:
            raise UsageError(f"--words is {self.words}; choose {LEAST_WORDS} to {MOST_WORDS:,}.")
        if self.focus is not None and not self.focus.strip():
            raise UsageError("--focus is empty; say what to look for.")
