"""Terminals, pipes and interrupts: what goes where, and when."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from terminals import on_terminal
from tiny_folder import save_folder
from tiny_tokenizers import prose

from infllm_cli.__main__ import main

COMMAND = [sys.executable, "-m", "infllm_cli"]
# Without torch: what it does, it does before.
WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None\n"
    "from infllm_cli.__main__ import main; sys.argv[0] = 'infllm'; main()"
)
NINE_LINES = "".join(f"Line {number} of the answer.\n" for number in range(1, 10)).rstrip()
MANY_WORDS = "word " * 2000
MARKUP = "[/x] [bold]red[/bold] [/INST] 😀 世界 :smile:"
ESCAPES = "\x1b[31mred\x1b[0m \x07bell \r return \x9b31m"
TERMINAL = {"TERM": "xterm-256color"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("terminal")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    (folder / "longer.txt").write_text(prose(16_000))
    (folder / "hostile.txt").write_text(prose(1500) + ESCAPES + prose(1500))
    return folder


def ask(place, *arguments, file="book.txt", model="model"):
    """The arguments of `infllm ask` with the tiny model."""
    common = ["--model", place / model, "--cache-dir", place / "cache", "--dtype", "f32"]
    file = file if file == "-" or file.startswith("/dev") else place / file
    return ["ask", file, *arguments, "--max-tokens", 3000, *common]


def terminal(
    server, arguments, *, stdout=None, env=None, answer=MARKUP, delay=0.0, setup="", **how
):
    """Run it on a pseudo-terminal; standard output as well unless it is given."""
    nothing = os.open(os.devnull, os.O_RDONLY)

    def start(tty):
        return server.start(
            arguments,
            (nothing, tty if stdout is None else stdout, tty),
            env={**TERMINAL, **(env or {})},
            answer=answer,
            delay=delay,
            setup=setup,
        )

    try:
        return on_terminal(start, **how)
    finally:
        os.close(nothing)


class Piped:
    """A running command whose streams are pipes."""

    def __init__(self, server, arguments, **how):
        (out, write_out), (err, write_err) = os.pipe(), os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY)
        self.child = server.start(arguments, (nothing, write_out, write_err), **how)
        for fd in (nothing, write_out, write_err):
            os.close(fd)
        self.out, self.err = os.fdopen(out, "rb", 0), os.fdopen(err, "rb")

    def end(self):
        """Exit code, and the rest of output and errors."""
        rest = []
        reader = threading.Thread(target=lambda: rest.append(self.out.read()))
        reader.start()
        said = self.err.read()
        reader.join()
        self.out.close()
        self.err.close()
        return self.child.wait(), rest[0], said


# --- what goes where -----------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "rows", "lines"), [(60, 10, 60), (20, 4, 9), (200, 50, 9)])
def test_every_line_of_a_long_answer_is_on_the_terminal_once(server, place, columns, rows, lines):
    answer = "".join(f"Line {number} of the answer.\n" for number in range(1, lines + 1))
    session = terminal(server, ask(place, "What?"), answer=answer, columns=columns, rows=rows)
    assert session.code == 0
    shown = session.lines(columns, rows)
    found = [line for line in shown if line.startswith("Line ")]
    assert [line[:15].split() for line in found] == [
        line[:15].split() for line in answer.splitlines()
    ]
    # What was animated is gone, the report stays.
    assert not any("looked" in line or "reading" in line or "%" in line for line in shown)
    assert any(line.startswith("answered") for line in shown)


def test_a_file_holds_the_answer_while_the_terminal_shows_progress(server, place):
    with (place / "out").open("wb") as out:
        session = terminal(
            server,
            ask(place, "What?"),
            stdout=out.fileno(),
            answer=NINE_LINES,
            delay=0.01,
        )
    assert session.code == 0
    assert (place / "out").read_text() == NINE_LINES + "\n"
    seen = session.raw.decode()
    assert "tokens" in seen and "where it looked" in seen and "\x1b[" in seen
    assert "Line 1 of" not in seen
    # The cursor that the display hid is shown again.
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize("quiet", [False, True])
def test_no_escape_and_no_carriage_return_where_no_terminal_is(server, place, quiet):
    more = ["--quiet"] if quiet else ["--stats", "--evidence", "3"]
    done = server.run(
        ask(place, f"What {ESCAPES}?", *more, file="hostile.txt"),
        env={**TERMINAL, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
        answer=MARKUP,
    )
    assert done.returncode == 0, done.stderr.decode()
    quote, answer = done.stdout.decode().split("\n", 1)
    assert quote.startswith("\u201c") and answer == MARKUP + "\n"
    assert not set(b"\x1b\r\x07") & set(done.stderr)
    assert (done.stderr == b"") == quiet


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_is_sent_no_escape_of_the_document_or_the_answer(server, place, quiet):
    more = ["-q"] if quiet else ["--stats", "--evidence", 8]
    arguments = ask(place, f"{ESCAPES}?", *more, file="hostile.txt")
    session = terminal(server, arguments, answer=ESCAPES)
    assert session.code == 0
    assert b"\x1b[31m" not in session.raw and b"\x07" not in session.raw
    assert "␛[31mred␛[0m ␇bell".encode() in session.raw


@pytest.mark.parametrize("on", ["pipe", "terminal"])
def test_markup_in_document_question_answer_and_names_is_printed_as_it_is(server, place, on):
    name = "[bold] [x] :smile:.txt"
    (place / name).write_text(f"{MARKUP}\n" * 200)
    save_folder(place / "[red]model")
    more = [f"{MARKUP}?", "--stats", "--evidence", 2, "-f", place / "book.txt"]
    arguments = ask(place, *more, file=name, model="[red]model")
    if on == "terminal":
        session = terminal(server, arguments, columns=250)
        code, seen = session.code, "\n".join(session.lines(250, 30))
    else:
        done = server.run(arguments, answer=MARKUP)
        assert done.stdout.decode() == MARKUP + "\n"
        code, seen = done.returncode, done.stderr.decode()
    assert code == 0
    assert "[/x] [bold]red[/bold] [/INST]" in seen and ":smile:" in seen
    assert f"{name}, line" in seen
    assert "[red]model" in seen


def test_where_stderr_is_no_terminal_a_line_tells_each_tenth(server, place):
    done = server.run(ask(place, "What?", file="longer.txt"), answer="yes")
    told = re.findall(r"infllm: read (\d+) of (\d+) tokens, \d+/s, .* left", done.stderr.decode())
    assert 10 <= len(told) <= 11
    tenths = [10 * int(read) // int(total) for read, total in told]
    assert tenths == sorted(set(tenths)) and tenths[-1] == 10


def test_a_dumb_terminal_gets_plain_lines(server, place):
    session = terminal(server, ask(place, "What?"), env={"TERM": "dumb"})
    assert session.code == 0 and b"\x1b" not in session.raw


def test_no_color_is_respected(server, place):
    session = terminal(server, ask(place, "What?", file="hostile.txt"), env={"NO_COLOR": "1"})
    assert session.code == 0
    colors = re.findall(rb"\x1b\[([\d;]+)m", session.raw)
    assert not [code for code in colors if any(30 <= int(n) <= 107 for n in code.split(b";"))]


# --- when ----------------------------------------------------------------------------------------


def test_progress_speed_and_time_left_are_renewed_every_second(server, place):
    session = terminal(server, ask(place, "What?", file="longer.txt"), delay=0.05, columns=120)
    shown = [at for at, piece in session.pieces if re.search(rb"\d+ %  [\d,]+ of", piece)]
    assert len(shown) > 5
    assert max(b - a for a, b in itertools.pairwise(shown)) < 1.0
    text = session.raw.decode()
    assert re.search(r"\d+ %  [\d,]+ of [\d,]+ tokens", text)
    assert re.search(r"\d+/s", text) and re.search(r"\d+:\d\d", text)
    assert re.search(r"\d+ blocks per layer, .* on the host, .* on the device", text)


@pytest.mark.parametrize("on", ["pipe", "terminal"])
def test_the_first_line_comes_before_torch_is_imported(place, on):
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, ask(place, "What?"))]
    began = time.perf_counter()
    if on == "terminal":

        class Process(subprocess.Popen):
            def wait(self, timeout=None):
                return super().wait(timeout)

        def start(tty):
            return Process(command, stdout=tty, stderr=tty, env={**os.environ, **TERMINAL})

        session = on_terminal(start)
        seen, first = session.raw, session.pieces[0][0]
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        seen = process.stderr.readline()
        first = time.perf_counter() - began
        process.communicate(timeout=60)
    assert b"starting" in seen
    # On an idle machine 0.1 s from the start of the process; tests run on busy ones.
    assert first < 2


def test_help_takes_under_half_a_second_of_the_processor():
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([*COMMAND, "--help"], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0 and min(took) < 0.5


@pytest.mark.parametrize("command", [[], ["ask"], ["plan"]])
def test_help_shows_examples_before_options_and_the_exit_codes(server, command):
    text = server.run([*command, "--help"]).stdout.decode()
    assert 0 < text.index("Examples:") < text.index("Options:") < text.index("Exit codes: 0")


def test_an_open_and_silent_standard_input_is_not_waited_for(server, place):
    read, write = os.pipe()
    with (place / "out").open("wb") as out:
        child = server.start(
            ask(place, "What?", "-q"), (read, out.fileno(), out.fileno()), answer="yes"
        )
        assert child.wait(30) == 0
    os.close(read)
    os.close(write)
    assert (place / "out").read_bytes() == b"yes\n"


def test_a_mistake_in_the_files_is_told_without_loading_torch(place):
    (place / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    for file in ("missing", "picture.png"):
        command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, ask(place, "What?", file=file))]
        done = subprocess.run(command, capture_output=True)
        assert done.returncode == 3 and file.encode() in done.stderr


def test_a_person_who_types_the_document_is_told_how_to_end_it(server, place):
    typed = []

    def start(tty):
        streams = (tty, tty, tty)
        return server.start(ask(place, "What?", file="-"), streams, env=TERMINAL, answer="yes")

    def type_it(seen, child, write):
        if not typed and b"Ctrl-D" in seen:
            typed.append(True)
            write(b"The whale is white.\n\x04")

    session = on_terminal(start, typing=type_it)
    assert session.code == 0 and typed
    assert any(line == "yes" for line in session.lines(100, 30))


# --- ends ----------------------------------------------------------------------------------------


def test_a_first_interrupt_keeps_the_answer_so_far_and_says_so(server, place):
    running = Piped(server, ask(place, "What?"), answer=MANY_WORDS, delay=0.01)
    first = b""
    while len(first) < 14:
        first += running.out.read(14)
    running.child.interrupt()
    code, rest, said = running.end()
    assert code == 130
    assert (first + rest).startswith(b"word word word") and rest.endswith(b"\n")
    assert b"interrupted; the answer so far has been written." in said
    assert b"Traceback" not in said


def test_an_interrupt_of_a_json_answer_still_gives_json(server, place):
    arguments = ask(place, "What?", "--json", "--stats")
    running = Piped(server, arguments, answer=MANY_WORDS, delay=0.01)
    for line in running.err:
        if line.startswith(b"infllm: answer 3"):
            break
    running.child.interrupt()
    code, rest, _ = running.end()
    assert code == 130
    [answer] = json.loads(rest)["answers"]
    assert answer["finish"] == "interrupted" and answer["answer"].startswith("word")


@pytest.mark.parametrize("quiet", [False, True])
def test_an_interrupt_while_reading_says_what_is_kept(server, place, quiet):
    more = ["-q"] if quiet else []
    setup = (
        "import os, signal\nfrom infllm_cli import console\n"
        "def stop(self, event): os.kill(os.getpid(), signal.SIGINT)\n"
        "console.Console.chunk_read = console.PlainConsole.chunk_read = stop"
    )
    done = server.run(ask(place, "What?", *more), setup=setup, answer="yes")
    assert done.returncode == 130 and done.stdout == b""
    if quiet:
        assert done.stderr == b""
    else:
        assert re.search(rb"interrupted after [\d,]+ of [\d,]+ tokens; nothing", done.stderr)


def test_an_interrupt_before_the_reading_exits_130(server, place):
    setup = (
        "import os, signal\nfrom infllm_cli.models import catalog\n"
        "def stop(*_): os.kill(os.getpid(), signal.SIGINT)\n"
        "catalog.resolve = stop"
    )
    for arguments in (ask(place, "What?"), ["model", "pull", place / "model"]):
        done = server.run(arguments, setup=setup)
        assert done.returncode == 130 and done.stdout == b""
        assert done.stderr.endswith(b"infllm: interrupted.\n")


def test_a_second_interrupt_ends_at_once_and_leaves_the_cursor_visible(server, place):
    sent = []

    def interrupt(seen, child):
        if not sent and b"reading" in seen:
            sent.append(time.perf_counter())
            child.interrupt()
            time.sleep(0.2)
            child.interrupt()

    # What the first interrupt begins takes half a minute.
    setup = (
        "import time\nfrom infllm_cli import live_console\n"
        "live_console.LiveConsole.note = lambda *_: time.sleep(30)"
    )
    arguments = ask(place, "What?", file="longer.txt")
    session = terminal(server, arguments, setup=setup, delay=0.1, when=interrupt)
    assert session.code == 130 and time.perf_counter() - sent[0] < 10
    assert session.raw.rfind(b"\x1b[?25h") > session.raw.rfind(b"\x1b[?25l")


def test_an_ignored_interrupt_stays_ignored(server, place):
    setup = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    running = Piped(server, ask(place, "What?"), answer="yes", setup=setup, delay=0.02)
    for line in running.err:
        if line.startswith(b"infllm: read "):
            break
    running.child.interrupt()
    code, out, _ = running.end()
    assert code == 0 and out == b"yes\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_closed_pipe_ends_quietly(server, place, quiet):
    more = ["-q"] if quiet else []
    running = Piped(server, ask(place, "What?", *more), answer=MANY_WORDS, delay=0.002)
    assert running.out.read(5)
    running.out.close()
    said = running.err.read()
    assert running.child.wait() == 0
    assert b"Traceback" not in said and b"Broken" not in said and b"Exception" not in said
    assert (said == b"") == quiet


def test_a_reader_of_the_errors_that_left_ends_it_quietly(server, place):
    running = Piped(server, ask(place, "What?"), answer=MANY_WORDS, delay=0.002)
    running.err.readline()
    running.err.close()
    running.out.read()
    assert running.child.wait() == 0


def test_a_full_disk_behind_standard_output_is_an_error(server, place):
    with Path("/dev/full").open("wb") as full, (place / "err").open("wb") as err:
        streams = (err.fileno(), full.fileno(), err.fileno())
        child = server.start(ask(place, "What?", "-q"), streams, answer=NINE_LINES)
        assert child.wait() == 5
    said = (place / "err").read_bytes()
    assert said == b"infllm: the answer cannot be written: No space left on device.\n"


@pytest.mark.parametrize(("closed", "file", "code"), [(0, "-", 3), (1, "book.txt", 0), (2, "-", 0)])
def test_closed_streams_are_no_reason_to_crash(server, place, closed, file, code):
    done = server.run(
        ask(place, "What?", file=file), closed=closed, answer="yes", input=prose(3000).encode()
    )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    assert done.stdout == (b"yes\n" if closed == 2 else b"")
    if code == 3:
        assert b"standard input is closed" in done.stderr


def test_an_encoding_that_lacks_a_character_costs_no_answer(server, place):
    for more in (["-q"], ["--json"]):
        done = server.run(
            ask(place, "What?", *more), env={"PYTHONIOENCODING": "ascii"}, answer=MARKUP
        )
        assert done.returncode == 0 and done.stdout.isascii()
    assert json.loads(done.stdout)["answers"][0]["answer"] == MARKUP


def test_a_files_name_that_is_no_text_costs_nothing(server, place):
    name = os.fsdecode(b"caf\xe9.txt")
    (place / name).write_text(prose(3000))
    done = server.run(
        ask(place, "What?", "--json", "-f", place / "book.txt", file=name), answer="yes"
    )
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout)["document"]["files"][0]["name"].endswith("caf\udce9.txt")


# --- documents, questions, limits ----------------------------------------------------------------


def test_a_process_substitution_and_a_fifo_are_documents(server, place):
    plain = json.loads(server.run(ask(place, "What?", "--json"), answer="yes").stdout)
    os.mkfifo(place / "fifo")
    for file in ("fifo", "/dev/fd/0", "/dev/stdin", "-"):
        if file == "fifo":
            feeder = threading.Thread(
                target=lambda: (place / "fifo").write_bytes((place / "book.txt").read_bytes())
            )
            feeder.start()
        done = server.run(
            ask(place, "What?", "--json", file=file),
            answer="yes",
            input=(place / "book.txt").read_bytes(),
        )
        assert done.returncode == 0, done.stderr.decode()
        told = json.loads(done.stdout)
        assert told["document"]["sha256"] == plain["document"]["sha256"]
        assert told["read"]["tokens"] == plain["read"]["tokens"]
        assert told["answers"][0]["evidence"] == [
            {**passage, "file": told["document"]["name"]}
            for passage in plain["answers"][0]["evidence"]
        ]
    feeder.join()


def test_several_files_are_one_document_and_evidence_names_file_and_line(server, place):
    (place / "b.txt").write_bytes(prose(2500, 2).encode("utf-16"))
    piped = prose(2500, 3).encode()
    arguments = ask(place, "Who said 12?", "-f", place / "b.txt", "-f", "-")
    done = server.run([*arguments, "--json"], input=piped, answer=MARKUP)
    assert done.returncode == 0, done.stderr.decode()
    told = json.loads(done.stdout)
    texts = {
        str(place / "book.txt"): (place / "book.txt").read_text(),
        str(place / "b.txt"): prose(2500, 2),
        "standard input": prose(2500, 3),
    }
    assert [file["name"] for file in told["document"]["files"]] == list(texts)
    assert [file["encoding"] for file in told["document"]["files"]][1] == "utf-16-le"
    assert told["read"]["tokens"] == told["document"]["tokens"]
    passages = told["answers"][0]["evidence"] + told["answers"][0]["reread"]
    assert passages
    for passage in passages:
        first, last = passage["lines"]
        lines = texts[passage["file"]].split("\n")[first - 1 : last]
        assert passage["text"] in "\n".join(lines)
    done = server.run([*arguments, "--evidence", "3"], input=piped, answer=MARKUP)
    place_ = rb"infllm: evidence (.*(b\.txt|book\.txt)|standard input), lines? \d+"
    assert re.search(place_, done.stderr)
    assert b"b.txt is read as utf-16-le" in done.stderr


def test_questions_of_arguments_file_and_standard_input(server, place):
    (place / "questions").write_text("Two?\n\nThree?\n")
    arguments = ask(place, "One?", "--questions-file", place / "questions", "--json")
    told = json.loads(server.run(arguments, answer="yes").stdout)
    asked = [one["question"] for one in told["answers"]]
    assert asked == ["One?", "Two?", "Three?"]
    done = server.run(ask(place, "--questions-file", "-"), input=b"One?\nTwo?\n", answer="yes")
    assert done.stdout.decode() == "yes\n\nyes\n"


def test_a_reading_is_remembered_for_plans(server, place):
    assert server.run(ask(place, "What?"), answer="yes").returncode == 0
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    done = server.run(["plan", place / "book.txt", *common])
    assert done.returncode == 0
    assert re.search(rb"reading   about .* at [\d,]+ tokens/s", done.stdout)


def test_a_document_above_the_host_limit_is_refused(server, place):
    done = server.run(ask(place, "What?", "--host-limit", "10kB"))
    assert done.returncode == 5 and done.stdout == b""
    assert b"--host-limit" in done.stderr and b"reading" not in done.stderr


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("MemoryError()", 5),
        ("torch.OutOfMemoryError('CUDA out of memory')", 5),
        ("RuntimeError('[enforce fail] DefaultCPUAllocator: can\\'t allocate memory: 9 bytes')", 5),
        ("RuntimeError('shapes')", 1),
    ],
)
def test_memory_that_runs_out_is_told_and_other_failures_keep_their_trace(
    server, place, raised, code
):
    setup = (
        "import torch\nfrom infllm_cli.reader import Reader\n"
        f"def fail(*_, **__): raise {raised}\n"
        "Reader.forward = fail"
    )
    done = server.run(ask(place, "What?", "-q"), setup=setup)
    assert done.returncode == code and done.stdout == b""
    if code == 5:
        assert done.stderr.startswith(b"infllm: out of memory.") and done.stderr.count(b"\n") == 1
    else:
        assert b"Traceback" in done.stderr


def test_completion_knows_commands_flags_and_models(server):
    def complete(*words):
        env = {
            "_INFLLM_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["infllm", *words]),
            "COMP_CWORD": str(len(words)),
        }
        done = server.run([], env=env)
        assert done.returncode == 0 and done.stderr == b""
        return done.stdout.decode().split()

    commands = ["ask", "summarize", "chat", "read", "plan", "fit-gates", "bench"]
    commands += ["model", "eval", "memory"]
    assert complete("") == commands
    assert "--max-tokens" in complete("ask", "--max")
    assert complete("ask", "--model", "smol") == ["smollm2-135m"]
    assert complete("ask", "--dtype", "f") == ["f16", "f32"]
    done = server.run([], env={"_INFLLM_COMPLETE": "source_bash"})
    assert done.returncode == 0 and b"_INFLLM_COMPLETE=complete_bash" in done.stdout


def test_the_command_leaves_the_signal_handler_as_it_was(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGINT)  # whoever runs the tests may ignore it
    monkeypatch.setattr(sys, "argv", ["infllm", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert signal.getsignal(signal.SIGINT) is before
