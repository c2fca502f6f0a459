"""The command with a model that says what it is told and takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from tiny_tokenizers import backend_of

from infllm_cli import ask, asking, chat, console, live_console, plan, summarize  # noqa: F401  imported once, for all forks
from infllm_cli.__main__ import main
from infllm_cli.reader import Reader
from infllm_cli.sampling import AnswerOptions

STOP = 4  # <|im_end|> of the tiny tokenizer


def command(answer: str | None, delay: float) -> None:
    """Run the command line of `sys.argv`.

    Args:
        answer: what the model says; None: what comes out of it.
        delay: seconds that each pass through the model takes more.
    """

    class Scripted:
        def __init__(self, options: AnswerOptions) -> None:
            ids = backend_of("byte_level").encode(answer, add_special_tokens=False).ids
            self.left = iter([*ids, STOP])

        def __call__(self, logits: object) -> int:
            return next(self.left)

    def slowed(forward: Callable[..., object]) -> Callable[..., object]:
        def slow(*arguments: object, **named: object) -> object:
            time.sleep(delay)
            return forward(*arguments, **named)

        return slow

    if answer is not None:
        asking.Sampler = Scripted
    if delay:
        Reader.forward = slowed(Reader.forward)
        Reader.forward_together = slowed(Reader.forward_together)
    main()


backend_of("byte_level")
