"""Pictures of the evidence: what they show, that they stand alone and are well-formed."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from tiny_folder import save_folder
from tiny_readers import make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.errors import UsageError
from infllm_cli.events import Answer, Looked
from infllm_cli.evidence_page import page
from infllm_cli.heatmap import columns_of, svg_file
from infllm_cli.pictures import Pictures
from infllm_cli.sampling import AnswerOptions
from infllm_cli.wording import row, strip

SVG = "{http://www.w3.org/2000/svg}"
TEXT = "The goose is called <Deacon> & the boat \x1b Patience. " * 60
QUESTION = 'What is "it" <b>?'


@pytest.fixture(scope="module")
def shown():
    """The pictures of two answers, with every layer, and what was looked at."""
    reader = make_reader()
    memory = read_text(reader, TEXT)
    pictures = Pictures(*(None, None))
    pictures.html = pictures.svg = "given"
    looked = []
    for question in (QUESTION, "Where?"):
        steps = reader.ask_steps(memory, question, AnswerOptions(max_tokens=9))
        looked.append([e for e in pictures.watched(memory, steps) if isinstance(e, Looked)])
    assert not memory.state.watch_layers
    return pictures._maps, looked, memory


def test_rows_are_the_question_and_the_tokens_and_columns_tile_the_document(shown):
    maps, looked, memory = shown
    for one, steps in zip(maps, looked, strict=True):
        answering = [step for step in steps if step.phase.value == "answer"]
        assert one.tokens == ["(question)", *(step.token for step in answering)]
        assert one.columns[0].first == 0 and one.columns[-1].last == len(memory.passages)
        np.testing.assert_allclose(one.cells[1:].sum(axis=1), [s.mass.sum() for s in answering])
        assert sorted(one.layers) == [0, 1, 2, 3]
        assert all(cells.shape == one.cells.shape for cells in one.layers.values())


def test_the_mass_of_the_layers_makes_up_that_of_the_step(shown):
    _, looked, _ = shown
    for step in looked[0]:
        shares = [layer.sum() for layer in step.layers.values()]
        assert all(0 <= share <= 1 for share in shares)
        # Every layer has the same mass: one for each query and head.
        assert np.mean(shares) == pytest.approx(step.share, rel=1e-4)


def test_many_passages_become_few_columns(shown):
    _, _, memory = shown
    from infllm_cli.evidence import AttentionRecord

    record = AttentionRecord(memory.document, memory.tokens, memory.passages, None)
    for most in (1, 3, 7, 1000):
        columns = columns_of(memory.passages, record.passage, most)
        assert len(columns) <= most
        borders = [(column.first, column.last) for column in columns]
        assert borders[0][0] == 0 and borders[-1][1] == len(memory.passages)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(borders))


def test_the_picture_is_well_formed_told_in_words_and_stands_alone(shown):
    maps, _, _ = shown
    drawn = svg_file(maps, "a & b.txt")
    root = ElementTree.fromstring(drawn)
    assert root.get("role") == "img" and root.find(f"{SVG}title").text.endswith("a & b.txt")
    assert "For the question" in root.find(f"{SVG}desc").text
    cells = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "cell"]
    assert cells and all(cell.find(f"{SVG}title").text for cell in cells)
    assert max(float(cell.get("fill-opacity")) for cell in cells) == 1.0
    assert "prefers-color-scheme:dark" in drawn
    assert not re.search(r"(?:href|src)=\"http|url\(|@import", drawn)


class Page(HTMLParser):
    """Ids, links and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.tags, self.said = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []

    def handle_data(self, data):
        self.said += data


def test_the_page_has_the_text_a_table_and_nothing_from_elsewhere(shown):
    maps, _, _ = shown
    told = page(maps, "a & b.txt")
    read = Page(told)
    assert QUESTION in read.said and "The goose is called <Deacon> & the boat" in read.said
    assert "\x1b" not in told and "<b>" not in told
    assert read.links and all(link[1:] in read.ids for link in read.links)
    assert read.tags.count("table") == 2 and len(set(read.ids)) == len(read.ids)
    assert not re.search(r"(?:href|src)=\"(?!#)|url\(|@import|fetch\(", told)
    for found in re.findall(r'<script type="application/json">(.*?)</script>', told):
        assert len(json.loads(found)["layers"]) == 4


def test_an_answer_that_looked_nowhere_is_drawn_all_the_same(shown):
    maps, _, memory = shown
    nothing = [
        Looked(s, 0, "x", 0, 0.0, [], 0.0, np.zeros(len(memory.passages))) for s in _phases()
    ]
    from infllm_cli.heatmap import heatmap_of

    one = heatmap_of(Answer("Q", "x", "stop", 1, 0.0, 0.0), nothing, maps[0].columns)
    ElementTree.fromstring(svg_file([one], "a"))
    assert "nothing in particular" in page([one], "a")


def _phases():
    from infllm_cli.memory.step import Phase

    return [Phase.ASK, Phase.ANSWER]


def test_a_strip_shows_where_in_the_document_a_step_looked():
    assert strip([]) == strip([0.0, 0.0]) == ""
    assert strip([0.0, 1.0, 0.25], 3) == " █▄"
    assert strip([0.0, 1.0, 0.25], 3, plain=True) == " %="
    assert len(strip(np.ones(1000))) == 40
    assert strip([1.0, 0, 0, 0, 0, 0, 0, 1.0], 2) == "██"


def test_a_folder_that_is_not_there_is_told_before_anything_is_read(tmp_path):
    with pytest.raises(UsageError, match=r"--heatmap .*no folder"):
        Pictures(None, tmp_path / "no" / "a.svg")


def test_the_command_writes_both_and_rows_have_strips(server, tmp_path):
    save_folder(tmp_path / "model")
    (tmp_path / "book.txt").write_text(prose(6000))
    arguments = ["ask", tmp_path / "book.txt", "What?", "And?", "--max-tokens", 6, "--stats"]
    arguments += ["--model", tmp_path / "model", "--cache-dir", tmp_path / "cache"]
    files = ["--evidence-html", tmp_path / "a.html", "--heatmap", tmp_path / "a.svg"]
    done = server.run([*arguments, *files])
    assert done.returncode == 0, done.stderr.decode()
    ElementTree.parse(tmp_path / "a.svg")
    assert (tmp_path / "a.html").read_text().count('<section class="answer">') == 2
    assert re.search("answer 1 .*; \\[[ ▁▂▃▄▅▆▇█]{10,40}\\]", done.stderr.decode())
    plain = server.run(arguments, env={"PYTHONIOENCODING": "ascii"})
    assert re.search(rb"answer 1 .*; \[[ .:=+*#%-]{10,40}\]", plain.stderr)
    missing = server.run([*arguments, "--heatmap", tmp_path / "no" / "a.svg"])
    assert missing.returncode == 2 and b"no folder" in missing.stderr
    assert b"loading the model" not in missing.stderr


def test_a_row_without_mass_has_no_strip():
    assert "[" not in row(Looked(_phases()[1], 0, "x", 0, 0.5, [], 0.1))
