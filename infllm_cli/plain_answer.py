"""Where does the answer of a model without a chat template end?

It was asked as "Question: ... Answer:" and knows no token that ends a turn: it goes on with a
question of its own. So an answer ends at an empty line, or where the next question begins.
"""

from __future__ import annotations

import re

from infllm_cli.prompts import QUESTION

_WORD = QUESTION.strip()
_END = re.compile(rf"(?<=\S)[^\S\n]*\n(?=[^\S\n]*\n|[^\S\n]*{re.escape(_WORD)})")
# What may still become an end: a last line that is empty so far or begins like a question.
_OPEN = re.compile(r"(?<=\S)[^\S\n]*\n[^\S\n]*([A-Za-z]*:?)\Z")


class PlainAnswer:
    """Takes a text as it grows and gives out what certainly belongs to the answer."""

    def __init__(self) -> None:
        self._text = ""
        self._given = 0
        self.ended = False

    def push(self, piece: str) -> str:
        """What has become certain; nothing more after the end."""
        if self.ended:
            return ""
        self._text += piece
        end, sure = _END.search(self._text), len(self._text)
        if end is not None:
            self.ended = True
            sure = end.start()
        else:
            open_line = _OPEN.search(self._text)
            if open_line is not None and _WORD.startswith(open_line[1]):
                sure = open_line.start()
        given, self._given = self._given, max(self._given, sure)
        return self._text[given : self._given]

    def finish(self) -> str:
        """What was held back, where the text ended without an end."""
        given, self._given = self._given, len(self._text)
        return "" if self.ended else self._text[given:]
