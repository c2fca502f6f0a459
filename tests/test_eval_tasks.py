"""Constructions: their length in tokens, where the answers stand, and that there is one of each."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable

import pytest
from tiny_readers import chat_tokenizer
from tiny_tokenizers import prose

from infllm_cli.document import decode_document
from infllm_cli.errors import UsageError
from infllm_cli.evaluate.tasks import filler, kv, lines, needle, order, ruler
from infllm_cli.evaluate.tasks.base import Case, Cell, Fitting, Task, evenly
from infllm_cli.evaluate.tasks.haystack import Haystack, insert, sample_path
from infllm_cli.evaluate.tasks.ruler_needles import SHAPES
from infllm_cli.prompts import Prompt, build_prompt

STORY = Haystack.load(None)
# Tokens that may be missing of a length: about one unit of what a document is made of.
SLACK = {"passkey": 100, "number": 100, "kv": 220, "lines": 60, "needle": 40, "order": 400}
MAKERS: dict[str, Callable[[], Task]] = {
    "passkey": filler.passkey,
    "number": filler.number,
    "kv": kv.kv,
    "kv key-first": lambda: kv.kv(kv.KEY_FIRST),
    "lines": lines.lines,
    "needle": lambda: needle.needle(STORY),
    "needle magic apart": lambda: needle.needle(STORY, needle.MAGIC, apart=True),
    "order": lambda: order.order(STORY, 20),
    **{name: lambda name=name: ruler.ruler([name])[0] for name in ruler.NAMES},
}
LENGTH = 5000
LONGER = 14_000  # ten words thirty times each, in a vocabulary that knows few of them


def length_of(task: Task) -> int:
    return LONGER if task.variant == "cwe" else LENGTH


@pytest.fixture(scope="module", params=["byte_level", "llama2_like"])
def prompt(request: pytest.FixtureRequest) -> Prompt:
    return build_prompt(chat_tokenizer(kind=request.param), None)


@pytest.fixture(scope="module")
def fitting(prompt: Prompt) -> Fitting:
    return Fitting(prompt)


def build(task: Task, fitting: Fitting, seed: int = 0, length: int | None = None) -> list:
    """The first two documents of a plan, with their cells."""
    plans = task.plan([length or length_of(task)], evenly(3), 4)
    return [(cells, task.build(fitting, cells, seed)) for cells in plans[:2]]


def whole_length(prompt: Prompt, task: Task, case: Case) -> int:
    document = len(prompt.plain_ids(case.text))
    asked = max(prompt.around_tokens(p.question, p.prefill) for p in case.probes)
    return document + asked + task.max_tokens


@pytest.mark.parametrize("name", MAKERS)
def test_a_context_is_as_long_as_asked_and_never_longer(name: str, prompt: Prompt) -> None:
    task = MAKERS[name]()
    for _, case in build(task, Fitting(prompt)):
        missing = length_of(task) - whole_length(prompt, task, case)
        assert 0 <= missing <= SLACK.get(task.name, 260)


@pytest.mark.parametrize("name", MAKERS)
def test_answers_stand_where_the_probes_say(name: str, fitting: Fitting) -> None:
    for cells, case in build(MAKERS[name](), fitting):
        assert len(case.probes) == len(cells)
        for probe in case.probes:
            said = " ".join(case.text[start:end] for start, end in probe.spans)
            if name == "order":
                continue  # its spans are the two passages
            assert all(answer in said for answer in probe.answers) or name in ("cwe", "fwe")


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_seed_makes_the_same_and_another_one_something_else(
    name: str, fitting: Fitting
) -> None:
    task = MAKERS[name]()
    first, again, other = build(task, fitting), build(task, fitting), build(task, fitting, seed=1)
    assert first == again
    assert [case for _, case in first] != [case for _, case in other]
    texts = [case for _, case in first]
    assert len(texts) == 1 or texts[0] != texts[1]


@pytest.mark.parametrize("name", MAKERS)
def test_what_no_document_fits_is_refused(name: str, fitting: Fitting) -> None:
    task = MAKERS[name]()
    with pytest.raises(UsageError, match=r"--lengths|too short"):
        build(task, fitting, length=60)


@pytest.mark.parametrize("name", ["passkey", "number", "kv", "kv key-first", "lines", "needle"])
def test_an_answer_is_told_at_its_depth_alone(name: str, fitting: Fitting) -> None:
    task = MAKERS[name]()
    seen = []
    for cells in task.plan([LENGTH], evenly(5), 1):
        case = task.build(fitting, cells, 0)
        for cell, probe in zip(cells, case.probes, strict=True):
            (answer,) = probe.answers
            start, end = probe.spans[0]
            assert answer not in case.text[:start] + case.text[end:]
            at = (start + end) / 2 / len(case.text)
            assert abs(at - cell.depth) < 0.1
            seen.append(answer)
    assert len(set(seen)) == len(seen) == 5


def test_plans_read_once_what_can_be_read_once() -> None:
    depths, samples = evenly(3), 2
    assert [len(cells) for cells in filler.passkey().plan([10], depths, samples)] == [1] * 6
    assert [len(cells) for cells in kv.kv().plan([10], depths, samples)] == [3, 3]
    assert [len(cells) for cells in kv.kv(kv.KEY_FIRST).plan([10], depths, samples)] == [1] * 6
    assert [len(cells) for cells in MAKERS["order"]().plan([10, 20], depths, samples)] == [2, 2]
    (first, second) = MAKERS["vt"]().plan([10], depths, samples)
    assert first == (Cell(10, 0),) and second == (Cell(10, 1),)


def test_depths_reach_from_the_beginning_to_the_end() -> None:
    assert evenly(1) == [0.5]
    assert evenly(3) == [0.0, 0.5, 1.0]


# -- single tasks -----------------------------------------------------------------------------


def test_a_pass_key_is_five_digits_and_a_number_repeats_half_of_ten(fitting: Fitting) -> None:
    for _, case in build(filler.passkey(), fitting):
        assert re.fullmatch(r"\d{5}", case.probes[0].answers[0])
    for _, case in build(filler.number(), fitting):
        digits = case.probes[0].answers[0]
        assert re.fullmatch(r"\d{10}", digits)
        assert sum(a == b for a, b in itertools.pairwise(digits)) >= 5


@pytest.mark.parametrize("form", kv.PROMPTS)
def test_the_object_of_kv_is_json_without_a_key_twice(form: str, fitting: Fitting) -> None:
    for _, case in build(kv.kv(form), fitting):
        pairs = json.loads(case.text[case.text.index("{") :], object_pairs_hook=list)
        assert len({key for key, _ in pairs}) == len(pairs) > 10
        for probe in case.probes:
            key = re.fullmatch(r'Key: "(.+)"', probe.question)[1]
            assert dict(pairs)[key] == probe.answers[0]
            assert case.text.count(key) == (2 if form == kv.KEY_FIRST else 1)


def test_no_line_has_the_name_of_another(fitting: Fitting) -> None:
    for _, case in build(lines.lines(), fitting):
        names = re.findall(r"^line (\S+): REGISTER_CONTENT is <\d+>$", case.text, re.M)
        assert len(set(names)) == len(names) > 20
        for probe in case.probes:
            name = re.search(r"in line (\S+)\?", probe.question)[1]
            assert f"line {name}: REGISTER_CONTENT is <{probe.answers[0]}>" in case.text


def test_needles_of_one_document_differ_in_wording(fitting: Fitting) -> None:
    task = needle.needle(STORY)
    (cells,) = task.plan([LENGTH], evenly(11), 1)
    case = task.build(fitting, cells, 0)
    said = [case.text[slice(*probe.spans[0])] for probe in case.probes]
    assert len({re.sub(r"\d+|[A-Z]\w+", "", text) for text in said}) == 11
    assert all(
        case.text[start - 1] in " \n" or start == 0
        for ((start, _),) in (p.spans for p in case.probes)
    )


def test_the_beginning_of_an_answer_gives_nothing_away_and_can_be_left_out(
    fitting: Fitting,
) -> None:
    for begun in (True, False):
        task = needle.needle(STORY, begun=begun)
        (cells,) = task.plan([LENGTH], evenly(12), 1)
        probes = task.build(fitting, cells, 0).probes
        assert all(bool(probe.prefill) == begun for probe in probes)
        assert len({probe.prefill for probe in probes}) == (12 if begun else 1)
        assert not any(re.search(r"\d|[{}]", probe.prefill) for probe in probes)
    assert task.variant == "varied unaided"


def test_more_needles_than_places_are_refused(fitting: Fitting) -> None:
    task = needle.needle(STORY)
    (cells,) = task.plan([LENGTH], evenly(99), 1)
    with pytest.raises(UsageError, match="--depths 99"):
        task.build(fitting, cells, 0)


def test_a_needle_breaks_no_sentence() -> None:
    text, ends = "One is here. Two is there. Three ends.", [0, 12, 26, 38]
    found, spans = insert(text, ends, [(0.0, "First."), (0.5, "Mid."), (1.0, "Last.")], " ")
    assert found == "First. One is here. Mid. Two is there. Three ends. Last."
    assert [found[a:b] for a, b in spans] == ["First.", "Mid.", "Last."]


def test_a_short_haystack_is_repeated() -> None:
    hay = Haystack(decode_document(b"One two. Three four.\n", "hay"))
    text = hay.begin(50)
    assert text == "One two. Three four.\n\nOne two. Three four.\n\nOne tw"
    assert [text[:end][-4:] for end in hay.sentence_ends(50)[1:-1]] == ["two.", "our."] * 2


def test_the_sample_is_found_beside_the_package() -> None:
    assert sample_path().name == "story.txt" and sample_path().is_file()


def test_passages_to_be_ordered_stand_once_and_do_not_overlap(fitting: Fitting) -> None:
    task = order.order(STORY, 20)
    (cells,) = task.plan([LENGTH], [0.5], 16)
    case = task.build(fitting, cells, 0)
    right = Counter(probe.answers[0] for probe in case.probes)
    assert right == {"A": 8, "B": 8}
    for probe in case.probes:
        (_, first_end), (second, _) = probe.spans
        assert first_end <= second
        earlier, later = (case.text[slice(*span)] for span in probe.spans)
        assert case.text.count(earlier) == case.text.count(later) == 1
        assert len(earlier.split()) == len(later.split()) == 20
        shown = re.search(r"Segment A: (.*) Segment B: (.*)\n", probe.question)
        a_first = shown[1] == " ".join(earlier.split())
        assert probe.answers == (("A",) if a_first else ("B",))
    assert {probe.kind for probe in case.probes} == {f"distance {n} of 4" for n in (1, 2, 3, 4)}


def test_a_document_that_is_too_short_has_no_order(fitting: Fitting) -> None:
    task = order.order(Haystack(decode_document(prose(4000).encode(), "short.txt")), 20)
    with pytest.raises(UsageError, match=r"short\.txt is shorter"):
        build(task, fitting)


@pytest.mark.parametrize("name", SHAPES)
def test_ruler_asks_for_as_many_values_as_published(name: str, fitting: Fitting) -> None:
    shape = SHAPES[name]
    for _, case in build(ruler.ruler([name])[0], fitting):
        (probe,) = case.probes
        assert len(set(probe.answers)) == len(probe.answers) == shape.asked * shape.per_key
        assert all(case.text.count(answer) == 1 for answer in probe.answers)
        hidden = case.text.count("One of the special magic")
        assert hidden > 10 if shape.haystack == "needles" else hidden == shape.count * shape.per_key
        assert ("numbers" in probe.question or "uuids" in probe.question) == (
            len(probe.answers) > 1
        )


def test_a_chain_of_variables_is_in_order(fitting: Fitting) -> None:
    for _, case in build(ruler.ruler(["vt"])[0], fitting):
        (probe,) = case.probes
        value = re.search(r"the value (\d+)", probe.question)[1]
        said = [case.text[slice(*span)] for span in probe.spans]
        assert said[0] == f"VAR {probe.answers[0]} = {value}"
        pairs = zip(probe.answers, probe.answers[1:], strict=False)
        assert said[1:] == [f"VAR {b} = VAR {a}" for a, b in pairs]
        assert list(probe.spans) == sorted(probe.spans)
        assert case.text.count(value) == 1  # the solved example has another one


def test_common_words_are_the_most_common(fitting: Fitting) -> None:
    for _, case in build(ruler.ruler(["cwe"])[0], fitting):
        listed = re.findall(r"\d+\. (\w+)", case.text.rpartition("appear most often.\n")[2])
        most = Counter(listed).most_common(11)
        assert {word for word, _ in most[:10]} == set(case.probes[0].answers)
        assert most[9][1] == 30 and most[10][1] == 3


def test_frequent_words_are_the_most_frequent_but_for_the_dots(fitting: Fitting) -> None:
    for _, case in build(ruler.ruler(["fwe"])[0], fitting):
        counted = Counter(case.text.rpartition("coded words. ")[2].split())
        most = counted.most_common(5)
        assert most[0][0] == "..."
        assert tuple(word for word, _ in most[1:4]) == case.probes[0].answers
        assert most[3][1] > most[4][1]
