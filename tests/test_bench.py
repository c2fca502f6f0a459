"""`infllm bench`: what it measures, counts and draws. No time is asserted."""

from __future__ import annotations

import copy
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
import torch
from tiny_folder import save_folder
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.__main__ import main
from infllm_cli.bench.floor import Need, Rates, linears, measure_rates, need_of
from infllm_cli.bench.measure import Bench, DenseCache, Plan, Point, typical
from infllm_cli.bench.picture import svg_file
from infllm_cli.bench.report import NONE, as_json, parts_table, shortened, table
from infllm_cli.bench.run import parse_lengths, text_of
from infllm_cli.bench.stopwatch import ATTENTION, LOOKUP, PARTS, PROJECTIONS, SEALING, Stopwatch
from infllm_cli.bench.text import made_text, repeated
from infllm_cli.errors import UsageError
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.step import Phase

RATES = Rates(product=1e9, moved=1e8)
POINT = Point(
    tokens=2048,
    read_seconds=4.0,
    recent_chunk=1.0,
    bare_chunk=0.8,
    step=0.1,
    bare_step=0.05,
    both_step=0.15,
    first_token=5.0,
    next_first_token=4.0,
    device_bytes=10**6,
    host_bytes=10**7,
    dense_bytes=0,
    read_need=Need(5e8, 1e6),
    step_need=Need(1e6, 2e6),
)


def plain_twin(reader):
    plain = copy.deepcopy(reader.model)
    plain.set_attn_implementation("sdpa")
    return plain


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("2k,8k", (2048, 8192)), ("8K, 100", (100, 8192)), ("512,512", (512,))],
)
def test_lengths_are_a_list_of_token_counts(given, lengths):
    assert parse_lengths(given) == lengths


@pytest.mark.parametrize("given", ["", "2k,", "-5", "0", "2m", "k", "1.5k"])
def test_what_is_no_length_is_refused(given):
    with pytest.raises(UsageError, match="--lengths"):
        parse_lengths(given)


def test_the_text_is_always_the_same_and_long_enough():
    assert made_text(3000) == made_text(3000)
    assert made_text(30_000).startswith(made_text(300)[:200])
    assert len(made_text(3000)) >= 3000
    assert len(repeated("abc", 100)) >= 100


@pytest.mark.parametrize("given", [None, "a short text. "])
def test_a_text_has_exactly_the_tokens_wanted(given):
    from infllm_cli.document import decode_document

    reader = make_reader()
    document = None if given is None else decode_document(given.encode(), "short")
    found, tokens = text_of(reader, document, 700)
    assert len(tokens) == 700
    assert len(found.text) == tokens.spans[-1, 1]


def test_every_length_is_measured():
    reader = make_reader()
    plan = Plan((160, 320), limit_seconds=60.0, steps=2, candidates=4, profile=True)
    bench = Bench(reader, plain_twin(reader), plan, progress=lambda _: None)
    document, tokens = text_of(reader, None, 320)
    points = list(bench.run(document, tokens))
    assert [p.tokens for p in points] == [160, 320]
    for point in points:
        for seconds in (point.read_seconds, point.recent_chunk, point.bare_chunk, point.step):
            assert seconds > 0
        assert point.dense_seconds is not None and point.dense_bytes > 0
        assert point.host_bytes > 0 and point.device_bytes > 0
        assert set(point.parts) == {"answer token", "chunk"}
        assert point.parts["answer token"][LOOKUP] > 0 and point.parts["chunk"][SEALING] > 0
    assert points[1].read_seconds > points[0].read_seconds
    assert points[1].dense_bytes > points[0].dense_bytes
    told = as_json(points, bench.rates, {"model": "tiny"}, SMALL.chunk_tokens)
    assert json.loads(json.dumps(told))["lengths"][1]["tokens"] == 320


def test_the_dense_cache_is_given_up_when_it_takes_too_long():
    reader = make_reader()
    plan = Plan((160,), limit_seconds=0.0, steps=1, candidates=0)
    bench = Bench(reader, plain_twin(reader), plan, progress=lambda _: None)
    (point,) = bench.run(*text_of(reader, None, 160))
    assert point.dense_seconds is None and point.dense_step is None and point.dense_bytes == 0


def test_the_dense_cache_sees_what_was_read_before():
    reader = make_reader()
    plain = plain_twin(reader)
    ids = torch.arange(3, 43)
    with torch.inference_mode():
        whole = plain(input_ids=ids[None], use_cache=False).logits[0, -1]
        dense = DenseCache(plain)
        dense.read(ids[:17])
        dense.read(ids[17:-1])
        kept = []
        dense._keep, keep = lambda out: (kept.append(out.logits[0, -1]), keep(out)), dense._keep
        dense.step(ids[-1:])
    assert torch.allclose(kept[0], whole, atol=1e-5)
    held = 2 * 4 * 2 * 8 * 4 * len(ids)  # keys and values, layers, KV heads, dimensions, bytes
    assert dense.nbytes == held
    dense.give_up()
    assert dense.nbytes == 0 and not dense.alive


def test_what_a_step_needs_is_counted():
    reader = make_reader()
    memory = read_text(reader, prose(3000))
    model, state = reader.model, memory.state
    head = model.get_output_embeddings()
    body = [m.weight for m in linears(model) if m is not head]
    chunk = need_of(model, state, SMALL.chunk_tokens, answering=False)
    g = state.layers[0].geometry
    keys = len(state.layers[0].window) + SMALL.chunk_tokens + SMALL.sink_tokens
    keys += SMALL.read_blocks * SMALL.block_tokens
    products = 2 * sum(w.numel() for w in body) * SMALL.chunk_tokens
    attention = 4 * g.heads * SMALL.chunk_tokens * keys * g.head_dim * len(state.layers)
    assert chunk.operations == products + attention
    held = 2 * g.kv_heads * keys * g.head_dim * 4 * len(state.layers)
    assert chunk.read == sum(w.nbytes for w in body) + held
    one = need_of(model, state, 1, answering=True)
    scanned = sum(p.keys.nbytes for layer in state.tiered for p in layer.arena.parts())
    assert one.read > sum(w.nbytes for w in body) + head.weight.nbytes + scanned
    assert one.seconds(Rates(1e30, 1.0)) == one.read
    assert one.seconds(Rates(1.0, 1e30)) == one.operations


def test_the_machine_s_rates_are_measured():
    rates = measure_rates(make_reader().model, 32)
    assert 0 < rates.product < math.inf and 0 < rates.moved < math.inf


def test_each_second_is_counted_once_and_nothing_stays_wrapped():
    reader = make_reader()
    memory = read_text(reader, prose(3000))
    before = LayerMemory.attend, LayerMemory._lookup
    watch = Stopwatch(torch.device("cpu"))
    ids = torch.arange(5, 10)
    with memory.state.question(), watch.around(reader.model):
        reader.forward(memory.state, Phase.ASK, ids, keep_from=memory.state.tokens)
    assert (LayerMemory.attend, LayerMemory._lookup) == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in reader.model.modules())
    assert set(watch.seconds) == set(PARTS)
    for part in (PROJECTIONS, ATTENTION, LOOKUP):
        assert watch.seconds[part] > 0


def test_parts_within_parts_are_not_counted_twice(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("infllm_cli.bench.stopwatch.now", lambda device: next(clock))
    watch = Stopwatch(torch.device("cpu"))
    watch.enter(LOOKUP)
    watch.enter(ATTENTION)
    watch.leave()
    watch.leave()
    assert watch.seconds[ATTENTION] == 2.0 and watch.seconds[LOOKUP] == 5.0


def test_the_table_tells_ratios_and_what_was_not_measured():
    rows = {row[0]: row[1:] for row in table([POINT, replace(POINT, tokens=3000)], 512, RATES)}
    assert rows[""] == ["2K", "3,000"]
    assert rows["reading, tokens/s"][0] == "512"
    assert rows["share of the ceiling"][0] == "0.80"
    assert rows["answer token over bare"][0] == "2.00"
    assert rows["dense cache, tokens/s"][0] == NONE
    assert rows["chunk, at least (floor)"][0] == "500 ms"
    assert rows["answer token, at least (floor)"][0] == "20 ms"
    dense = replace(POINT, dense_seconds=8.0, dense_chunk=2.0, dense_step=0.3)
    rows = {row[0]: row[1:] for row in table([dense], 512, RATES)}
    assert rows["times as fast as dense"] == ["2.00"]
    told = replace(POINT, parts={"chunk": {"projections": 0.3, "attention": 0.1}})
    assert parts_table([told], "chunk")[1] == ["projections", "300.0 ms, 75 %"]


def test_the_picture_is_xml_that_holds_every_point():
    dense = replace(POINT, dense_seconds=8.0, dense_chunk=2.0, dense_step=0.3)
    drawn = ET.fromstring(svg_file([dense, replace(POINT, tokens=8192)], 512, "a <model> & more"))
    name = "{http://www.w3.org/2000/svg}"
    circles = drawn.findall(f"{name}circle")
    assert len(circles) == 2 * (2 + 2 + 1)
    width, height = float(drawn.get("width")), float(drawn.get("height"))
    assert all(0 < float(c.get("cx")) < width and 0 < float(c.get("cy")) < height for c in circles)
    assert "a <model> & more" in drawn.find(f"{name}title").text
    assert "8K" in drawn.find(f"{name}desc").text
    assert ET.fromstring(svg_file([POINT], 512, "one")) is not None


def test_lengths_are_told_shortly():
    assert [shortened(n) for n in (2048, 131072, 3000)] == ["2K", "128K", "3,000"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_folder(tmp_path_factory.mktemp("bench") / "model")


def bench(monkeypatch, folder, *arguments):
    sizes = ["--window", "128", "--sinks", "4", "--chunk", "32", "--blocks", "1"]
    common = ["--model", str(folder), "--cache-dir", str(folder.parent / "cache"), "--dtype", "f32"]
    monkeypatch.setattr("sys.argv", ["infllm", "bench", *sizes, *common, *arguments])
    main()


def test_the_command_prints_a_table_and_draws(monkeypatch, capsys, folder, tmp_path):
    picture = tmp_path / "speed.svg"
    arguments = ["--lengths", "512", "--steps", "1", "--profile", "--picture", str(picture)]
    with pytest.raises(SystemExit) as end:
        bench(monkeypatch, folder, *arguments)
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert "| reading, tokens/s" in out and "| projections" in out
    assert "past_key_values" not in err
    assert picture.read_text().startswith("<svg")


def test_the_command_prints_json(monkeypatch, capsys, folder):
    with pytest.raises(SystemExit) as end:
        bench(monkeypatch, folder, "--lengths", "512", "--steps", "1", "--json", "--quiet")
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    told = json.loads(out)
    assert told["lengths"][0]["tokens"] == 512 and told["config"]["chunk_tokens"] == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "64"], "no memory to measure"),
        (["--lengths", "512", "--limit-seconds", "-1"], "--limit-seconds"),
        (["--lengths", "512", "--picture", "/none/speed.svg"], "there is no folder /none"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, capsys, folder, arguments, said):
    with pytest.raises(SystemExit) as end:
        bench(monkeypatch, folder, *arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_what_alternates_counts_by_its_mean():
    assert typical([40.0, 20.0, 40.0, 20.0, 90.0, 20.0, 40.0]) == 30.0
    assert typical([7.0]) == 7.0
