"""What any question looks at, beside a saved memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.impressions import keep_neutral, recall_neutral
from infllm_cli.sampling import AnswerOptions

OPTIONS = AnswerOptions(max_tokens=4, candidates=8)


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def asked(reader, folder):
    """A memory whose impression has been kept, and an answer."""
    memory = read_text(reader, prose(2500))
    answer = reader.ask(memory, "Who?", OPTIONS)
    keep_neutral(folder, reader, memory)
    return memory, answer


def test_an_impression_comes_back_bit_for_bit_and_answers_stay(reader, tmp_path):
    memory, answer = asked(reader, tmp_path)
    fresh = read_text(reader, prose(2500))
    assert fresh.neutral is None and recall_neutral(tmp_path, reader, fresh)
    for name in ("profile", "asked", "closed"):
        assert np.array_equal(getattr(fresh.neutral, name), getattr(memory.neutral, name))
    again = reader.ask(fresh, "Who?", OPTIONS)
    assert (again.text, again.evidence) == (answer.text, answer.evidence)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]


def test_another_number_of_blocks_has_its_own(reader, tmp_path):
    asked(reader, tmp_path)
    other = make_reader(config=replace(SMALL, answer_blocks=3))
    assert not recall_neutral(tmp_path, other, read_text(other, prose(2500)))


@pytest.mark.parametrize("broken", [b"", b"nothing", None])
def test_a_broken_file_is_found_anew(reader, tmp_path, broken):
    memory, _ = asked(reader, tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 255]) + data[middle + 1 :]
    path.write_bytes(flipped if broken is None else broken)
    fresh = read_text(reader, prose(2500))
    assert not recall_neutral(tmp_path, reader, fresh) and fresh.neutral is None
    keep_neutral(tmp_path, reader, memory)
    assert recall_neutral(tmp_path, reader, fresh)


def test_that_of_another_document_is_not_taken(reader, tmp_path):
    asked(reader, tmp_path)
    assert not recall_neutral(tmp_path, reader, read_text(reader, prose(3000)))


def test_without_a_folder_nothing_is_kept(reader, tmp_path):
    memory, _ = asked(reader, None)
    assert not recall_neutral(None, reader, memory)
    keep_neutral(tmp_path / "gone", reader, memory)
    assert list(tmp_path.iterdir()) == []
