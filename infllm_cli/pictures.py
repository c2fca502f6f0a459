"""The files that show where answers looked: gathered while they are given, written at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infllm_cli.errors import CapacityError, UsageError
from infllm_cli.events import Answer, Looked, TokenOut

if TYPE_CHECKING:
    from infllm_cli.heatmap import Column, Heatmap
    from infllm_cli.reader import Memory


class Pictures:
    """What `--evidence-html` and `--heatmap` want; nothing is gathered where neither is given.

    Raises:
        UsageError: a folder that does not exist, told before anything is read.
    """

    def __init__(self, html: Path | None, svg: Path | None) -> None:
        self.html, self.svg = html, svg
        for flag, path in (("--evidence-html", html), ("--heatmap", svg)):
            if path is not None and not path.parent.is_dir():
                raise UsageError(f"{flag} {path}: there is no folder {path.parent}.")
        self._name = ""
        self._columns: list[Column] | None = None
        self._maps: list[Heatmap] = []

    def watched(
        self, memory: Memory, steps: Iterator[Looked | TokenOut | Answer]
    ) -> Iterator[Looked | TokenOut | Answer]:
        """The same events; what they tell is kept for a picture of the answer."""
        if self.html is None and self.svg is None:
            yield from steps
            return
        from infllm_cli.heatmap import heatmap_of

        memory.state.watch_layers = self.html is not None
        looked = []
        try:
            for event in steps:
                if isinstance(event, Looked):
                    looked.append(event)
                elif isinstance(event, Answer):
                    self._maps.append(heatmap_of(event, looked, self._columns_of(memory)))
                yield event
        finally:
            memory.state.watch_layers = False

    def _columns_of(self, memory: Memory) -> list[Column]:
        from infllm_cli.evidence import AttentionRecord
        from infllm_cli.heatmap import columns_of

        if self._columns is None:
            self._name = memory.document.name
            record = AttentionRecord(memory.document, memory.tokens, memory.passages, None)
            self._columns = columns_of(memory.passages, record.passage)
        return self._columns

    def write(self) -> None:
        """Write the files, of the answers that are complete.

        Raises:
            CapacityError: one cannot be written.
        """
        if not self._maps:
            return
        from infllm_cli.evidence_page import page
        from infllm_cli.heatmap import svg_file

        for path, draw in ((self.html, page), (self.svg, svg_file)):
            if path is None:
                continue
            try:
                path.write_text(draw(self._maps, self._name), encoding="utf-8", errors="replace")
            except OSError as error:
                raise CapacityError(f"{path}: {error.strerror or error}.") from None
