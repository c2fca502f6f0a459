"""A memory in one file: moved, damaged, asked alone and together with others."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_saved import CONFIG, HARMS, ROOMY, TEXT
from tiny_readers import make_reader, memory_contents, read_text, same_contents
from tiny_tokenizers import prose

from infllm_cli import joining, memory_file
from infllm_cli.document import decode_document
from infllm_cli.errors import DocumentError, ModelError, UsageError
from infllm_cli.file_kinds import MAGIC, is_memory_file, memory_files
from infllm_cli.files import join as join_documents
from infllm_cli.keeping import Keeper
from infllm_cli.limits import Limits
from infllm_cli.memory import join as tiers
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory_file import MemoryFile
from infllm_cli.reader import Reader
from infllm_cli.sampling import Answering, AnswerOptions

OPTIONS = AnswerOptions(max_tokens=4, answering=Answering.BOTH)
INT8 = replace(CONFIG, codec=Codec.INT8)


def silent(stage, done, total):
    """No progress."""


def export(reader, memory, path):
    memory_file.write(path, reader, memory, path.parent / "cache", silent)
    return path


def load(reader, path, *, release=False):
    file = MemoryFile(path)
    cache = path.parent / "cache"
    return file.load(Reader(reader.loaded, file.config), cache, silent, reserve=0, release=release)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "config"),
    [
        ("llama", torch.float32, CONFIG),
        ("llama", torch.bfloat16, INT8),
        ("gemma3_text", torch.float32, replace(CONFIG, codec=Codec.INT4)),
    ],
)
def test_a_moved_memory_is_the_one_that_was_read_and_answers_alike(
    tmp_path, kind, dtype, config, whole
):
    reader = make_reader(dtype, kind=kind, config=config)
    memory = read_text(reader, TEXT, whole=whole)
    contents = memory_contents(memory)[1:]
    answer = reader.ask(memory, "Who?", OPTIONS)
    path = export(reader, memory, tmp_path / "book.infllm")
    assert same_contents(memory_contents(memory)[1:], contents)
    moved = path.rename(tmp_path / "other name")
    for release in (False, True):
        again = load(reader, moved, release=release)
        assert same_contents(memory_contents(again)[1:], contents)
        assert again.read_tokens == 0 and again.complete
        assert (again.state.mapped_bytes > 0) is not whole
        told = reader.ask(again, "Who?", OPTIONS)
        assert (told.text, told.evidence) == (answer.text, answer.evidence)


def test_the_document_comes_with_it(tmp_path):
    reader = make_reader(config=CONFIG)
    files = [
        decode_document(text.encode("utf-16"), name) for text, name in ((TEXT, "a"), ("é", "b"))
    ]
    document = join_documents(files)
    memory = reader.open(document)
    for _ in reader.read_steps(memory):
        pass
    again = load(reader, export(reader, memory, tmp_path / "x")).document
    assert again.text == document.text and again.parts == document.parts
    assert (again.name, again.encoding, again.sha256) == (
        "a, b",
        document.encoding,
        document.sha256,
    )
    assert np.array_equal(again.line_starts, document.line_starts)


def test_a_memory_that_lies_on_disk_is_written_as_well(tmp_path):
    reader = make_reader(config=INT8)
    memory = reader.open(decode_document(TEXT.encode(), "book"), allow_whole=False)
    limits = Limits(4 * memory.state.segment_bytes, None, ROOMY.budget, save=False)
    keeper = Keeper(reader, memory, tmp_path / "cache", limits)
    for _ in reader.read_steps(memory):
        keeper.chunk_read()
    keeper.finish()
    assert memory.state.mapped_bytes > 0
    contents = memory_contents(memory)[1:]
    again = load(reader, export(reader, memory, tmp_path / "x"))
    assert same_contents(memory_contents(again)[1:], contents)
    keeper.close()


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_whatever_is_broken_is_found_every_time(tmp_path, harm):
    reader = make_reader(config=CONFIG)
    path = export(reader, read_text(reader, TEXT), tmp_path / "x.infllm")
    data, rng = path.read_bytes(), random.Random(5)
    for _ in range(40):
        broken = harm(data, rng)
        if broken is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(broken)
        with pytest.raises(DocumentError, match=r"x\.infllm is no memory, or it is damaged"):
            MemoryFile(path)
    path.write_bytes(data)
    assert MemoryFile(path).model == "tiny"


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_bit_of_the_header_is_no_exception(tmp_path, at):
    reader = make_reader(config=CONFIG)
    path = export(reader, read_text(reader, prose(300)), tmp_path / "x.infllm")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(bytes(data))
    with pytest.raises(DocumentError):
        MemoryFile(path)


def test_another_format_another_model_and_another_dtype_are_refused(tmp_path, monkeypatch):
    reader = make_reader(config=CONFIG)
    path = export(reader, read_text(reader, TEXT), tmp_path / "x")
    other = make_reader(config=CONFIG)
    other.model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-6
    with pytest.raises(
        ModelError, match="was made by tiny in f32, and tiny differs in its weights"
    ):
        load(other, path)
    with pytest.raises(ModelError, match=r"weights and layers.*same --model and --dtype"):
        load(make_reader(torch.bfloat16, config=CONFIG), path)
    with pytest.raises(ModelError, match="differs in its configuration"):
        load(make_reader(config=CONFIG, rms_norm_eps=1e-4), path)
    newer = make_reader(config=CONFIG)
    newer.model.config.a_setting_of_a_newer_version = 3
    assert load(newer, path).complete
    monkeypatch.setattr(memory_file, "FORMAT", 99)
    with pytest.raises(DocumentError, match="format 2, and this infllm reads format 99"):
        MemoryFile(path)


def test_nothing_partial_stays_and_a_document_is_not_overwritten(tmp_path, monkeypatch):
    reader = make_reader(config=CONFIG)
    memory = read_text(reader, prose(800))
    (tmp_path / "book.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"book\.txt is there and is no memory"):
        memory_file.check_target(tmp_path / "book.txt")
    with pytest.raises(UsageError, match="there is no folder"):
        memory_file.check_target(tmp_path / "none" / "x")
    path = export(reader, memory, tmp_path / "x")
    memory_file.check_target(path)
    before = path.read_bytes()

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("infllm_cli.tensor_files._write", full)
    with pytest.raises(OSError, match="No space"):
        export(reader, memory, path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["book.txt", "x"]


# --- together ------------------------------------------------------------------------------------


TEXTS = {
    "long and long": (TEXT, prose(2000)[500:]),
    "long, short, long": (TEXT, "A short one.\n", prose(1500)[300:]),
    "short and long": ("Hardly a word", TEXT),
    "short and short": ("Hardly a word", "and another."),
    "none fills a block": ("a", "b", "c\n"),
}


@pytest.mark.parametrize("texts", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize(
    ("kind", "config"),
    [("llama", CONFIG), ("llama", INT8), ("qwen3", replace(CONFIG, sink_tokens=40))],
)
def test_every_token_of_joined_memories_is_where_its_document_says(texts, kind, config):
    reader = make_reader(kind=kind, config=config)
    memories = [read_text(reader, text, whole=len(text) < 100) for text in texts]
    contents = [memory_contents(memory) for memory in memories]
    joined = joining.join_memories(memories, reader.loaded.trained_length)
    places = tiers.lay_out([memory.state for memory in memories], joined.prefix_tokens)
    assert joined.complete and joined.state.tokens == joined.prefix_tokens + len(joined.tokens)
    for layer_index, layer in enumerate(joined.state.tiered):
        assert layer.window.end == joined.state.tokens
        for memory, place in zip(memories, places, strict=True):
            own = memory.state.tiered[layer_index]
            span = (place.first, memory.state.tokens)
            here = layer.stretch(span[0] + place.offset, span[1] + place.offset)
            for a, b in zip(here, own.stretch(*span), strict=True):
                assert torch.equal(a, b)
        held = layer.window
        slots = slice(held.first, held.last)
        table = layer.geometry.rotary.table(held.start, len(held))
        rotated = layer.geometry.rotary.rotate(held.raw[:, slots], table)
        assert torch.equal(rotated, held.rotated[:, slots])
    first = joined.prefix_tokens
    for memory, place in zip(memories, places, strict=True):
        begin = place.offset + memory.prefix_tokens - first
        ids = joined.tokens.ids[begin : begin + len(memory.tokens)]
        assert np.array_equal(ids, memory.tokens.ids)
        a, b = joined.tokens.spans[begin], joined.tokens.spans[begin + len(memory.tokens) - 1]
        assert joined.document.text[a[0] : b[1]] == memory.document.text
    assert (np.diff(joined.tokens.spans[:, 0]) >= 0).all()
    before = memory_contents(joined)
    answers = [reader.ask(joined, question, OPTIONS) for question in ("Who?", "Where?", "Who?")]
    assert answers[0].text == answers[2].text and answers[0].evidence == answers[2].evidence
    assert same_contents(memory_contents(joined), before)
    for memory, held in zip(memories, contents, strict=True):
        assert same_contents(memory_contents(memory), held)


def test_joined_memories_may_have_codecs_of_their_own_and_sliding_layers():
    reader = make_reader(kind="gemma3_text", config=CONFIG)
    memories = [
        read_text(Reader(reader.loaded, replace(CONFIG, codec=codec)), TEXT)
        for codec in (Codec.INT8, Codec.FULL, Codec.INT4)
    ]
    joined = joining.join_memories(memories, reader.loaded.trained_length)
    kinds = {part.keys.kind for part in joined.state.tiered[0].arena.parts()}
    assert kinds == {"full", "int8", "int4"}
    assert joined.state.layers[0].window.end == joined.state.tokens
    assert reader.ask(joined, "Who?", OPTIONS).tokens > 0


def test_evidence_of_joined_memories_names_document_and_its_own_lines():
    reader = make_reader(config=CONFIG)
    memories = []
    for name, text in (("a.txt", prose(1500)), ("b.txt", prose(1500)[200:])):
        memory = reader.open(decode_document(text.encode(), name), allow_whole=False)
        for _ in reader.read_steps(memory):
            pass
        memories.append(memory)
    joined = joining.join_memories(memories, reader.loaded.trained_length)
    answer = reader.ask(joined, "Who?", OPTIONS)
    texts = {memory.document.name: memory.document.text.split("\n") for memory in memories}
    assert answer.evidence and answer.reread
    for passage in answer.evidence + answer.reread:
        first, last = passage.lines
        assert passage.text in "\n".join(texts[passage.file][first - 1 : last])
    assert {passage.file for passage in answer.evidence} <= {"a.txt", "b.txt"}


# --- which files are memories --------------------------------------------------------------------


def test_memories_are_told_by_their_beginning_or_their_name(tmp_path):
    memory, named, text = tmp_path / "a", tmp_path / "b.infllm", tmp_path / "c.txt"
    memory.write_bytes(bytes(8) + MAGIC)
    named.write_text("")
    text.write_text("text")
    assert is_memory_file(memory) and not is_memory_file(text)
    assert memory_files([str(memory), str(named)]) == [memory, named]
    assert memory_files([str(text), "-", str(tmp_path / "none.infllm")]) == []
    with pytest.raises(UsageError, match=r"a is a memory and .*c\.txt a document; make a memory"):
        memory_files([str(text), str(memory)])
    os.mkfifo(tmp_path / "fifo.infllm")
    assert memory_files([str(tmp_path / "fifo.infllm")]) == []  # and nothing waits for a writer
    with pytest.raises(UsageError, match="given twice"):
        memory_files([str(memory), str(memory)])
