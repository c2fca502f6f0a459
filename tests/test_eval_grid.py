"""Running a grid: what is read once, what is written down, and how a command goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_readers import SMALL, make_reader

from infllm_cli.console import Console
from infllm_cli.document import decode_document
from infllm_cli.errors import CapacityError, InfllmError, UsageError
from infllm_cli.evaluate.grid import Deadline, Form, Grid, GridRunner, TimeIsUp
from infllm_cli.evaluate.results import Results
from infllm_cli.evaluate.tables import as_text, grid_table
from infllm_cli.evaluate.tasks import filler, kv, lines
from infllm_cli.evaluate.tasks.base import evenly
from infllm_cli.limits import Limits
from infllm_cli.memory.config import MemoryConfig, Policy
from infllm_cli.memory.step import Phase
from infllm_cli.reader import Reader
from infllm_cli.sampling import Answering, AnswerOptions, Quoting

SIZES = {
    name: getattr(SMALL, name)
    for name in ("sink_tokens", "window_tokens", "block_tokens", "chunk_tokens", "answer_blocks")
}
OPTIONS = AnswerOptions(answering=Answering.MEMORY, quote=Quoting.NEVER)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return make_reader().loaded


def short(task: Any) -> Any:
    """The same with short answers: a random model does not end them by itself."""
    return replace(task, max_tokens=3)


def grid_of(**changes: Any) -> Grid:
    values: dict[str, Any] = {
        "tasks": [filler.passkey()],
        "lengths": [600],
        "depths": evenly(2),
        "policies": [Policy.INFLLM],
        "samples": 1,
        "seed": 0,
        "options": OPTIONS,
        "sizes": SIZES,
    }
    return Grid(**{**values, **changes})


class Counting(Console):
    """Counts what is read and asked."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.said: list[str] = []

    def begin_reading(self, name: str, memory: Any) -> None:
        self.read.append(name)

    def note(self, text: str) -> None:
        self.said.append(text)


def runner_of(
    loaded: Any, tmp_path: Path, grid: Grid, file: Path | None = None, seconds: float | None = None
) -> tuple[GridRunner, Counting]:
    console = Counting()
    limits = Limits.usual()
    deadline = Deadline(seconds)
    return GridRunner(grid, loaded, Results(file), console, tmp_path, limits, deadline), console


def test_a_document_is_read_once_by_each_policy(loaded: Any, tmp_path: Path) -> None:
    policies = [Policy.INFLLM, Policy.STREAMING_LLM]
    grid = grid_of(tasks=[kv.kv()], depths=evenly(3), policies=policies, lengths=[900])
    runner, console = runner_of(loaded, tmp_path, grid)
    runner.run()
    assert console.read == ["kv official, 900, infllm", "kv official, 900, streaming-llm"]
    assert [(r["policy"], r["depth"]) for r in runner.rows] == [
        (policy.value, depth) for policy in policies for depth in evenly(3)
    ]
    # Both were asked about the same document.
    first, second = (r for r in runner.rows if r["depth"] == 1.0)
    assert (first["question"], first["known"]) == (second["question"], second["known"])


def test_every_setting_is_written_down(loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    runner, _ = runner_of(loaded, tmp_path, grid_of(), file)
    runner.run()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == runner.rows and len(rows) == 2
    for row in rows:
        assert (row["task"], row["policy"], row["length"], row["sample"]) == (
            ("passkey", "infllm", 600, 0)
        )
        assert row["document_tokens"] < 600 and row["read_seconds"] > 0
        assert row["settings"]["memory"] == runner.readers[Policy.INFLLM].config.as_dict()
        assert row["settings"]["seed"] == 0 and row["settings"]["form"] == "published"
        assert row["versions"].keys() == {"infllm", "torch", "transformers"}
        assert row["score"] in (0.0, 1.0) and row["blocks"] > 0


def test_the_same_grid_gives_the_same_answers(loaded: Any, tmp_path: Path) -> None:
    def answers(seed: int) -> list[tuple[str, list[str]]]:
        runner, _ = runner_of(loaded, tmp_path, grid_of(seed=seed))
        runner.run()
        return [(row["answer"], row["known"]) for row in runner.rows]

    assert answers(0) == answers(0)
    assert [known for _, known in answers(0)] != [known for _, known in answers(1)]


def test_what_has_been_measured_is_not_measured_again(loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    first, _ = runner_of(loaded, tmp_path, grid_of(), file)
    first.run()
    written = file.read_bytes()
    again, console = runner_of(loaded, tmp_path, grid_of(), file)
    again.run()
    assert again.found == len(again.cells) == 2
    assert console.read == [] and file.read_bytes() == written
    assert again.rows == first.rows
    # More depths, and only those are new; another seed, and all is.
    more, console = runner_of(loaded, tmp_path, grid_of(depths=evenly(3)), file)
    more.run()
    assert more.found == 2 and len(console.read) == 1 and len(more.rows) == 3
    other, _ = runner_of(loaded, tmp_path, grid_of(seed=1), file)
    assert other.found == 0
    sizes = {**SIZES, "answer_blocks": 1}
    assert runner_of(loaded, tmp_path, grid_of(sizes=sizes), file)[0].found == 0


def test_one_question_that_is_missing_is_asked_alone(loaded: Any, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    grid = grid_of(tasks=[lines.lines()], depths=evenly(3), lengths=[900])
    runner, _ = runner_of(loaded, tmp_path, grid, file)
    runner.run()
    rows = file.read_text().splitlines(keepends=True)
    # A killed process: a line is missing, and the last one is torn.
    file.write_text("".join(rows[:2]) + rows[2][:50])
    again, console = runner_of(loaded, tmp_path, grid, file)
    assert again.results.broken and again.found == 2
    again.run()
    assert len(console.read) == 1
    assert json.loads(file.read_text().splitlines()[2])["depth"] == 1.0
    kept = [{k: v for k, v in row.items() if "seconds" not in k} for row in runner.rows]
    assert [{k: v for k, v in row.items() if "seconds" not in k} for row in again.rows] == kept


def test_time_that_is_up_ends_between_chunks_and_keeps_what_there_is(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"
    runner, _ = runner_of(loaded, tmp_path, grid_of(depths=evenly(3)), file)
    asked = []

    def ask(self: Reader, memory: Any, question: str, options: Any) -> Any:
        asked.append(question)
        if len(asked) == 2:
            runner.deadline = Deadline(0)
        return original(self, memory, question, options)

    original = Reader.ask
    monkeypatch.setattr(Reader, "ask", ask)
    with pytest.raises(TimeIsUp):
        runner.run()
    assert len(runner.rows) == len(file.read_text().splitlines()) == 2
    with pytest.raises(TimeIsUp):
        runner_of(loaded, tmp_path, grid_of(), seconds=0)[0].run()


def test_a_cell_that_cannot_be_measured_is_told_and_tried_again(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results.jsonl"

    def full(*_: Any, **__: Any) -> Any:
        raise CapacityError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Reader, "open", full)
        runner, console = runner_of(loaded, tmp_path, grid_of(), file)
        runner.run()
    assert [row["error"] for row in runner.rows] == ["no room"] * 2
    assert any("no room" in text for text in console.said)
    assert "0 % of 2, 2 failed" in as_text(grid_table(runner.rows))
    again, _ = runner_of(loaded, tmp_path, grid_of(), file)
    assert again.found == 0
    again.run()
    assert not any("error" in row for row in again.rows)
    assert runner_of(loaded, tmp_path, grid_of(), file)[0].found == 2


def test_a_length_that_cannot_be_made_is_told_before_anything_is_read(
    loaded: Any, tmp_path: Path
) -> None:
    grid = grid_of(tasks=[filler.passkey(), lines.lines()], lengths=[260, 600])
    runner, console = runner_of(loaded, tmp_path, grid)
    with pytest.raises(UsageError, match="lines of 260 tokens"):
        runner.run()
    assert console.read == []


def test_dense_attention_fails_where_memory_ends_and_blocks_go_on(
    loaded: Any, tmp_path: Path
) -> None:
    policies = [Policy.DENSE, Policy.STREAMING_LLM]
    runner, _ = runner_of(loaded, tmp_path, grid_of(policies=policies, depths=evenly(1)))
    runner.limits = replace(runner.limits, host=100_000)
    runner.run()
    told = {row["policy"]: row.get("error", "") for row in runner.rows}
    assert "--host-limit" in told["dense"] and told["streaming-llm"] == ""


def test_what_is_wrong_with_all_cells_ends_the_command(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any, **__: Any) -> Any:
        raise UsageError("--window")

    monkeypatch.setattr(Reader, "open", wrong)
    with pytest.raises(InfllmError, match="--window"):
        runner_of(loaded, tmp_path, grid_of())[0].run()


def test_a_published_question_stands_in_the_message_of_its_document(loaded: Any) -> None:
    reader = Reader(loaded, MemoryConfig.for_model(loaded.trained_length, **SIZES))
    prompt, one = reader.prompt, reader.prompt.in_one_turn()
    decode = loaded.tokenizer.decode
    around = [one.prefix, one.task_ids(), one.question_ids(" What? "), one.closing]
    text = decode([int(i) for ids in around for i in ids])
    assert text == "<|im_start|>user\n\n\nWhat?<|im_end|>\n<|im_start|>assistant\n"
    assert one.around_tokens("What?") == sum(map(len, around))
    assert prompt.around_tokens("What?") > one.around_tokens("What?")
    prefilled = one.around_tokens("What?", "  It is")
    assert prefilled - one.around_tokens("What?") == len(prompt.plain_ids("It is"))


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("answering", Answering)
def test_every_form_and_way_of_answering_works(
    loaded: Any, tmp_path: Path, form: Form, answering: Answering
) -> None:
    options = replace(OPTIONS, answering=answering)
    grid = grid_of(form=form, options=options, depths=evenly(1))
    runner, console = runner_of(loaded, tmp_path, grid)
    runner.run()
    (row,) = runner.rows
    assert row["settings"]["answering"] == answering.value
    assert len(console.read) == (answering is not Answering.PASSAGES)


@pytest.mark.parametrize("answering", [Answering.MEMORY, Answering.BOTH])
@pytest.mark.parametrize("policy", Policy)
def test_every_policy_is_measured(
    loaded: Any, tmp_path: Path, policy: Policy, answering: Answering
) -> None:
    options = replace(OPTIONS, answering=answering)
    grid = grid_of(policies=[policy], depths=evenly(1), options=options)
    runner, _ = runner_of(loaded, tmp_path, grid)
    runner.run()
    (row,) = runner.rows
    assert "error" not in row and row["settings"]["memory"]["policy"] == policy.value
    assert row["device_bytes"] > 0 and (row["blocks"] > 0) == policy.has_blocks


def test_an_answer_goes_on_from_its_prefill(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(loaded, MemoryConfig.for_model(loaded.trained_length, **SIZES))
    memory = reader.read(decode_document(b"The whale and the ship. " * 20, "text"))
    seen: list[int] = []
    original = Reader.forward

    def forward(self: Reader, state: Any, phase: Phase, ids: Any, **named: Any) -> Any:
        if phase is Phase.ASK:
            seen.extend(ids.tolist())
        return original(self, state, phase, ids, **named)

    plain = reader.ask(memory, "What?", replace(OPTIONS, max_tokens=4)).text
    monkeypatch.setattr(Reader, "forward", forward)
    options = replace(OPTIONS, max_tokens=4, prefill=" It is the ")
    prefilled = reader.ask(memory, "What?", options).text
    end = [*reader.prompt.closing, *reader.prompt.plain_ids("It is the")]
    assert seen[-len(end) :] == [int(i) for i in end]
    assert prefilled != plain and "It is the" not in prefilled


# -- the file of results ------------------------------------------------------------------------


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text('{"cell": "a"}\nhello\n')
    with pytest.raises(UsageError, match=r"notes\.txt: line 2 is no result"):
        Results(file)
    assert file.read_text().endswith("hello\n")
    with pytest.raises(UsageError, match="there is no folder"):
        Results(tmp_path / "none" / "r.jsonl")
    assert list(Results(tmp_path / "new.jsonl")) == []


def test_rows_come_back_from_the_file_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    rows = [{"cell": "a", "answer": "“é”\n\u2028", "score": 0.1}, {"cell": "b", "score": 1.0}]
    results = Results(file)
    for row in rows:
        results.add(row)
    assert list(Results(file)) == rows
