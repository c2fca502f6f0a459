"""The next token from its logits, and when an answer ends."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.errors import InfllmError, UsageError


class Answering(enum.Enum):
    """What an answer rests on."""

    BOTH = "both"  # the memory, and the best passages re-read as text
    MEMORY = "memory"  # the memory alone, as in the paper
    PASSAGES = "passages"  # BM25's passages as text, no memory: what a retrieval script does


class Quoting(enum.Enum):
    """Whether the sentence that fits the question best is quoted before the answer."""

    AUTO = "auto"  # by models of less than a billion parameters, with memory and passages
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is generated; temperature 0 is greedy.

    Raises:
        UsageError: a value out of range, naming the flag.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    answering: Answering = Answering.BOTH
    reread_tokens: int | None = None  # by default by the model's size: see `model_size`
    candidates: int = 128  # of a document with up to so many passages each is judged
    encoder: str | None = None  # of sentences, for questions in other words; see `models.encoders`
    quote: Quoting = Quoting.AUTO
    prefill: str = ""  # what the answer begins with; the model goes on from there

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled from."""
        if self.max_tokens < 1:
            raise UsageError(f"--max-tokens is {self.max_tokens}; it must be at least 1.")
        if not 0 <= self.temperature <= 10:
            raise UsageError(f"--temperature is {self.temperature}; choose 0 to 10.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p is {self.top_p}; choose above 0 and up to 1.")
        if self.reread_tokens is not None and self.reread_tokens < 0:
            raise UsageError(f"--reread-tokens is {self.reread_tokens}; it cannot be negative.")
        if self.candidates < 0:
            raise UsageError(f"--candidates is {self.candidates}; it cannot be negative.")


class Sampler:
    """Draws token after token; the same seed draws the same tokens."""

    def __init__(self, options: AnswerOptions) -> None:
        self.options = options
        self.generator = torch.Generator().manual_seed(options.seed)

    def __call__(self, logits: Tensor) -> int:
        """The next token id from logits [V] float32.

        Raises:
            InfllmError: NaN or infinite logits.
        """
        if not bool(torch.isfinite(logits).all()):
            raise InfllmError(
                "the model's logits are not finite: its numbers overflowed. With --dtype bf16 or "
                "f16, try --dtype f32; with f32, its weights are damaged."
            )
        if self.options.temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu() / self.options.temperature, dim=-1)
        ordered, ids = probabilities.sort(descending=True)
        # Nucleus (arXiv 1904.09751): the smallest set that holds top_p, never empty.
        outside = ordered.cumsum(dim=-1) - ordered >= self.options.top_p
        ordered = ordered.masked_fill(outside, 0.0)
        return int(ids[torch.multinomial(ordered, 1, generator=self.generator)])


LONGEST_PERIOD = 48
LEAST_REPEATED = 36  # tokens
LEAST_LISTED = 6  # lines
_NUMBERED = re.compile(r"^\s*\d+[.):]\s*")


def is_looping(ids: list[int]) -> bool:
    """Whether an answer ends in the same stretch of tokens again and again.

    A stretch counts from its fourth time on, and only when all of it covers `LEAST_REPEATED`
    tokens: short refrains, lists of equal numbers and quoted verse repeat less.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        span = max(4 * period, LEAST_REPEATED)
        if len(ids) < span:
            break
        tail = ids[-span:]
        if tail[period:] == tail[:-period]:
            return True
    return False


def lists_again(text: str) -> bool:
    """Whether an answer's last lines are one list item again and again, under new numbers.

    Their numbers keep `is_looping` from seeing it. What differs in anything but the number that it
    begins with is another item.
    """
    lines = text.rsplit("\n", LEAST_LISTED + 1)[-LEAST_LISTED - 1 : -1]
    items = {_NUMBERED.sub("", line) for line in lines}
    numbered = all(_NUMBERED.match(line) for line in lines)
    return len(lines) == LEAST_LISTED and numbered and len(items) == 1
