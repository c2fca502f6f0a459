"""What has been measured: a file of JSON lines that grows, and from which a command goes on.

Each line is one cell with every setting that decides it. A cell that stands in the file under the
same settings is not measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infllm_cli.errors import CapacityError, UsageError

Row = dict[str, Any]


def key_of(identity: dict[str, Any]) -> str:
    """A name for what decides a cell: a digest of it."""
    canonical = json.dumps(identity, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class Results:
    """The rows of a file, or of this command alone where there is no file.

    Attributes:
        broken: the file's last line was torn off (a killed process) and has been dropped.

    Raises:
        UsageError: a file that holds something else; its folder does not exist.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.broken = False
        self._rows: dict[str, Row] = {}
        if path is None:
            return
        if not path.parent.is_dir():
            raise UsageError(f"--output {path}: there is no folder {path.parent}.")
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}.") from None
        whole, _, rest = data.rpartition(b"\n")
        self.broken = bool(rest)
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            self._take(_parsed(path, number, line))
        if self.broken:
            # Complete lines stay as they are, byte for byte.
            with path.open("r+b") as file:
                file.truncate(len(data) - len(rest))

    def _take(self, row: Row) -> None:
        if "error" in row:
            self._rows.pop(row["cell"], None)  # to be tried again
        else:
            self._rows[row["cell"]] = row

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def get(self, key: str) -> Row | None:
        """The row of a cell that has been measured."""
        return self._rows.get(key)

    def add(self, row: Row) -> None:
        """Write a row down at once.

        Raises:
            CapacityError: the file cannot be written.
        """
        self._take(row)
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CapacityError(f"{self.path}: {error.strerror or error}.") from None


def _parsed(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("cell"), str):
        raise UsageError(
            f"--output {path}: line {number} is no result of infllm eval; name another file."
        )
    return row
