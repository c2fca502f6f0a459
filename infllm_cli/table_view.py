"""A table on standard output: drawn by Rich on a terminal, Markdown anywhere else."""

from __future__ import annotations

from typing import TextIO

from infllm_cli.evaluate.tables import as_text
from infllm_cli.wording import visible


def write_table(rows: list[list[str]], out: TextIO) -> None:
    """Write rows, their header first."""
    if not out.isatty():
        out.write(as_text(rows))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console(file=out, highlight=False, markup=False, emoji=False).print(table)
