"""Summaries: every part takes part, they end, and what they rest on is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_readers import SMALL, make_reader, memory_contents, read_text, same_contents

from infllm_cli.digests import Digest, PassDone, PieceTold, Summary, groups_of
from infllm_cli.drafts import Draft, Source, _without_repeats, push
from infllm_cli.errors import UsageError
from infllm_cli.memory.excerpt import excerpt
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase
from infllm_cli.summarizing import Summarizing
from infllm_cli.summary_options import SummaryOptions, Wording

B = SMALL.block_tokens


@pytest.fixture(scope="module")
def reader():
    return make_reader()


def words_for(tokens, reader):
    """A text of about so many tokens, a word of its own in each block."""
    text, number = "", 0
    while len(reader.prompt.tokenizer.encode(text).ids) < tokens:
        number += 1
        text += f"Then word{number} came by. "
    return text


def summarize(reader, memory, most_tokens=2048, **options):
    steps = Summarizing(reader, memory, SummaryOptions(**options), most_tokens).steps()
    events = list(steps)
    assert isinstance(events[-1], Summary)
    return events[-1], events[:-1]


def test_an_excerpt_of_everything_gives_the_logits_of_the_memory_itself(reader):
    memory = read_text(reader, "The goose is called Deacon. " * 12, whole=True)
    ids = reader.prompt.plain_ids(" Who is called that?")
    with memory.state.question():
        _, expected = push(reader, memory.state, Phase.ASK, ids)
    layers = reader.loaded.layers_for(2048)
    twin = excerpt(
        memory.state, layers, 0, memory.state.tokens, trained_length=2048, reserve_tokens=64
    )
    _, found = push(reader, twin, Phase.ASK, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [0, 2, 4, 5, 37, 300])
def test_an_excerpt_is_sinks_and_stretch_at_consecutive_places(reader, first):
    memory = read_text(reader, words_for(600, reader))
    state, last = memory.state, first + 61
    layers = reader.loaded.layers_for(2048)
    twin = excerpt(state, layers, first, last, trained_length=2048, reserve_tokens=8)
    sinks = min(SMALL.sink_tokens, first)
    assert twin.tokens == sinks + 61
    for source, target in zip(state.tiered, twin.tiered, strict=True):
        keys, values = target.stretch(0, twin.tokens)
        expected_keys, expected_values = source.stretch(first, last)
        assert torch.equal(keys[:, sinks:], expected_keys)
        assert torch.equal(values[:, sinks:], expected_values)
        if sinks:
            assert torch.equal(keys[:, :sinks], source.stretch(0, sinks)[0])


def test_summarizing_leaves_the_memory_as_it_was(reader):
    memory = read_text(reader, words_for(400, reader))
    before = memory_contents(memory)
    for wording in (Wording.QUOTED, Wording.OWN):
        summarize(reader, memory, 64, words=40, wording=wording)
        assert same_contents(before, memory_contents(memory))


@pytest.mark.parametrize("blocks", [1, 2, 9, 10, 11])  # llama_index#6550
@pytest.mark.parametrize("wording", [Wording.QUOTED, Wording.OWN])
def test_every_block_takes_part(reader, blocks, wording):
    memory = read_text(reader, words_for(blocks * B, reader))
    summary, events = summarize(reader, memory, B, words=60, wording=wording)
    told = [event for event in events if isinstance(event, PieceTold)]
    assert len(told) >= blocks
    covered = np.zeros(len(memory.tokens), int)
    for event in told:
        covered[event.piece.first : event.piece.last] += 1
        assert event.digest.text and event.digest.evidence
        if event.digest.quoted:
            begins = event.digest.candidates[0].sentence.start
            assert event.piece.start <= begins < event.piece.end
    assert (covered == 1).all()
    assert summary.text and summary.evidence
    assert sorted(index for d in summary.digests for index in d.pieces) == list(range(len(told)))


def test_two_hundred_sections_end_and_every_pass_shrinks(reader):  # langchain#5829, #13230
    sections = [
        f"## Section {n}\n\nIn town {n} the mayor{n} met the baker{n}. " for n in range(200)
    ]
    text = "\n".join(section + "Then they talked about bread. " * 7 for section in sections)
    memory = read_text(reader, text)
    summary, events = summarize(reader, memory, words=50, wording=Wording.QUOTED)
    assert len(summary.parts) == 200
    passes = [event for event in events if isinstance(event, PassDone)]
    assert passes
    assert all(p.outputs <= p.inputs / 2 and p.words_out < p.words_in for p in passes)
    assert 20 < len(summary.text.split()) < 70


def test_the_last_sections_fact_is_in_the_evidence(reader):  # ollama#8099
    filler = "Nothing of note happened in the village on that day. " * 60
    text = f"{filler}\n\nIn the end Ottilie Brandt inherited the lighthouse from Captain Brandt."
    memory = read_text(reader, text)
    assert memory.complete
    summary, _ = summarize(reader, memory, 128, words=40, wording=Wording.QUOTED)
    assert any("inherited the lighthouse" in passage.text for passage in summary.evidence)
    assert "Ottilie Brandt" in summary.text


def test_a_focus_brings_its_own_sentences(reader):
    text = " ".join(f"On day {n} the crew sailed past island {n} again." for n in range(40))
    text += " A grey glove lay on the table. A green hat hung on a nail. " + text
    memory = read_text(reader, text)
    for focus, other in (("grey glove", "green hat"), ("green hat", "grey glove")):
        how = {"words": 10, "wording": Wording.QUOTED, "focus": f"the {focus}"}
        summary, _ = summarize(reader, memory, 200, **how)
        assert focus in summary.text and other not in summary.text


def test_an_outline_has_a_line_per_part_with_its_lines(reader):
    text = "# A\n\n" + "Ann met Bob here. " * 20 + "\n\n# B\n\n" + "Bob met Cid there. " * 20 + "\n"
    memory = read_text(reader, text)
    summary, events = summarize(reader, memory, wording=Wording.QUOTED, outline=True)
    assert summary.text.split("\n") == [
        "A (line 3): Ann met Bob here.",
        "B (line 7): Bob met Cid there.",
    ]
    assert not any(isinstance(event, PassDone) for event in events)
    assert summary.told == [0, 1]


def test_layers_that_forget_are_given_the_piece_again():
    sliding = make_reader(kind="gemma2")
    memory = read_text(sliding, words_for(200, sliding))
    summary, _ = summarize(sliding, memory, 64, words=30, wording=Wording.QUOTED)
    assert summary.text


def test_a_tiny_model_is_not_trusted_with_its_own_words(reader):
    memory = read_text(reader, words_for(100, reader))
    assert reader.summarize(memory, SummaryOptions(words=30)).quoted


@pytest.mark.parametrize("options", [{"words": 9}, {"words": 5001}, {"focus": " "}])
def test_what_is_no_summary_is_refused(options):
    with pytest.raises(UsageError, match=r"--(words|focus)"):
        SummaryOptions(**options)


# -- drafts ---------------------------------------------------------------------------------------

TEXT = Source("Hester Quill got a letter from the solicitor Crane on 3 March 1887 about a ferry.")


@pytest.mark.parametrize(
    ("sentence", "kept"),
    [
        ("The solicitor Crane wrote a letter about a ferry.", True),
        ("Hester got the letter in March 1887.", True),
        ("The solicitor Gatsby wrote a letter about a ferry.", False),
        ("Hester got the letter in March 1888.", False),
        ("Somebody bought expensive elephants somewhere yesterday.", False),
        ("A letter.", False),
    ],
)
def test_the_text_vouches_for_names_numbers_and_words(sentence, kept):
    assert TEXT.vouches_for(sentence, []) is kept


def test_what_was_said_is_not_said_again():
    said = "The solicitor Crane wrote a letter about a ferry."
    assert not TEXT.vouches_for(said, [said])


def test_no_run_of_tokens_is_written_twice():
    logits = torch.zeros(10)
    logits[4] = 5.0
    written = [1, 2, 3, 4, 7, 1, 2, 3]
    assert int(_without_repeats(logits, written).argmax()) != 4
    assert int(_without_repeats(logits, [1, 2, 3, 5, 7, 1, 2, 3]).argmax()) == 4
    assert int(_without_repeats(logits, []).argmax()) == 4


class Scripted:
    """A reader whose model writes a given text."""

    def __init__(self, reader, text):
        self.loaded, self.prompt = reader.loaded, reader.prompt
        self.ids = iter([*reader.prompt.plain_ids(text).tolist(), min(reader.prompt.stop_ids)])

    def logits(self):
        return torch.nn.functional.one_hot(torch.tensor(next(self.ids)), 2000).float()

    def forward(self, *arguments, **named):
        return None, self.logits()


def test_a_draft_keeps_what_is_vouched_for_and_leaves_its_preamble_out(reader):
    text = (
        "Here is the summary:\n\n1. Hester Quill got a letter.\n2. The Great Gatsby drank gin.\n"
        "The solicitor Crane wrote about a ferry. And then he"
    )
    scripted = Scripted(reader, text)
    state = ModelMemory(reader.loaded.layers_for(64), SMALL, trained_length=2048)
    draft = Draft(scripted, state, scripted.logits(), keep_from=None, most_words=60)
    assert list(draft.sentences(TEXT)) == [
        "Hester Quill got a letter.",
        "The solicitor Crane wrote about a ferry.",
    ]
    assert draft.dropped == 2


def test_neighbours_are_grouped_and_never_one_alone():
    for count in range(2, 30):
        for words in (5, 400, 900):
            digests = [Digest("word " * words, (n,), True, [], []) for n in range(count)]
            groups = groups_of(digests, 700)
            assert [d.pieces[0] for group in groups for d in group] == list(range(count))
            assert all(len(group) > 1 for group in groups)


@pytest.mark.parametrize("wording", [Wording.QUOTED, Wording.OWN])
@pytest.mark.parametrize(
    "text",
    ["Hello", "x = 1\n", "| a | b |\n|---|---|\n", "\n\n???\n\n", "本" * 300, "é\u0301 " * 99],
)
def test_whatever_the_document_a_summary_comes_and_is_no_longer_than_asked(reader, text, wording):
    memory = read_text(reader, text)
    summary, _ = summarize(reader, memory, 64, words=20, wording=wording)
    assert summary.text.strip() and len(summary.text.split()) < 60
    outline, _ = summarize(reader, memory, 64, outline=True)
    assert len(outline.text.split("\n")) == len(outline.parts)


def test_a_licence_around_a_book_is_not_in_its_summary(reader):
    book = "".join(f"The goose number {n} bit the miller near the old bridge. " for n in range(30))
    licence = "".join(f"Contributions number {n} to the Archive are welcome. " for n in range(30))
    marks = [f"*** {word} OF THIS PROJECT GUTENBERG EBOOK GEESE ***" for word in ("START", "END")]
    text = f"{licence}\n\n{marks[0]}\n\n{book}\n\n{marks[1]}\n\n{licence}"
    whole, _ = summarize(reader, read_text(reader, text), most_tokens=128, words=60)
    assert "goose" in whole.text and "Archive" not in whole.text
    bare, _ = summarize(reader, read_text(reader, f"{licence}{book}"), most_tokens=128, words=60)
    assert "Archive" in bare.text  # without the marks it is text like any other
