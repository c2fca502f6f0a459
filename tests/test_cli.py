"""The command as a user runs it: processes, pipes, a pseudo-terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_folder import save_folder
from tiny_tokenizers import prose

from infllm_cli.__main__ import main

SAMPLES = Path(__file__).parents[1] / "samples"
COMMAND = [sys.executable, "-m", "infllm_cli"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny model and a document of a few windows."""
    folder = tmp_path_factory.mktemp("cli")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def command(place, *arguments, model="model"):
    common = ["--model", place / model, "--cache-dir", place / "cache", "--dtype", "f32"]
    return [*COMMAND, "ask", *map(str, [*arguments, *common])]


def run(place, *arguments, **settings):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **settings.pop("env", {})}
    return subprocess.run(
        command(place, *arguments), capture_output=True, timeout=120, env=environment, **settings
    )


@pytest.fixture(scope="module")
def answered(place):
    """One plain run with everything that JSON tells."""
    done = run(place, place / "book.txt", "What is it?", "And where?", "--json", "--max-tokens", 12)
    assert done.returncode == 0, done.stderr.decode()
    return done, json.loads(done.stdout)


def test_json_names_document_reading_answers_memory_and_model(place, answered):
    _, told = answered
    size = (place / "book.txt").stat().st_size
    assert told["schema"] == 1
    assert told["document"]["bytes"] == size
    assert told["document"]["encoding"] == "utf-8"
    assert told["read"]["tokens"] == told["document"]["tokens"] > 1000
    assert told["read"]["truncated"] is False
    assert [a["question"] for a in told["answers"]] == ["What is it?", "And where?"]
    assert all(a["finish"] in ("stop", "length", "repeat") for a in told["answers"])
    assert told["memory"]["blocks"] > 0 and told["memory"]["host_bytes"] > 0
    assert told["memory"]["disk_bytes"] == 0
    assert told["model"]["architecture"] == "LlamaForCausalLM"
    assert told["model"]["trained_length"] == 512


def test_evidence_stands_in_the_document_at_its_lines(place, answered):
    _, told = answered
    lines = (place / "book.txt").read_text().split("\n")
    passages = [p for a in told["answers"] for p in a["evidence"] + a["reread"]]
    assert passages
    for passage in passages:
        first, last = passage["lines"]
        assert passage["text"] in "\n".join(lines[first - 1 : last])


def test_stdout_is_the_answer_alone_and_stderr_has_our_lines_alone(place, answered):
    _, told = answered
    done = run(
        place, place / "book.txt", "What is it?", "--max-tokens", 12, env={"FORCE_COLOR": "1"}
    )
    assert done.returncode == 0
    assert all(line.startswith("infllm: ") for line in done.stderr.decode().splitlines())
    assert done.stdout.decode().strip() == told["answers"][0]["answer"]
    assert done.stdout.endswith(b"\n")
    assert b"\x1b" not in done.stdout + done.stderr and b"\r" not in done.stdout + done.stderr
    assert b"read" in done.stderr and b"blocks" in done.stderr


def test_standard_input_is_the_same_document_and_quiet_is_silent(place, answered, server):
    _, told = answered
    book = (place / "book.txt").read_bytes()
    arguments = command(place, "-", "What is it?", "--json", "-q", "--max-tokens", 12)
    done = server.run(arguments[len(COMMAND) :], input=book)
    assert done.stderr == b""
    piped = json.loads(done.stdout)
    assert piped["document"]["sha256"] == told["document"]["sha256"]
    assert piped["read"]["tokens"] == told["read"]["tokens"]
    assert piped["answers"][0]["answer"] == told["answers"][0]["answer"]


def test_a_closed_pipe_ends_quietly(place):
    line = " ".join(f"'{part}'" for part in command(place, place / "book.txt", "What is it?", "-q"))
    done = subprocess.run(
        f"{line} --max-tokens 60 | head -c 1", shell=True, capture_output=True, timeout=120
    )
    assert len(done.stdout) == 1
    assert done.stderr == b""


def test_base_model_is_asked_in_a_plain_form_and_says_so(place, server):
    save_folder(place / "base", chat=False)
    arguments = command(place, place / "book.txt", "What?", "--max-tokens", 3, model="base")
    done = server.run(arguments[len(COMMAND) :])
    assert done.returncode == 0
    assert b"no chat template" in done.stderr


def fails(monkeypatch, capsys, *arguments):
    """The exit code and the message of a command that cannot work, run in this process."""
    monkeypatch.setattr(sys, "argv", ["infllm", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["ask", "missing.txt", "What?"], 3, "missing.txt"),
        (["ask", "What?", "{book}"], 2, "The file comes first"),
        (["ask", "{book}", "  "], 2, "question is empty"),
        (["ask", "{book}"], 2, "QUESTION"),
        (["ask", "{book}", "What?", "--max-tokens", "0"], 2, "--max-tokens"),
        (["ask", "{book}", "What?", "--temperature", "-1"], 2, "--temperature"),
        (["ask", "{book}", "What?", "--evidence", "-1"], 2, "--evidence"),
        (["ask", "{book}", "What?", "--dtype", "f64"], 2, "f64"),
        (["ask", "{book}", "What?", "--model", "no-such-model"], 4, "no-such-model"),
        (["ask", "{book}", "What?", "--model", "{model}", "--window", "4000"], 2, "--window"),
        (["ask", "{book}", "What?", "--model", "{model}", "--blocks", "0"], 2, "--blocks"),
        (["ask", "{book}", "What?", "--model", "{model}", "--device", "cuda:99"], 2, "--device"),
        (["model", "show", "no-such-model"], 4, "no-such-model"),
    ],
)
def test_mistakes_name_what_is_wrong_and_exit_as_documented(
    place, monkeypatch, capsys, arguments, code, says
):
    names = {"book": place / "book.txt", "model": place / "model"}
    given = [argument.format(**names) for argument in arguments]
    exit_code, message = fails(monkeypatch, capsys, *given, "--cache-dir", place / "cache")
    assert exit_code == code
    assert says in message
    assert "Traceback" not in message


def test_help_comes_without_torch():
    code = "import sys; from infllm_cli.cli import app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    done = subprocess.run([*COMMAND, "ask", "--help"], capture_output=True, timeout=60)
    assert b"Examples:" in done.stdout and b"Exit codes" in done.stdout


def test_version_and_model_list():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, timeout=60)
    assert done.stdout.startswith(b"infllm ")
    done = subprocess.run([*COMMAND, "model", "list"], capture_output=True, timeout=60)
    assert b"smollm2-135m" in done.stdout


def test_ci_runs_the_command_of_the_readme():
    root = SAMPLES.parent
    readme = (root / "README.md").read_text()
    assert "python -m pip install -e . --group dev && python -m pytest -n auto" in readme
    script = (root / ".ci" / "run").read_text()
    assert "pip install --quiet -e . --group dev" in script and "python -m pytest -n auto" in script


@pytest.mark.model
def test_the_readme_question_is_answered_rightly():
    readme = (SAMPLES.parent / "README.md").read_text()
    question = "What is the name of the magistrate of Fennacre Hall?"
    assert f'infllm ask samples/story.txt "{question}"' in readme
    done = subprocess.run(
        [*COMMAND, "ask", str(SAMPLES / "story.txt"), question, "--json", "-q"],
        capture_output=True,
        timeout=600,
    )
    told = json.loads(done.stdout)
    assert "Amory" in told["answers"][0]["answer"]
    assert told["read"]["tokens"] == told["document"]["tokens"] > 10_000
    assert told["memory"]["blocks"] > 80
    assert any("Amory" in p["text"] for p in told["answers"][0]["evidence"])
    assert done.stderr == b""
