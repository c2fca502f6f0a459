"""`infllm summarize` as a user runs it."""

from __future__ import annotations

import json
import re
import sys

import pytest
from tiny_folder import save_folder

from infllm_cli.__main__ import main

BODY = "On that day Ann Lee met Captain Fox near the harbour. They talked of bread and of rope. "


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("summarize")
    save_folder(folder / "model")
    parts = [f"## Part {n}\n\n{BODY * 6}" for n in range(1, 5)]
    (folder / "book.md").write_text("\n\n".join([*parts, "## End\n\nOttilie won the lamp. " * 9]))
    (folder / "other.txt").write_text(BODY * 9)
    return folder


def arguments(place, *more):
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    return ["summarize", *more, *common]


def test_stdout_is_the_summary_alone_and_the_same_by_pipe(place, server):
    done = server.run(arguments(place, place / "book.md", "--words", 40))
    assert done.returncode == 0, done.stderr.decode()
    assert all(line.startswith("infllm: ") for line in done.stderr.decode().splitlines())
    assert b"Ann Lee met Captain Fox" in done.stdout and done.stdout.endswith(b".\n")
    assert b"summary" in done.stderr
    piped = server.run(
        arguments(place, "-", "--words", 40, "-q"), input=(place / "book.md").read_bytes()
    )
    assert piped.stdout == done.stdout and piped.stderr == b""


def test_json_tells_parts_evidence_and_that_nothing_was_cut(place, server):  # ollama#8099
    focus = ["--focus", "who won the lamp"]
    done = server.run(arguments(place, place / "book.md", "--words", 40, "--json", *focus))
    told = json.loads(done.stdout)
    assert told["read"]["truncated"] is told["summary"]["truncated"] is False
    assert told["read"]["tokens"] + told["read"]["reused_tokens"] == told["document"]["tokens"]
    assert [part["title"] for part in told["parts"]] == [*(f"Part {n}" for n in range(1, 5)), "End"]
    assert sum(part["tokens"] for part in told["parts"]) == told["document"]["tokens"]
    assert all(part["summary"] and part["evidence"] for part in told["parts"])
    assert any("Ottilie" in passage["text"] for passage in told["summary"]["evidence"])
    lines = (place / "book.md").read_text().split("\n")
    for passage in told["summary"]["evidence"]:
        first, last = passage["lines"]
        assert passage["text"] in "\n".join(lines[first - 1 : last])
    assert told["summary"]["parts"] == 5 >= told["summary"]["parts_told"] > 0
    assert told["summary"]["wording"] == "quoted"


def test_an_outline_of_several_files_names_them(place, server):
    files = [place / "book.md", "-f", place / "other.txt"]
    done = server.run(arguments(place, *files, "--outline", "-q"))
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{place / 'book.md'} (lines 1-")
    assert lines[1].startswith(f"{place / 'other.txt'} (line 1): On that day")


def test_a_second_summary_reads_nothing_and_stats_show_every_piece(place, server):
    save = {"env": {"INFLLM_SAVE": "true"}}
    server.run(arguments(place, place / "book.md", "--outline", "-q"), **save)
    done = server.run(arguments(place, place / "book.md", "--stats", "--evidence", 1), **save)
    error = done.stderr.decode()
    assert "none is read again" in error
    assert re.search(r"infllm: (\d+)/\1 End .*: Ottilie won the lamp", error)
    assert "infllm: evidence line" in error


def test_a_model_that_writes_nonsense_is_not_quoted_as_the_document(place, server):
    done = server.run(
        arguments(place, place / "other.txt", "--wording", "own", "--words", 20, "--json")
    )
    told = json.loads(done.stdout)
    assert told["summary"]["text"]


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        (["missing.txt"], 3, "missing.txt"),
        (["{book}", "--words", "3"], 2, "--words"),
        (["{book}", "--focus", " "], 2, "--focus"),
        (["{book}", "--outline", "--words", "50"], 2, "--outline"),
        (["{book}", "--length", "huge"], 2, "huge"),
        (["{book}", "--evidence", "-1"], 2, "--evidence"),
    ],
)
def test_what_cannot_work_says_why(place, monkeypatch, capsys, more, code, says):
    filled = [str(one).format(book=place / "book.md") for one in more]
    monkeypatch.setattr(sys, "argv", ["infllm", *map(str, arguments(place, *filled))])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code
    assert says in capsys.readouterr().err
