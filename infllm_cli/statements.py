"""Whether a line of a conversation asks for something or only tells the program something.

A small model that is asked to answer "My dog is called Rufus." goes round in circles, or makes a
story of it. English only, and careful: what is not clearly a statement is asked.
"""

from __future__ import annotations

import re

QUESTION_MARKS = ("?", "\uff1f", "\u061f")
# What is said to a line that only tells something.
NOTED = "Noted."
_SPEAKER = re.compile(
    r"(?:by the way|fyi|note|please note|remember|please remember|keep in mind)\b"
    r"|(?:my|our)\s+\w+|(?:i|we)(?:['’](?:m|re|ve|d))?\s+\w+",
    re.I,
)
# "I want to know who did it", "My question is": they ask, without a question mark.
_ASKING = re.compile(
    r"\b(?:want|wants|like|need|wish|wonder|wondering|curious|interested|question|ask|asking|tell|"
    r"know|explain|describe|list|find|show|give|summari[sz]e|who|whom|whose|what|when|where|which|"
    r"why|how)\b",
    re.I,
)


def asks(line: str) -> bool:
    """Whether a line ends as a question does."""
    return line.strip().endswith(QUESTION_MARKS)


def only_tells(line: str) -> bool:
    """Whether a line says something of the user, or to be remembered, and asks for nothing."""
    line = line.strip()
    return not asks(line) and bool(_SPEAKER.match(line)) and not _ASKING.search(line)
