"""Saved memories (CASES.md): used, proven by counters; resumed; within limits; never wrong."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_folder import save_folder
from tiny_readers import SMALL, make_reader, memory_contents, same_contents
from tiny_tokenizers import prose

from infllm_cli import keeping, machine, saved, shelf, tensor_files
from infllm_cli.capacity import Room
from infllm_cli.checksums import BrokenFile, check
from infllm_cli.document import decode_document
from infllm_cli.errors import CapacityError
from infllm_cli.keeping import Keeper
from infllm_cli.limits import Limits, memories_folder
from infllm_cli.memory.config import FLAGS, Lookup
from infllm_cli.reader import Memory, Reader
from infllm_cli.sampling import Answering, AnswerOptions
from infllm_cli.shelf import MANIFEST, Shelf
from infllm_cli.tensor_files import MappedFile, write_tensors

CONFIG = replace(SMALL, segment_blocks=6)
ROOMY = Limits(host=10**12, disk=None, budget=10**12)
OPTIONS = AnswerOptions(max_tokens=4, answering=Answering.MEMORY)
TEXT = prose(3000)
SHORT = prose(800)
KINDS = {"llama": torch.float32, "llama ungrouped": torch.bfloat16, "gemma3_text": torch.float32}


@dataclass
class Read:
    memory: Memory
    keeper: Keeper
    notes: list[str]

    def close(self) -> None:
        self.keeper.close()


def begin(
    reader: Reader, cache: Path, text: str | bytes = TEXT, limits: Limits = ROOMY, whole=False
) -> Read:
    data = text.encode() if isinstance(text, str) else text
    memory = reader.open(decode_document(data, "book"), allow_whole=whole)
    notes: list[str] = []
    return Read(memory, Keeper(reader, memory, cache, limits, note=notes.append), notes)


def read(reader: Reader, cache: Path, *given: Any, chunks: int | None = None, **named: Any) -> Read:
    """Read to the end, or `chunks` chunks as if the process ended then."""
    found = begin(reader, cache, *given, **named)
    for _ in itertools.islice(reader.read_steps(found.memory), chunks):
        found.keeper.chunk_read()
    found.keeper.finish()
    return found


@contextlib.contextmanager
def reading(*given: Any, **named: Any) -> Iterator[Read]:
    found = read(*given, **named)
    try:
        yield found
    finally:
        found.close()


def files_of(cache: Path) -> list[Path]:
    return sorted(p for p in memories_folder(cache).rglob("*") if p.is_file() and p.name != "lock")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return make_reader(config=CONFIG)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every chunk that the writer keeps up with."""
    monkeypatch.setattr(keeping, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(keeping, "CHECKPOINT_SHARE", 0)
    monkeypatch.setattr(saved.Writer, "busy", property(lambda self: self.wait()))


# --- asked again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_a_saved_memory_is_the_one_that_was_read_and_answers_alike(cache, kind, dtype, whole):
    # ollama#5303, llama.cpp#25913, #26676: bit for bit, and no token is read again.
    reader = make_reader(dtype, kind=kind, config=CONFIG)
    options = replace(OPTIONS, answering=Answering.BOTH)
    with reading(reader, cache, TEXT, whole=whole) as cold:
        assert cold.memory.whole is whole and cold.memory.read_tokens == len(cold.memory.tokens)
        contents = memory_contents(cold.memory)[1:]
        answers = [reader.ask(cold.memory, question, options) for question in ("Who?", "Where?")]
        assert same_contents(memory_contents(cold.memory)[1:], contents)
    assert cold.notes == []
    with reading(reader, cache, TEXT, whole=whole) as warm:
        assert warm.memory.read_tokens == 0
        assert warm.memory.reused_tokens == len(warm.memory.tokens)
        assert same_contents(memory_contents(warm.memory)[1:], contents)
        for answer in answers[::-1]:
            again = reader.ask(warm.memory, answer.question, options)
            assert (again.text, again.evidence) == (answer.text, answer.evidence)
            assert again.reread == answer.reread
        assert same_contents(memory_contents(warm.memory)[1:], contents)
        assert (warm.memory.state.mapped_bytes > 0) is not whole
    assert len(warm.notes) == 1 and "none is read again" in warm.notes[0]


def test_what_is_asked_never_misses_and_what_decides_the_reading_always_does(cache, reader):
    # paper-qa#1257, ds4#805
    def reused(
        reader: Reader, text: str | bytes = SHORT, options: AnswerOptions | None = None
    ) -> int:
        with reading(reader, cache, text) as found:
            if options is not None:
                reader.ask(found.memory, "Who " * random.randint(1, 30), options)
            return found.memory.reused_tokens

    assert reused(reader) == 0
    for options in (OPTIONS, AnswerOptions(1), AnswerOptions(12, temperature=1, seed=4)):
        assert reused(reader, options=options) > 0
    assert reused(Reader(reader.loaded, replace(CONFIG, answer_blocks=3))) > 0
    assert reused(reader, SHORT[:-1] + "?") == reused(reader, SHORT.replace("\n", "\r\n")) == 0
    assert reused(reader, b"\xef\xbb\xbf" + SHORT.encode()) == 0
    other = make_reader(config=CONFIG)
    other.model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-6
    assert reused(other) == 0
    assert reused(make_reader(torch.bfloat16, config=CONFIG)) == 0
    assert reused(make_reader(config=CONFIG, rms_norm_eps=1e-4)) == 0
    sizes = {n: getattr(CONFIG, n) for n in FLAGS} | {"representatives_per_block": 2}
    for name, value in sizes.items():
        if name not in ("answer_blocks", "scan_every"):
            changed = replace(CONFIG, **{name: value + 1})
            assert reused(Reader(reader.loaded, changed)) == 0, name
    assert reused(Reader(reader.loaded, replace(CONFIG, read_lookup=Lookup.EXACT))) == 0
    assert reused(reader) > 0


def test_the_files_are_ordinary_safetensors(cache, reader):
    with reading(reader, cache) as found:
        blocks = found.memory.state.blocks
        [layer, *_] = found.memory.state.tiered
        keys = layer.arena.stretch(0, blocks * 16)[0]
    paths = sorted(memories_folder(cache).glob("*/segment-*.safetensors"))
    stored = [load_file(path)["0.keys.codes"] for path in paths]
    assert len(stored) == -(-blocks // 6) > 3
    assert torch.equal(torch.cat(stored, dim=1).flatten(1, 2), keys)


# --- broken --------------------------------------------------------------------------------------


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


HARMS = {
    "a bit flipped": flip,
    "cut": lambda data, rng: data[: rng.randrange(1, len(data))],
    "empty": lambda data, rng: b"",
    "longer": lambda data, rng: data + b"\0",
    "gone": lambda data, rng: None,
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_whatever_is_broken_costs_a_warning_and_a_reading(cache, reader, harm):
    # llama.cpp#27068: in every file of the memory.
    with reading(reader, cache) as cold:
        contents = memory_contents(cold.memory)[1:]
    rng = random.Random(3)
    paths = files_of(cache)
    assert len(paths) == 2 + len(list(memories_folder(cache).glob("*/segment*"))) > 5
    for path in paths:
        broken = harm(path.read_bytes(), rng)
        path.unlink()
        if broken is not None:
            path.write_bytes(broken)
        with reading(reader, cache) as again:
            assert again.memory.read_tokens == len(again.memory.tokens), path.name
            assert same_contents(memory_contents(again.memory)[1:], contents)
        # A record that is broken is no memory; of one that is whole the damage is told.
        assert len(again.notes) == (path.name != MANIFEST)
        assert all("damaged" in note and path.name in note for note in again.notes)
    with reading(reader, cache) as mended:
        assert mended.memory.read_tokens == 0


def test_a_file_of_tensors_is_whole_or_not_there(tmp_path, monkeypatch):
    tensors = {
        "a": torch.randn(3, 7, 5).bfloat16(),
        "b": torch.randn(4, 6)[:, :3],
        "c": torch.arange(5, dtype=torch.int16),
        "d": torch.empty(2, 0, 3),
    }
    path = tmp_path / "x.safetensors"
    record = write_tensors(path, tensors, {"fact": "told"})
    check(tmp_path, record)
    file, library = MappedFile(path), load_file(path)
    assert file.facts == {"fact": "told"}
    for name, tensor in tensors.items():
        assert torch.equal(file.tensors[name], tensor) and torch.equal(library[name], tensor)
        assert file.tensors[name].data_ptr() % 64 == 0 or not tensor.numel()
    file.release("a")()
    assert torch.equal(file.tensors["a"], tensors["a"])
    with pytest.raises(BrokenFile):
        check(tmp_path, replace(record, crc32=record.crc32 ^ 1))
    pieces = tensor_files._pieces

    def fails(*given: Any) -> Iterator[memoryview]:
        yield next(pieces(*given))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files, "_pieces", fails)
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "y.safetensors", tensors, {})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# --- interrupted ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_an_interrupted_reading_goes_on_and_ends_with_the_same_memory(cache, kind, dtype):
    # gpt4all#1757, at every chunk.
    reader = make_reader(dtype, kind=kind, config=CONFIG)
    with reading(reader, cache / "other") as straight:
        contents = memory_contents(straight.memory)[1:]
    before = 0
    for number in itertools.count():
        found = read(reader, cache, chunks=1)
        assert found.memory.reused_tokens == before
        before = found.memory.reused_tokens + found.memory.read_tokens
        assert found.keeper.stop() == before or found.memory.complete
        found.close()
        assert (number == 0) == (found.notes == [])
        if found.memory.complete:
            break
        assert all("an earlier reading goes on" in note for note in found.notes)
    assert number > 10
    assert same_contents(memory_contents(found.memory)[1:], contents)
    with reading(reader, cache) as warm:
        assert warm.memory.read_tokens == 0
        assert same_contents(memory_contents(warm.memory)[1:], contents)
    names = {path.name for path in files_of(cache)}
    assert names == {
        MANIFEST,
        *(f.name for f in Shelf(memories_folder(cache)).entries()[0].record.files),
    }


@pytest.mark.usefixtures("often")
def test_a_damaged_checkpoint_is_not_used(cache, reader):
    read(reader, cache, chunks=12).close()
    [state] = [path for path in files_of(cache) if path.name.startswith("state")]
    state.write_bytes(flip(state.read_bytes(), random.Random(1)))
    with reading(reader, cache) as again:
        assert again.memory.read_tokens == len(again.memory.tokens)
        assert len(again.notes) == 1 and "damaged" in again.notes[0]


def test_killed_at_any_moment_the_next_one_goes_on(server, place):
    # gpt4all#1757, with kill -9.
    cache = place / "killed"
    setup = "from infllm_cli import keeping; keeping.CHECKPOINT_SECONDS = 0.02"
    expected = server.run(ask(place, "What?", "--json", cache=place / "straight"))
    resumed = 0
    rng = random.Random(5)
    for attempt in range(4):
        nothing = os.open(os.devnull, os.O_RDWR)
        child = server.start(
            ask(place, "What?", cache=cache), (nothing,) * 3, delay=0.01, setup=setup
        )
        os.close(nothing)
        deadline = time.monotonic() + 60
        # Once not before something is kept, however slow the machine is.
        while attempt == 0 and time.monotonic() < deadline:
            if list(memories_folder(cache).rglob(MANIFEST)):
                break
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.7))
        child.kill()
        child.wait()
    done = server.run(ask(place, "What?", "--json", cache=cache))
    assert done.returncode == 0
    told, straight = json.loads(done.stdout), json.loads(expected.stdout)
    assert told["answers"][0]["answer"] == straight["answers"][0]["answer"]
    resumed = told["read"]["reused_tokens"]
    assert resumed > 0 and resumed + told["read"]["tokens"] == told["document"]["tokens"]
    assert b"tokens come from" in done.stderr
    assert not list(memories_folder(cache).rglob("*.partial"))


# --- two processes -------------------------------------------------------------------------------


def test_a_second_process_on_the_same_document_neither_waits_nor_writes(cache, reader):
    first = begin(reader, cache)
    with reading(reader, cache) as second:
        assert second.keeper.saved_path() is None
        assert len(second.notes) == 1 and "another infllm" in second.notes[0]
    for _ in reader.read_steps(first.memory):
        first.keeper.chunk_read()
    first.keeper.finish()
    assert first.keeper.saved_path() is not None
    with reading(reader, cache) as third, reading(reader, cache) as fourth:  # they share it
        assert third.memory.read_tokens == fourth.memory.read_tokens == 0
        assert not Shelf(memories_folder(cache)).remove(third.keeper.key)
    first.close()
    assert Shelf(memories_folder(cache)).remove(first.keeper.key)
    assert files_of(cache) == []


# --- limits --------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first_and_never_the_one_in_use(cache, reader):
    # omlx#2064
    books = [prose(2000, seed) for seed in range(4)]
    sizes, keys = [], []
    for book in books[:3]:
        with reading(reader, cache, book) as found:
            keys.append(found.keeper.key)
        sizes.append(Shelf(memories_folder(cache)).find(keys[-1]).size)
    budget = Limits(ROOMY.host, None, int(sum(sizes) * 1.2))
    shelf_ = Shelf(memories_folder(cache))
    used = read(reader, cache, books[0], budget)  # in use, and the last used
    with reading(reader, cache, books[3], budget) as new:
        assert new.keeper.saved_path() is not None
    left = [entry.key for entry in shelf_.entries()]
    assert new.keeper.key in left and keys[0] in left and keys[1] not in left
    assert sum(entry.size for entry in shelf_.entries()) <= budget.budget
    used.close()
    tight = Limits(ROOMY.host, None, sizes[0] // 2)
    with reading(reader, cache, books[1], tight) as large:
        assert large.keeper.saved_path() is None
        assert len(large.notes) == 1 and "--memory-budget" in large.notes[0]


@pytest.mark.parametrize("chunks", [3, 12])
def test_a_disk_that_fills_up_costs_a_warning_and_leaves_nothing(
    cache, reader, monkeypatch, chunks
):
    # inferencer-feedback#229
    with reading(reader, cache / "other") as cold:
        right = reader.ask(cold.memory, "Who?", OPTIONS).text
    found = begin(reader, cache)
    write = saved.write_tensors

    def full(*given: Any) -> Any:
        write(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    for number, _ in enumerate(reader.read_steps(found.memory)):
        if number == chunks:
            monkeypatch.setattr(saved, "write_tensors", full)
        found.keeper.chunk_read()
    found.keeper.finish()
    assert reader.ask(found.memory, "Who?", OPTIONS).text == right
    assert found.keeper.saved_path() is None
    found.close()
    assert len(found.notes) == 1 and "the disk is full" in found.notes[0]
    assert files_of(cache) == [] and list(memories_folder(cache).iterdir()) == []


def test_a_disk_that_is_too_full_from_the_start_is_not_written(cache, reader, monkeypatch):
    monkeypatch.setattr(machine, "free_disk", lambda folder: 10_000)
    with reading(reader, cache) as found:
        pass
    assert len(found.notes) == 1 and "the disk has room for" in found.notes[0]
    assert files_of(cache) == []


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), KINDS.items())
def test_blocks_that_pass_the_host_limit_lie_on_disk_and_answer_alike(cache, kind, dtype, save):
    reader = make_reader(dtype, kind=kind, config=CONFIG)
    with reading(reader, cache / "other") as in_ram:
        contents = memory_contents(in_ram.memory)
        right = reader.ask(in_ram.memory, "Who?", OPTIONS)
        segment = in_ram.memory.state.segment_bytes
        held = in_ram.memory.state.host_bytes
    limits = Limits(2 * segment, None, ROOMY.budget, save)
    assert held > 4 * segment
    found = begin(reader, cache, TEXT, limits)
    for event in reader.read_steps(found.memory):
        found.keeper.chunk_read()
        assert found.memory.state.host_bytes <= limits.host
        assert event.host_bytes <= limits.host
    found.keeper.finish()
    assert found.keeper.moved and found.memory.state.mapped_bytes >= held - limits.host
    assert same_contents(memory_contents(found.memory), contents)
    answer = reader.ask(found.memory, "Who?", OPTIONS)
    assert (answer.text, answer.evidence) == (right.text, right.evidence)
    assert len(found.notes) == 1 and "host limit" in found.notes[0]
    found.close()
    assert bool(files_of(cache)) is save
    if save:
        with reading(reader, cache, TEXT, limits) as warm:
            assert reader.ask(warm.memory, "Who?", OPTIONS).text == right.text
            assert warm.memory.state.host_bytes == 0


def test_what_neither_ram_nor_disk_holds_is_refused_before_it_is_read(reader):
    document = decode_document(TEXT.encode(), "book")
    memory = reader.open(document, allow_whole=False)
    need, segment = keeping.needed(reader, memory).host_bytes, memory.state.segment_bytes
    room = Room(host=2 * segment, disk=need - 2 * segment)
    assert reader.open(document, room=room, allow_whole=False)
    with pytest.raises(CapacityError, match=r"--host-limit.*--disk-limit"):
        reader.open(document, room=replace(room, disk=room.disk - 1), allow_whole=False)
    with pytest.raises(CapacityError, match="at least"):
        reader.open(document, room=Room(2 * segment - 1, disk=10**12), allow_whole=False)


def test_a_full_disk_where_the_ram_is_full_too_is_an_error(cache, reader, monkeypatch):
    segment = reader.open(decode_document(b"x", "x"), allow_whole=False).state.segment_bytes

    def full(*given: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    limits = Limits(2 * segment, None, ROOMY.budget)
    late = begin(reader, cache / "late", TEXT, limits)
    for _ in reader.read_steps(late.memory):
        late.keeper.chunk_read()
    monkeypatch.setattr(saved, "write_tensors", full)
    with pytest.raises(CapacityError, match="the disk is full"):
        read(reader, cache, TEXT, limits)
    # When the document has been read, what cannot be saved costs no answer.
    late.keeper.finish()
    assert late.keeper.saved_path() is None and late.keeper.moved
    assert reader.ask(late.memory, "Who?", OPTIONS).tokens > 0
    late.close()
    assert "the disk is full" in late.notes[-1] and files_of(cache / "late") == []


def test_what_a_killed_process_moved_to_disk_is_removed_by_the_next(cache, reader):
    left = memories_folder(cache) / f"{shelf.SPILLED}1-a"
    left.mkdir(parents=True)
    (left / "segment-00000.safetensors").write_bytes(b"x" * 1000)
    used = Shelf(memories_folder(cache)).spill_folder()
    assert not left.exists()
    Shelf(memories_folder(cache)).sweep()
    assert used.folder.exists()
    used.close()
    assert not used.folder.exists()


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def ask(place, *arguments, cache=None, file="book.txt", save="--save"):
    common = ["--model", place / "model", "--cache-dir", cache or place / "cache"]
    arguments = [*arguments, "--answering", "memory", "--max-tokens", 6, save]
    return ["ask", place / file, *arguments, *common, "--dtype", "f32"]


def test_a_second_command_reads_nothing_and_says_so(server, place, tmp_path):
    first = server.run(ask(place, "What?", "--json", cache=tmp_path))
    told = json.loads(first.stdout)
    assert told["read"]["tokens"] == told["document"]["tokens"] and told["memory"]["saved"]
    changed = ["What?", "And where?", "--json", "--temperature", "0.5", "--evidence", 2]
    again = json.loads(server.run(ask(place, "What?", "--json", cache=tmp_path)).stdout)
    assert again["read"]["tokens"] == 0
    assert again["read"]["reused_tokens"] == again["document"]["tokens"]
    for key in ("answer", "evidence", "reread", "finish"):
        assert again["answers"][0][key] == told["answers"][0][key]
    other = server.run([*ask(place, *changed, cache=tmp_path), "--max-tokens", 300])
    assert json.loads(other.stdout)["read"]["tokens"] == 0
    assert b"none is read again" in other.stderr
    (tmp_path / "copy.md").write_bytes((place / "book.txt").read_bytes())
    copied = server.run(ask(place, "What?", "--json", cache=tmp_path, file=tmp_path / "copy.md"))
    assert json.loads(copied.stdout)["read"]["tokens"] == 0
    unsaved = server.run(ask(place, "What?", "--json", cache=tmp_path, save="--no-save"))
    told = json.loads(unsaved.stdout)
    assert told["read"]["reused_tokens"] == 0 and told["memory"]["saved"] is None


def test_a_document_that_was_read_is_there_when_it_is_asked(server, place, tmp_path):
    common = ["--model", place / "model", "--cache-dir", tmp_path, "--dtype", "f32"]
    done = server.run(["read", place / "book.txt", *common])
    assert done.returncode == 0
    assert done.stdout.decode().strip() == Shelf(memories_folder(tmp_path)).entries()[0].key
    told = json.loads(server.run(ask(place, "What?", "--json", cache=tmp_path)).stdout)
    assert told["read"]["tokens"] == 0
    # What the first question has found out about the memory stays beside it.
    found = list(tmp_path.rglob("neutral-*.npz"))
    assert len(found) == 1
    again = server.run(["read", place / "book.txt", *common, "--json", "-q"])
    assert json.loads(again.stdout)["read"]["reused_tokens"] > 0 and again.stderr == b""
    assert list(tmp_path.rglob("neutral-*.npz")) == found
    refused = server.run(["read", place / "book.txt", *common, "--chunk", 32, "--memory-budget", 9])
    assert refused.returncode == 5 and b"not saved" in refused.stderr


def test_memories_are_listed_shown_and_removed(server, place, tmp_path):
    assert server.run(ask(place, "What?", cache=tmp_path)).returncode == 0
    where = ["--cache-dir", tmp_path]
    listed = server.run(["memory", "list", *where]).stdout.decode()
    key, document, model, tokens, size, *_ = listed.rstrip("\n").split("\t")
    assert document.endswith("book.txt") and model == "model" and tokens.endswith("tokens")
    assert re.fullmatch(r"[\d.]+ [kM]?B", size) and listed.endswith("whole\n")
    shown = server.run(["memory", "show", key, *where]).stdout.decode()
    assert "complete\ttrue" in shown and "state\tsound" in shown
    folder = Path(server.run(["memory", "path", key, *where]).stdout.decode().strip())
    assert folder.parent == Path(server.run(["memory", "path", *where]).stdout.decode().strip())
    state = next(folder.glob("state-*"))
    state.write_bytes(state.read_bytes()[:-1])
    assert b"damaged" in server.run(["memory", "show", key, *where]).stdout
    assert server.run(["memory", "rm", "no-such", *where]).returncode == 2
    assert server.run(["memory", "rm", *where]).returncode == 2
    assert server.run(["memory", "rm", key, *where]).returncode == 0
    assert server.run(["memory", "list", *where]).stdout == b"" and not folder.exists()


def test_an_interrupt_says_what_is_kept_and_the_next_command_goes_on(server, place, tmp_path):
    setup = (
        "import os, signal\nfrom infllm_cli import console, keeping\n"
        "keeping.CHECKPOINT_SECONDS = keeping.CHECKPOINT_SHARE = 0\n"
        "def stop(self, event):\n"
        "    if event.tokens > 500: os.kill(os.getpid(), signal.SIGINT)\n"
        "console.PlainConsole.chunk_read = stop"
    )
    done = server.run(ask(place, "What?", cache=tmp_path), setup=setup, delay=0.01)
    assert done.returncode == 130
    assert re.search(rb"[\d,]+ of them are kept: ask again to go on", done.stderr)
    again = json.loads(server.run(ask(place, "What?", "--json", cache=tmp_path)).stdout)
    assert 0 < again["read"]["reused_tokens"] < again["document"]["tokens"]


@pytest.mark.parametrize("flag", ["--host-limit", "--disk-limit", "--memory-budget"])
def test_what_is_no_size_is_refused(server, place, flag):
    done = server.run(ask(place, "What?", flag, "much"))
    assert done.returncode == 2 and flag.encode() in done.stderr
