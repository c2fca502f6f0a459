"""Token ids back to text, as it becomes certain."""

from __future__ import annotations

from tokenizers import Tokenizer


class IncrementalDecoder:
    """Token ids to text, as it becomes certain.

    Text is held back while it may still change: a character split over tokens comes out whole.
    Special tokens are left out. Bytes that no later token completed are dropped at the end; bytes
    that are wrong in the middle of a text come out as U+FFFD, as from the tokenizer itself.

    Args:
        backend: What a fast tokenizer of transformers holds as ``backend_tokenizer``.
    """

    # tokenizers' own DecodeStream raises "Invalid prefix" on some bytes (vllm#17448), and has no
    # way to get at what it still holds.

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._ids: list[int] = []  # the tokens shown last, for context, then the ones held back
        self._shown = 0  # how many of them are shown

    def push(self, id: int) -> str:
        """Take one more token; return the text that became certain, often of earlier tokens."""
        self._ids.append(int(id))
        text = self._fresh()
        if not text or text.endswith("\ufffd"):
            return ""
        del self._ids[: self._shown]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        """Return the text still held back, without bytes that make no whole character."""
        text = self._fresh().rstrip("\ufffd")
        self._ids.clear()
        self._shown = 0
        return text

    def _fresh(self) -> str:
        before = self._backend.decode(self._ids[: self._shown], skip_special_tokens=True)
        return self._backend.decode(self._ids, skip_special_tokens=True)[len(before) :]
