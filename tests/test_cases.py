"""Inputs that broke other tools (CASES.md), where no module's own tests hold them already."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from model_folders import POINTER
from tiny_folder import save_folder
from tiny_readers import TRAINED, chat_tokenizer, make_reader, read_text
from tiny_tokenizers import backend_of, prose

from infllm_cli import reader as reader_module
from infllm_cli.document import decode_document, load_document
from infllm_cli.sampling import AnswerOptions
from infllm_cli.tokens import PlainTokenizer

SHORT = AnswerOptions(max_tokens=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def ask(place, *arguments, file="book.txt", model="model"):
    common = ["--model", place / model, "--cache-dir", place / "cache", "--dtype", "f32"]
    return ["ask", place / file, *arguments, "--max-tokens", 8, *common]


# --- nothing lost, nothing cut -------------------------------------------------------------------


@pytest.mark.model
def test_a_fact_in_line_one_of_a_document_many_windows_long_is_found():
    # ollama#3839: the tool kept the end of what did not fit.
    story = (Path(__file__).parents[1] / "samples" / "story.txt").read_text().split("\n\n")
    fact = "One of the special magic numbers for frozen-compass is: 4817023.\n\n"
    text = fact + "\n\n".join(story)[:7_000]
    question = "What is the special magic number for frozen-compass?"
    command = [sys.executable, "-m", "infllm_cli", "ask", "-", question, "--json", "-q"]
    done = subprocess.run(
        [*command, "--window", "256", "--max-tokens", "24"],
        input=text.encode(),
        capture_output=True,
        timeout=300,
    )
    told = json.loads(done.stdout)
    assert "4817023" in told["answers"][0]["answer"]
    assert told["read"]["tokens"] == told["document"]["tokens"] > 5 * 256
    assert told["read"]["truncated"] is False and told["memory"]["whole"] is False


@pytest.mark.parametrize("document", [400, 6000])
def test_a_question_of_3000_tokens_reaches_the_model_whole(monkeypatch, document):
    # ollama#6253: longer than the window, than the memory's context, than the training.
    reader = make_reader()
    question = prose(12_500, seed=4).strip()
    ids = reader.prompt.question_ids(question).tolist()
    assert len(ids) > 3000 > TRAINED
    memory = reader.open(
        decode_document(prose(document).encode(), "text"),
        reserve_tokens=reader.reserve_for([question], SHORT),
    )
    assert memory.whole == (document == 400)
    for _ in reader.read_steps(memory):
        pass
    given, forward = [], reader_module.forward

    def spied(model, piece, *rest, **named):
        given.extend(piece.tolist())
        return forward(model, piece, *rest, **named)

    monkeypatch.setattr(reader_module, "forward", spied)
    answer = reader.ask(memory, question, SHORT)
    assert answer.tokens > 0 or answer.finish == "stop"
    assert any(given[i : i + len(ids)] == ids for i in range(len(given) - len(ids) + 1))


# --- bytes ---------------------------------------------------------------------------------------


def test_line_ends_of_another_system_change_neither_tokens_nor_answer_nor_lines():
    # tabby#3279
    text = prose(2500)
    answers = []
    for data in (text.encode(), text.replace("\n", "\r\n").encode()):
        reader = make_reader()
        memory = reader.open(decode_document(data, "text"), allow_whole=False)
        for _ in reader.read_steps(memory):
            pass
        answer = reader.ask(memory, "Where is captain Ahab?", SHORT)
        answers.append((memory.tokens.ids.tolist(), answer.text, answer.evidence, answer.reread))
    assert answers[0] == answers[1] and answers[0][3]


def test_a_gutenberg_book_with_mark_line_ends_and_latin1_is_read(tmp_path):
    # localGPT#344
    book = "\r\n".join(
        [
            "Un garçon rêvait déjà de Noël au café",
            "",
            "« Voilà – “tout” », dit-elle près de la forêt.",
        ]
        * 50
    )
    for encoding, mark in (
        ("utf-8", b"\xef\xbb\xbf"),
        ("cp1252", b""),
        ("cp1252", b"\xef\xbb\xbf"),
    ):
        path = tmp_path / f"{encoding}{len(mark)}.txt"
        path.write_bytes(mark + book.encode(encoding))
        document = load_document(path)
        assert document.text == book.replace("\r\n", "\n") and document.lines == 150


def test_a_dump_of_a_repository_needs_nothing_special(tmp_path):
    # files-to-prompt, repomix (XML) and cat.
    code = "def f(x):\n\treturn [x]  # <tag> &amp; ```\n"
    dumps = {
        "files-to-prompt": f"src/a.py\n---\n{code}\n\n---\n",
        "repomix": f'<file path="src/a.py">\n{code}</file>\n',
        "cat": code * 3,
    }
    reader = make_reader()
    for name, dump in dumps.items():
        document = decode_document(dump.encode(), name)
        assert document.text == dump
        ids = reader.prompt.tokenizer.encode(document.text).ids.tolist()
        assert reader.loaded.tokenizer.decode(ids) == dump


# --- control tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_a_document_with_every_special_string_is_read_to_its_end(whole):
    # kotaemon#311, docling#2354: stopped at the first, or was refused by the tokenizer.
    tokenizer = chat_tokenizer()
    strings = [token.content for token in tokenizer.added_tokens_decoder.values()]
    assert len(strings) >= 6
    reader = make_reader(tokenizer=tokenizer)
    text = "\n".join(f"{string} and text after {string}{string}" for string in strings)
    memory = read_text(reader, text + "\nThe end.", whole=whole)
    assert memory.complete
    assert tokenizer.decode(memory.tokens.ids).endswith(f"{strings[-1]}{strings[-1]}\nThe end.")
    assert not reader.prompt.tokenizer.control_ids & set(memory.tokens.ids.tolist())


# --- size and shape ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b"", 3, "is empty"),
        (b" \n\t\r\n", 3, "only white space"),
        (b"\xef\xbb\xbf", 3, "only a byte order mark"),
        (b"x", 0, ""),
        ("é".encode(), 0, ""),
        ("😀".encode(), 0, ""),
    ],
)
def test_the_smallest_documents_are_answered_or_refused(server, place, data, code, says):
    # vllm#7283, candle#1095
    (place / "small.txt").write_bytes(data)
    done = server.run(ask(place, "What is it?", "-q", file="small.txt"))
    assert done.returncode == code and says in done.stderr.decode()
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize("question", ["", " ", "\n"])
def test_an_empty_question_is_a_mistake_of_use(server, place, question):
    done = server.run(ask(place, question))
    assert done.returncode == 2 and b"question is empty" in done.stderr


@pytest.mark.parametrize(
    "unit",
    [
        "_",
        "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo",
        '{"a":[1,2,{"b":null}],"c":"d"},',
        "孔乙己是站着喝酒而穿长衫的唯一的人",
        "<|im_end|>",
    ],
    ids=["underscores", "base64", "json", "chinese", "markers"],
)
@pytest.mark.parametrize("kind", ["byte_level", "llama3_like", "llama2_like", "unigram"])
def test_hostile_text_is_tokenized_in_time_linear_in_its_size(kind, unit):
    # ai-tokenizer#6: quadratic in the length of a word. Four times the text, 16 times the time
    # if it were so.
    plain = PlainTokenizer(backend_of(kind))

    def took(characters):
        text = (unit * (characters // len(unit) + 1))[:characters]
        times = []
        for _ in range(2):
            began = time.process_time()
            plain.encode(text)
            times.append(time.process_time() - began)
        return min(times)

    took(1000)
    assert took(200_000) < 8 * took(50_000) + 0.05


def test_memory_is_flat_while_a_long_text_is_tokenized():
    # tokenizers#1847: gigabytes for 50 MB of text.
    plain = PlainTokenizer(backend_of("llama3_like"))
    text = prose(100_000) * 80
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        count = sum(map(len, plain.iter_encode(text)))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        os.write(write, json.dumps([count, grown]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        count, grown = json.load(pipe)
    os.waitpid(child, 0)
    assert count > 1_000_000
    kilobyte = 1 if sys.platform != "darwin" else 1024
    assert grown < 48_000 * kilobyte  # for 8 MB of text and millions of tokens


# --- model files ---------------------------------------------------------------------------------


def contents(folder):
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("harm", ["pointer", "cut", "noise", "config"])
def test_a_broken_model_is_refused_and_nothing_in_its_folder_is_touched(server, place, harm):
    # transformers#27923, sglang#14754
    folder = save_folder(place / harm)
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    if harm == "pointer":
        weights.write_bytes(POINTER)
    elif harm == "cut":
        weights.write_bytes(data[: len(data) // 2])
    elif harm == "noise":
        weights.write_bytes(np.random.default_rng(1).bytes(len(data)))
    else:
        (folder / "config.json").write_text("{")
    before = contents(folder)
    done = server.run(ask(place, "What?", model=harm))
    assert done.returncode == 4 and done.stdout == b""
    assert b"model.safetensors" in done.stderr or b"config.json" in done.stderr
    assert b"Traceback" not in done.stderr
    if harm == "pointer":
        assert b"git lfs pull" in done.stderr
    assert contents(folder) == before


def test_a_local_folder_answers_without_any_connection(server, place):
    # transformers#42886
    setup = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a connection was attempted')\n"
        "socket.socket.connect = socket.socket.connect_ex = socket.create_connection = refuse\n"
        "socket.getaddrinfo = refuse"
    )
    done = server.run(ask(place, "What?"), setup=setup)
    assert done.returncode == 0, done.stderr.decode()


def test_more_blocks_than_the_model_can_hold_are_refused_when_the_memory_is_configured(
    server, place
):
    # InfLLM#46: crashed at the first long document.
    done = server.run(ask(place, "What?", "--blocks", 64))
    assert done.returncode == 2 and b"blocks 64 x" in done.stderr


def test_without_triton_the_answer_is_the_same(server, place):
    # litgpt#1697
    code = (
        "import sys; sys.modules['triton'] = None; sys.path.insert(0, 'tests')\n"
        "from infllm_cli.__main__ import main; sys.argv[0] = 'infllm'; main()"
    )
    arguments = [*map(str, ask(place, "What?"))]
    without = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
    assert without.returncode == 0, without.stderr.decode()
    assert without.stdout == server.run(arguments).stdout


def test_an_answer_that_loops_is_stopped_and_says_so(server, place):
    # ollama#16179
    done = server.run(
        [*ask(place, "What?", "--json"), "--max-tokens", 400], answer="over and over " * 90
    )
    assert json.loads(done.stdout)["answers"][0]["finish"] == "repeat"
    assert b"infllm: the answer began to loop and was stopped." in done.stderr
