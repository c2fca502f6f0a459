"""`infllm eval summaries`: map-reduce ends, what is counted, and the command as a user runs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_folder
from tiny_readers import make_reader, read_text

from infllm_cli import attention
from infllm_cli.digests import PassDone
from infllm_cli.document import decode_document
from infllm_cli.errors import UsageError
from infllm_cli.evaluate.map_reduce import (
    LEAST_TOKENS,
    ChunkTold,
    MapReduce,
    Reduced,
    cut_chunks,
    groups_of,
)
from infllm_cli.evaluate.summary_runner import table
from infllm_cli.evaluate.summary_scores import Scorer, parts_under
from infllm_cli.evaluate.summary_ways import question_for
from infllm_cli.evidence import Passage
from infllm_cli.parts import divide, parts_for
from infllm_cli.reader import Memory, Reader
from infllm_cli.summarizing import PIECE_WORDS

# -- map-reduce -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader() -> Reader:
    return make_reader()


def unread(reader: Reader, text: str) -> Memory:
    return reader.open(decode_document(text.encode(), "text"), allow_whole=False)


def reduced(reader: Reader, text: str, **options: Any) -> tuple[Reduced, list[Any]]:
    memory = unread(reader, text)
    events = list(
        MapReduce(reader, options.pop("words", 40), **options).steps(memory.tokens, memory.passages)
    )
    assert isinstance(events[-1], Reduced)
    return events[-1], events[:-1]


@pytest.mark.parametrize("total", [1, 2, 63, 64, 65, 1000, 1001])
@pytest.mark.parametrize("most", [1, 64, 300])
def test_chunks_tile_the_tokens_and_none_is_too_long(total: int, most: int) -> None:
    for step in (1, 7, 112, 5000):
        borders = np.array(sorted({*range(0, total, step), total}))
        spans = cut_chunks(total, borders, most)
        assert [t for first, last in spans for t in range(first, last)] == list(range(total))
        assert all(0 < last - first <= most for first, last in spans)


def test_chunks_end_where_passages_do_and_are_about_equal() -> None:
    borders = np.array([0, 90, 210, 300, 420, 500, 610])
    assert cut_chunks(610, borders, 320) == [(0, 300), (300, 610)]


def test_there_are_always_fewer_groups_than_summaries() -> None:
    for count in range(2, 40):
        for length in (0, 1, 100, 900):
            for most in (1, 250, 3000):
                spans = groups_of([length] * count, 2, most)
                flat = [index for first, last in spans for index in range(first, last)]
                assert flat == list(range(count)) and len(spans) < count
                assert all(last - first > 1 for first, last in spans[:-1])
    assert groups_of([100] * 5, 2, 310) == [(0, 3), (3, 5)]


def test_many_chunks_end_and_every_pass_shrinks(reader: Reader) -> None:
    class Short(MapReduce):
        """Whose model writes little, so that the test is short."""

        def most_written(self, words: int) -> int:
            return 6

    memory = unread(reader, "Then the miller met the baker of the next town. " * 240)
    course = Short(reader, 40, map_tokens=LEAST_TOKENS)
    *events, last = course.steps(memory.tokens, memory.passages)
    assert isinstance(last, Reduced) and last.chunks > 30
    chunks = [event for event in events if isinstance(event, ChunkTold)]
    assert [c.number for c in chunks] == list(range(1, last.chunks + 1))
    passes = [event for event in events if isinstance(event, PassDone)]
    assert len(passes) > 1 and passes[0].inputs == last.chunks and passes[-1].outputs == 1
    assert all(p.outputs < p.inputs for p in passes)
    assert [p.inputs for p in passes[1:]] == [p.outputs for p in passes[:-1]]
    assert last.tokens > len(memory.tokens)
    assert memory.state.tokens == 0  # it reads for itself


def test_one_chunk_is_summarized_as_by_the_library(reader: Reader) -> None:
    text = "The goose is called Deacon. The owl is called Agnes. " * 12
    summary, events = reduced(reader, text, words=40)
    assert [type(event) for event in events] == [ChunkTold]
    course = MapReduce(reader, 40)
    opening, asked = course._around(40)
    ids = [*opening.tolist(), *reader.prompt.plain_ids(text).tolist(), *asked.tolist()]
    before, written = len(ids), []
    reader.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            for _ in range(summary.tokens - before):
                logits = reader.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                written.append(int(logits.argmax()))
                ids.append(written[-1])
    finally:
        reader.model.set_attn_implementation(attention.NAME)
    assert len(written) >= 5
    decoded = reader.loaded.tokenizer.decode(written, skip_special_tokens=True)
    assert summary.finish in ("stop", "length", "repeat")
    assert summary.text == decoded.rstrip("\ufffd").strip()


def test_a_chunk_is_no_longer_than_what_the_model_takes(reader: Reader) -> None:
    course = MapReduce(reader, 150)
    room = min(course._room(PIECE_WORDS), course._room(150))
    assert course.map_tokens == min(3000, room) < reader.loaded.trained_length
    assert MapReduce(reader, 150, room).map_tokens == room
    for tokens in (LEAST_TOKENS - 1, room + 1):
        with pytest.raises(UsageError, match=rf"--map-tokens is {tokens}; .* 64 to {room:,}"):
            MapReduce(reader, 150, tokens)
    small = make_reader()
    small.loaded.trained_length = 128
    with pytest.raises(UsageError, match=r"map-reduce: .* too short"):
        MapReduce(small, 150)


# -- scores ---------------------------------------------------------------------------------------

TITLES = ("Harbour", "Bakery", "Chapel")
BODIES = (
    "The grey schooner anchored beneath the lighthouse. Its captain Brandt paid forty guineas. ",
    "Flour from the windmill fed the ovens. Ottilie kneaded rye and sold plaited loaves. ",
    "Bells hung crooked in the belfry. An organist rehearsed psalms beside the candles. ",
)
STORY = "\n\n".join(f"# {t}\n\n{body * 3}" for t, body in zip(TITLES, BODIES, strict=True))


@pytest.fixture(scope="module")
def scorer(reader: Reader) -> Scorer:
    memory = unread(reader, STORY)
    parts = divide(memory.document, memory.tokens, memory.passages)
    assert [part.title for part in parts] == list(TITLES)
    return Scorer(memory.document, parts, "A schooner and its captain. The organist is a spy.")


def test_a_sentence_speaks_of_the_part_whose_rare_words_it_has(scorer: Scorer) -> None:
    assert scorer.part_of("Captain Brandt anchored a schooner.") == 0
    assert scorer.part_of("She kneaded loaves for the organist.") == 1
    assert scorer.part_of("The organist played the bells.") == 2
    assert scorer.part_of("The organist was a spy in the great war.") is None  # one word alone
    assert scorer.part_of("It was all of this, and then some more.") is None


def test_what_is_counted_of_a_summary(scorer: Scorer) -> None:
    scores = scorer.scores("Captain Brandt anchored. The captain paid guineas. Dragons burned.")
    assert (scores.words, scores.spoken_parts) == (9, [0])
    assert scores.spoken == pytest.approx(1 / 3)
    assert scores.distinct_4grams == 1.0
    assert scores.vouched == pytest.approx(5 / 7)  # dragons and burned are nowhere
    assert scores.content == pytest.approx(1 / 4)  # captain, of schooner, captain, organist, spy
    assert scorer.scores(BODIES[1] + BODIES[2]).spoken_parts == [1, 2]
    assert scorer.scores(BODIES[1]).vouched == 1.0
    assert scorer.scores("one two three four " * 5).distinct_4grams == pytest.approx(4 / 17)


def test_of_nothing_nothing_is_counted(scorer: Scorer) -> None:
    scores = scorer.scores("").as_dict()
    assert (scores["words"], scores["spoken"], scores["distinct_4grams"]) == (0, 0.0, 1.0)
    assert (scores["vouched"], scores["content"]) == (None, 0.0)


def test_evidence_lies_in_the_part_that_holds_most_of_it(reader: Reader) -> None:
    memory = unread(reader, STORY + "\n\n# End\n\n" + BODIES[0] * 3)
    document, text = memory.document, memory.document.text
    parts = parts_for(reader, memory)
    assert len(parts) == 4

    def passage(start: int, end: int) -> Passage:
        file, lines = document.place(start, end)
        return Passage(lines, text[start:end], 1.0, file)

    chapel, end = text.index("# Chapel"), text.rindex("The grey")
    assert parts_under(document, parts, []) == []
    # It begins with a heading; the other stands in the first part, too.
    found = [passage(chapel, chapel + 90), passage(end, end + 40)]
    assert parts_under(document, parts, found) == [2, 3]
    assert parts_under(document, parts, [passage(chapel - 80, chapel + 20)]) == [1]


def test_the_parts_are_those_of_a_summary(reader: Reader) -> None:
    memory = read_text(reader, STORY)
    assert parts_for(reader, memory) == reader.summarize(memory).parts


def test_the_question_asks_for_about_so_many_words() -> None:
    assert question_for(150) == "Summarize the document in 8 sentences, about 150 words."
    assert question_for(10) == "Summarize the document in one sentence, about 10 words."


# -- the command ----------------------------------------------------------------------------------

WAYS = ["quoted", "own", "question-memory", "question-both", "map-reduce"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("summaries")
    save_folder(folder / "model", max_position_embeddings=1024, num_hidden_layers=2)
    (folder / "story.md").write_text(STORY)
    (folder / "short.txt").write_text(BODIES[0])
    (folder / "mine.txt").write_text("A captain.\n\nA windmill.\n\nAn organist.\n")
    return folder


@dataclass(frozen=True)
class Ran:
    returncode: int
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.stdout.splitlines()]


def run(server: Any, place: Path, *arguments: object) -> Ran:
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    done = server.run(["eval", "summaries", *arguments, *common, "--words", 30])
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_every_way_is_written_measured_and_not_measured_again(server: Any, place: Path) -> None:
    out = place / "out.jsonl"
    arguments = [place / "story.md", "--map-tokens", 150, "-o", out]
    arguments += ["--reference", place / "mine.txt", "--sinks", 8, "--window", 128, "--chunk", 64]
    done = run(server, place, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    rows = done.rows
    assert [row["way"] for row in rows] == WAYS
    for row in rows:
        assert row["parts"] == 3 and not row["stopped"]
        assert row["words"] == len(row["text"].split())
        assert row["evidence"] == pytest.approx(len(row["evidence_parts"]) / 3, abs=1e-3)
        assert row["spoken"] == pytest.approx(len(row["spoken_parts"]) / 3, abs=1e-3)
        assert row["settings"]["words"] == 30 and row["seconds"] > 0
        assert 0 <= row["content"] <= 1
    quoted, own, asked, both, reduced = rows
    assert quoted["wording"] == "quoted" and quoted["vouched"] == 1.0 and quoted["spoken_parts"]
    assert quoted["read_seconds"] == both["read_seconds"] > 0 and reduced["read_seconds"] is None
    assert quoted["read_tokens"] == quoted["document_tokens"]
    assert not quoted["settings"]["attended_whole"]
    assert asked["settings"]["question"] == question_for(30) and asked["finish"]
    assert reduced["chunks"] > 1 and reduced["passes"][-1]["outputs"] == 1
    assert reduced["evidence_parts"] == [0, 1, 2] and reduced["settings"]["map_tokens"] == 150
    assert own["text"] and asked["settings"]["max_tokens"] == 114
    assert reduced["finish"] in ("stop", "length", "repeat")
    rows[1]["wording"] = "quoted"
    assert table(rows)[2][1] == "own (quoted instead)"
    again = run(server, place, *arguments)
    assert "5 of 5 cells are in" in again.stderr and "reading" not in again.stderr
    lines = again.stdout.splitlines()
    assert len(lines) == 7 and "| content |" in lines[0] and "3 of 3 parts" in lines[6]
    assert len(out.read_text().splitlines()) == 5


def test_summaries_are_those_of_the_commands(server: Any, place: Path) -> None:
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32", "-q"]
    story = place / "story.md"
    summary = server.run(["summarize", story, "--words", 30, "--wording", "quoted", *common])
    answer = server.run(
        ["ask", story, question_for(30), "--answering", "memory", "--max-tokens", 114, *common]
    )
    ways = ["--way", "question-memory", "--way", "quoted"]
    done = run(server, place, story, *ways, "--json")
    assert [row["way"] for row in done.rows] == ["question-memory", "quoted"]
    assert done.rows[0]["text"] == answer.stdout.decode().strip()
    assert done.rows[1]["text"] == summary.stdout.decode().strip()


def test_map_reduce_alone_reads_into_no_memory_and_several_files_have_rows_each(
    server: Any, place: Path
) -> None:
    files = [place / "short.txt", place / "story.md", place / "short.txt"]
    done = run(server, place, *files, "--way", "map-reduce")
    assert done.returncode == 0, done.stderr
    assert "reading" not in done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and "short.txt" in lines[2] and "story.md" in lines[3]
    assert "content" not in lines[0]


def test_a_way_that_takes_too_long_is_stopped_told_and_tried_again(
    server: Any, place: Path
) -> None:
    out = place / "late.jsonl"
    arguments = [place / "story.md", "-o", out, "--json"]
    done = run(server, place, *arguments, "--limit-seconds", 0)
    assert done.returncode == 0, done.stderr
    for row in done.rows:
        assert row["stopped"] and row["text"] is row["words"] is row["spoken"] is None
        assert "stopped after" in row["error"] and row["limit_seconds"] == 0
    assert len(done.rows) == 5 and done.stderr.count("stopped after") == 5
    cells = table(done.rows)
    assert cells[1][2:4] == ["stopped", "-"] and cells[1][-2].startswith("> ")
    again = run(server, place, *arguments, "--way", "quoted", "--limit-seconds", 600)
    assert [row["stopped"] for row in again.rows] == [False]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--map-tokens", "9000"], 2, "--map-tokens is 9000"),
        (["--words", "5"], 2, "--words is 5"),
        (["--limit-seconds", "-1"], 2, "--limit-seconds is -1"),
        (["--encoder", "/none"], 2, "--encoder"),
        (["-o", "/none/r.jsonl"], 2, "there is no folder"),
        (["--reference", "/none.txt"], 3, "/none.txt: no such file"),
        (["/none.txt"], 3, "/none.txt: no such file"),
    ],
)
def test_what_cannot_work_is_refused(
    server: Any, place: Path, arguments: list[str], code: int, said: str
) -> None:
    common = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    done = server.run(["eval", "summaries", place / "short.txt", *common, *arguments])
    assert done.returncode == code and said in done.stderr.decode()
    assert done.stdout == b""


def test_a_reference_is_of_one_document_and_tells_something(server: Any, place: Path) -> None:
    files = [place / "short.txt", place / "story.md"]
    done = run(server, place, *files, "--reference", place / "mine.txt")
    assert done.returncode == 2 and "one document" in done.stderr
    (place / "no.txt").write_text("It was then.")
    done = run(server, place, place / "story.md", "--reference", place / "no.txt")
    assert done.returncode == 2 and "no word that tells something" in done.stderr
