"""Which sentences are chosen, and what code says of itself."""

from __future__ import annotations

from infllm_cli.candidates import sentences_by_piece
from infllm_cli.parts import Part, Piece
from infllm_cli.remarks import definitions, is_code, remarks
from infllm_cli.sentences import split_sentences
from infllm_cli.telling import Candidate, Vocabulary, choose, distinct_4grams, most_named, overlap

TEXT = """It rained on that day and nothing happened at all. In the harbour Ahab met Starbuck
near the whale. He was tired. The weather was as it always is in a town like this. Ahab told
Starbuck that the whale had taken his leg. "And the whale?" asked Starbuck."""


def by_piece(text, title, *borders):
    ends = [*borders, len(text)]
    pieces = [
        Piece(i, 0, i, i + 1, a, b)
        for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    part = Part(0, title, True, None, (1, 1), 0, len(text), tuple(pieces))
    return [[s.text for s in found] for found in sentences_by_piece(text, [part])]


def chosen(text, words, **how):
    sentences = split_sentences(text)
    weights = Vocabulary(sentences).weights(sentences)
    found = choose([Candidate(s, 0) for s in sentences], weights, words, **how)
    return [candidate.sentence.text for candidate in found]


def test_sentences_with_the_texts_own_names_come_first_and_in_order():
    best = chosen(TEXT, 20)
    assert best == [
        "In the harbour Ahab met Starbuck near the whale.",
        "Ahab told Starbuck that the whale had taken his leg.",
    ]


def test_one_sentence_is_chosen_however_short_the_summary():
    assert len(chosen(TEXT, 1)) == 1


def test_a_length_is_kept():
    many = " ".join(f"The captain number {n} sails with ship {n} again." for n in range(90))
    for words in (30, 60, 200):
        assert 0.7 * words <= sum(len(s.split()) for s in chosen(many, words)) <= 1.15 * words


def test_names_come_in_their_full_form_and_families_by_their_members():
    text = " ".join(
        ["Then Ann Lee met old Bob Lee."] * 4 + ["There was Mr. Fox on Monday."] * 3 + ["Then Ann."]
    )
    sentences = split_sentences(text)
    names = most_named(sentences, Vocabulary(sentences).names, 5)
    assert set(names) == {"Ann Lee", "Bob Lee", "Fox"}


def test_repetition_and_overlap_are_shares():
    assert distinct_4grams("a b c d e f") == 1.0
    assert distinct_4grams("a b c d a b c d a b c d") < 0.5
    assert distinct_4grams("a b") == 1.0
    assert overlap("The glove was grey.", {"grey", "glov"}) == 1.0
    assert overlap("The hat was blue.", {"grey", "glov"}) == 0.0


CODE = '''"""Reads tide tables. They come from a file."""

# Degrees per hour,
# as in the almanac.
SPEED = 3

class Station:
    """Where a gauge stands."""

def load(path):
    return 1  // 2
'''


def test_code_speaks_in_docstrings_comments_and_names():
    found = remarks(CODE, 0, len(CODE))
    assert [s.text for s in found][:3] == [
        "Reads tide tables.",
        "They come from a file.",
        "Degrees per hour, as in the almanac.",
    ]
    assert CODE[found[2].start :].startswith("Degrees")
    assert definitions(CODE, 0, len(CODE)).text == "Defines Station, load."
    assert is_code("src/a.py") and is_code("Makefile") and not is_code("README.md")
    assert by_piece(CODE, "a.py")[0][3] == "Defines Station, load."


def test_prose_leaves_headings_tables_and_listings_out():
    table = "| a | b |\n|---|---|"
    text = f"# Title\n\n{table}\n\nThis **is** it, and `more`.\n\n    make run;\n\n- One item.\n"
    assert by_piece(text, "README.md") == [["This is it, and more.", "One item."]]


def test_where_there_is_no_prose_the_first_line_stands_for_it():
    text = "\n\n| a | b |\n|---|---|\n"
    assert by_piece(text, "a.md") == [["| a | b |"]]
    assert len(by_piece("x=1;" * 100, "a.py")[0][0]) == 160


def test_a_sentence_belongs_to_the_piece_where_it_begins():
    text = "This is one. And this is two. Three it is."
    assert by_piece(text, "a.md", 20, 25) == [
        ["This is one.", "And this is two."],
        [text[20:25].strip()],
        ["Three it is."],
    ]
