"""What reading would take, told before it is read, against what reading takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_folder import save_folder
from tiny_models import ARCHITECTURES, VARIANTS, build
from tiny_readers import SMALL, chat_tokenizer, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli import budget, machine, plan, speeds
from infllm_cli.budget import LayerShape
from infllm_cli.capacity import Room
from infllm_cli.document import decode_document
from infllm_cli.errors import CapacityError, ModelError, UsageError
from infllm_cli.limits import Limits
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import FLAGS, MemoryConfig
from infllm_cli.memory.knobs import Policy, Relevance, RepresentativeRule
from infllm_cli.models.loading import shapes_of
from infllm_cli.models.probe import probe_layers

BIG = [LayerShape(8, 128, 128)] * 80  # FACTS section 1


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def plan_of(place, text, **settings):
    document = decode_document(text.encode(), "text")
    settings = {"dtype": "f32", **settings}
    return plan.plan_document(
        document, model=str(place / "model"), cache_dir=place / "cache", **settings
    )


# --- arithmetic ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "gigabytes"),
    [(4_096, 1.34), (32_768, 10.74), (128_000, 41.94), (1_000_000, 327.68)],
)
def test_a_plain_cache_takes_what_the_table_of_the_facts_says(tokens, gigabytes):
    assert budget.dense(BIG, 2, tokens).device_bytes == 327_680 * tokens
    assert round(budget.dense(BIG, 2, tokens).device_bytes / 1e9, 2) == gigabytes


def test_on_the_device_infllm_holds_a_constant_and_a_few_bytes_per_block():
    config = MemoryConfig(codec=Codec.FULL)
    needs = [budget.infllm(BIG, 2, config, n) for n in (32_768, 128_000, 1_000_000)]
    assert len({need.device_bytes for need in needs}) == 1
    # Slots for sinks and blocks, window and chunk, two chunks of slack: two keys and a value in
    # bf16 and a float32 sum each; and the sinks.
    slots = (64 + 8 * 128) + (1024 + 64 + 512) + 2 * 512
    assert needs[0].device_bytes == 80 * 8 * 128 * (slots * (3 * 2 + 4) + 64 * 2 * 2)
    for need, tokens in zip(needs, (32_768, 128_000, 1_000_000), strict=True):
        blocks = (tokens - 64 - 1024) // 128
        assert need.host_bytes == blocks * 128 * 327_680
        assert need.device_growing_bytes == blocks * 80 * 8 * (4 * 128 + 2 * 4)
        assert need.device_growing_bytes < 0.01 * need.host_bytes


@pytest.mark.parametrize(
    ("codec", "share"),
    [(Codec.FULL, 1.0), (Codec.INT8, 0.504), (Codec.FP8, 0.504), (Codec.INT4, 0.262)],
)
def test_a_codec_takes_its_share_of_the_bytes_of_the_model(codec, share):
    need = budget.infllm(BIG, 2, MemoryConfig(codec=codec), 1_000_000)
    blocks = (1_000_000 - 64 - 1024) // 128
    assert need.host_bytes == pytest.approx(share * blocks * 128 * 327_680, rel=1e-3)
    # The last segment is packed when it is full: until then it takes what the model's would.
    assert need.host_reading_bytes == pytest.approx((1 - share) * 64 * 128 * 327_680, rel=1e-2)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", ["llama", "phi3", "gemma2"])
def test_a_plan_counts_the_bytes_of_every_codec(kind, codec):
    config = replace(SMALL, codec=codec, segment_blocks=5)
    reader = make_reader(kind=kind, config=config)
    memory = reader.open(decode_document(prose(3000).encode(), "text"), allow_whole=False)
    shapes = shapes_of(reader.model.config.get_text_config())
    most = 0
    for _ in reader.read_steps(memory):
        most = max(most, memory.state.host_bytes)
    need = budget.infllm(shapes, 4, config, memory.state.tokens)
    assert memory.state.host_bytes == need.host_bytes > 0
    assert need.host_bytes <= most <= need.host_peak_bytes
    full = memory.state.segment_bytes
    assert full == sum(layer.arena.segments[0].nbytes for layer in memory.state.tiered)


@pytest.mark.parametrize("policy", [p for p in Policy if not p.has_blocks and p != Policy.DENSE])
def test_what_forgets_takes_a_constant_however_long_the_text(policy):
    config = MemoryConfig(policy=policy)
    needs = [budget.of_policy(BIG, 2, config, n) for n in (10_000, 1_000_000)]
    assert needs[0] == needs[1] and needs[0].policy == budget.NAMES[policy]
    assert needs[0].host_bytes == needs[0].device_growing_bytes == 0


def test_infini_attention_takes_less_than_a_gigabyte_for_a_million_tokens_of_a_70b_model():
    need = budget.of_policy(BIG, 2, MemoryConfig(policy=Policy.INFINI), 1_000_000)
    matrices = 2 * 80 * 8 * (128 * 128 + 128) * 4
    assert need.device_bytes == 327_680 * 2048 + matrices < 1_000_000_000


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("characters", [20, 100, 900, 6_000])
@pytest.mark.parametrize("policy", [p for p in Policy if p not in (Policy.DENSE, Policy.INFLLM)])
def test_the_bytes_of_every_policy_are_those_that_reading_takes(policy, characters, kind):
    sizes = {n: getattr(SMALL, n) for n in FLAGS if n != "read_blocks"}
    config = MemoryConfig(policy=policy, infini_segment_tokens=100, codec=Codec.FULL, **sizes)
    reader = make_reader(torch.bfloat16, kind=kind, config=config)
    memory = read_text(reader, prose(characters), whole=True)
    assert not memory.whole, "a policy that was chosen has a say about short documents, too"
    shapes = shapes_of(reader.model.config.get_text_config())
    need = budget.of_policy(shapes, 2, config, memory.state.tokens)
    assert memory.state.host_bytes == need.host_bytes
    assert memory.device_bytes_peak == need.device_bytes + need.device_growing_bytes


@pytest.mark.parametrize("rule", list(RepresentativeRule))
@pytest.mark.parametrize("relevance", list(Relevance))
def test_knobs_take_the_bytes_that_are_planned(rule, relevance):
    config = replace(SMALL, representative_rule=rule, relevance=relevance, device_cache_blocks=3)
    reader = make_reader(config=config)
    memory = read_text(reader, prose(2000))
    shapes = shapes_of(reader.model.config.get_text_config())
    need = budget.of_policy(shapes, 4, config, memory.state.tokens)
    assert memory.device_bytes_peak == need.device_bytes + need.device_growing_bytes


def test_dense_attention_that_the_memory_does_not_hold_is_refused_before_it_is_read():
    config = MemoryConfig.for_model(2048, policy=Policy.DENSE)
    reader = make_reader(config=config)
    document = decode_document(prose(6000).encode(), "text")
    need = budget.of_policy(
        shapes_of(reader.model.config.get_text_config()),
        4,
        config,
        len(reader.prompt.prefix) + len(reader.prompt.tokenizer.encode(document.text).ids),
    )
    assert need.device_bytes > 500_000
    with pytest.raises(CapacityError, match="--host-limit"):
        reader.open(document, room=Room(need.device_bytes - 1, disk=2**40))
    reader.open(document, room=Room(need.device_bytes))


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *VARIANTS])
def test_a_configuration_tells_the_layers_that_a_probe_finds(kind):
    model = build(kind)
    probed = [
        LayerShape(g.kv_heads, g.head_dim, g.value_dim, g.sliding_window)
        for g in probe_layers(model)
    ]
    assert shapes_of(model.config.get_text_config()) == probed


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral sliding"])
@pytest.mark.parametrize("characters", [100, 500, 900, 2_000, 6_000])
@pytest.mark.parametrize("chunk", [5, 32])
def test_the_bytes_are_those_that_reading_takes(kind, characters, chunk):
    config = replace(SMALL, chunk_tokens=chunk)
    reader = make_reader(kind=kind, config=config)
    memory = read_text(reader, prose(characters))
    shapes = shapes_of(reader.model.config.get_text_config())
    need = budget.infllm(shapes, 4, config, memory.state.tokens)
    assert memory.state.blocks == budget.blocks_of(config, memory.state.tokens)
    assert memory.state.host_bytes == need.host_bytes
    assert memory.device_bytes_peak == need.device_bytes + need.device_growing_bytes


def test_the_bytes_of_a_document_attended_whole():
    reader = make_reader(torch.bfloat16)
    memory = read_text(reader, prose(900), whole=True)
    shapes = shapes_of(reader.model.config.get_text_config())
    need = budget.infllm(shapes, 2, SMALL, memory.state.tokens, whole_tokens=memory.state.tokens)
    assert memory.state.host_bytes == need.host_bytes == 0
    # Besides, room for question and answer.
    assert need.device_bytes <= memory.device_bytes_peak < 3 * need.device_bytes


# --- documents -----------------------------------------------------------------------------------


def test_tokens_and_blocks_are_those_of_a_reading(place):
    text = (place / "book.txt").read_text()
    planned = plan_of(place, text)
    reader = make_reader(tokenizer=chat_tokenizer())
    assert planned.tokens == len(reader.prompt.tokenizer.encode(text)) and not planned.estimated
    assert planned.blocks > 10 and not planned.whole
    assert planned.model["trained_length"] == 512 and planned.weight_bytes > 100_000
    names = [need.policy for need in planned.needs]
    assert names == list(budget.NAMES.values()) and names[-1] == planned.need.policy == "InfLLM"
    chosen = plan_of(place, text, sizes={"policy": Policy.H2O})
    assert chosen.need.policy == "H2O" and chosen.blocks == chosen.saved_bytes == 0
    assert any("H2O takes about" in line for line in plan.as_lines(chosen))
    short = plan_of(place, "Too short for any block.", dtype="f32")
    assert short.blocks == 0 and not short.whole  # 512 tokens are the reserve for an answer


def test_a_plan_tells_where_an_answer_scans_the_keys_and_for_how_long(place):
    text = (place / "book.txt").read_text()
    planned = plan_of(place, text)
    assert planned.scan is not None
    [line] = [line for line in plan.as_lines(planned) if line.startswith("lookup ")]
    assert "of keys per token of an answer" in line and "by estimate" in line
    told = plan.to_json(planned)["scan"]
    assert (told["place"], told["bytes"]) == (planned.scan.place.value, planned.scan.bytes)
    assert told["estimated_seconds"].keys() >= {"host"}
    without = plan_of(place, text, sizes={"policy": Policy.H2O})
    assert not any(line.startswith("lookup ") for line in plan.as_lines(without))


def test_a_plan_loads_no_weights(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    header = int.from_bytes(weights.read_bytes()[:8], "little")
    data = bytearray(weights.read_bytes())
    data[8 + header :] = bytes(len(data) - 8 - header)
    weights.write_bytes(data)
    code = (
        "import sys, torch, infllm_cli.models.loading as l\n"
        "l._from_folder = None\n"
        "from infllm_cli.cli import app\n"
        f"app(['plan', {str(place / 'book.txt')!r}, '--model', {str(tmp_path / 'model')!r}, "
        f"'--cache-dir', {str(tmp_path / 'cache')!r}, '--json', '-q'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stderr == b"", done.stderr.decode()
    told = json.loads(done.stdout)
    assert told["tokens"] > 1000 and told["blocks"] > 10
    assert told["reading"] == {"tokens_per_second": None, "seconds": None}
    assert {p["policy"]: p["fits"] for p in told["policies"]}["InfLLM"] is True


def test_the_time_is_that_of_the_speed_measured_last(place, monkeypatch):
    text = (place / "book.txt").read_text()
    monkeypatch.setattr(plan.machine, "available_memory", lambda: 64_000_000_000)
    before = plan_of(place, text)
    assert before.seconds is None
    assert any("not measured yet" in line for line in plan.as_lines(before))
    speeds.remember(place / "cache", "model", "cpu", "float32", 5000, 10.0)
    after = plan_of(place, text)
    assert after.tokens_per_second == 500.0 and after.seconds == after.tokens / 500
    assert any("at 500 tokens/s" in line for line in plan.as_lines(after))
    assert plan_of(place, text, dtype="bf16").seconds is None


def test_what_does_not_fit_is_said(place, monkeypatch):
    text = (place / "book.txt").read_text()
    monkeypatch.setattr(machine, "available_memory", lambda: 700_000_000)
    planned = plan_of(place, text)
    assert planned.fits(planned.needs[-1])
    monkeypatch.setattr(machine, "available_memory", lambda: 500_000_000)
    planned = plan_of(place, text)
    assert not planned.fits(planned.needs[-1])
    assert any("does not fit" in line for line in plan.as_lines(planned))


def test_a_long_document_is_estimated_and_says_so(place, monkeypatch):
    text = prose(60_000)
    exact = plan_of(place, text)
    monkeypatch.setattr(budget, "MOST_COUNTED_CHARS", 50_000)
    monkeypatch.setattr(budget, "_SAMPLE_CHARS", 200)
    about = plan_of(place, text)
    assert about.estimated and not exact.estimated
    assert abs(about.tokens / exact.tokens - 1) < 0.05
    assert "about" in plan.as_lines(about)[0]


def test_a_model_that_is_not_here_is_not_fetched_for_a_plan(place):
    document = decode_document(b"text", "text")
    with pytest.raises(ModelError, match="infllm model pull org/name"):
        plan.plan_document(document, model="org/name", cache_dir=place / "cache")


# --- calculator ----------------------------------------------------------------------------------


def test_the_calculator_prints_the_table_of_the_facts():
    plans = [plan.plan_shape(80, 8, 128, tokens) for tokens in plan.TABLE_TOKENS]
    text = plan.render(plans, as_json=False)
    assert [line.split()[:3] for line in text.splitlines()[1:]] == [
        ["4,096", "1.3", "GB"],
        ["32,768", "10.7", "GB"],
        ["128,000", "41.9", "GB"],
        ["1,000,000", "327.7", "GB"],
    ]
    told = json.loads(plan.render(plans, as_json=True))
    assert [one["policies"][0]["device_bytes"] for one in told] == [
        327_680 * tokens for tokens in plan.TABLE_TOKENS
    ]
    assert plan.plan_shape(80, 8, 128, 1000, dtype="f32").needs[0].device_bytes == 655_360_000


def test_the_table_of_the_readme_is_the_calculators():
    plans = [plan.plan_shape(80, 8, 128, tokens) for tokens in plan.TABLE_TOKENS]
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    table = "".join(f"    {line}\n" for line in plan.render(plans, as_json=False).splitlines())
    assert "$ infllm plan --layers 80 --kv-heads 8 --head-dim 128\n" + table in readme


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ((80, None, 128, 10), "--kv-heads"),
        ((None, None, 128, 10), "--layers and --kv-heads"),
        ((80, 0, 128, 10), "--kv-heads is 0"),
        ((80, 8, 128, 0), "--tokens is 0"),
    ],
)
def test_a_figure_that_is_missing_or_impossible_is_named(figures, says):
    with pytest.raises(UsageError, match=says):
        plan.plan_shape(*figures)


# --- limits --------------------------------------------------------------------------------------


def test_a_document_above_the_limit_is_refused_before_it_is_read():
    reader = make_reader()
    document = decode_document(prose(6000).encode(), "log")
    open_ = {"allow_whole": False, "reserve_tokens": 64}
    needed = reader.open(document, **open_)
    for _ in reader.read_steps(needed):
        pass
    host = needed.state.host_bytes
    assert reader.open(document, room=Room(host), **open_)
    with pytest.raises(CapacityError, match=r"log: .* tokens take .*--host-limit"):
        reader.open(document, room=Room(host - 1), **open_)


def test_a_document_far_above_the_limit_is_refused_before_it_is_tokenized(monkeypatch):
    reader = make_reader()
    document = decode_document(prose(60_000).encode(), "log")
    monkeypatch.setattr(budget, "MOST_COUNTED_CHARS", 50_000)
    monkeypatch.setattr(budget, "_SAMPLE_CHARS", 100)
    longest = []
    encode = reader.prompt.tokenizer.encode
    monkeypatch.setattr(
        reader.prompt.tokenizer, "encode", lambda text: longest.append(len(text)) or encode(text)
    )
    with pytest.raises(CapacityError):
        reader.open(document, room=Room(1_000_000))
    assert max(longest) <= 100


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("1000", 1000),
        ("16GB", 16 * 10**9),
        ("1.5 gb", 1_500_000_000),
        ("2GiB", 2**31),
        ("500M", 5 * 10**8),
        ("3k", 3000),
        ("7 b", 7),
    ],
)
def test_sizes_are_read_as_they_are_written(text, bytes_):
    assert machine.parse_size(text, "--host-limit") == bytes_


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "ten", "1 PB", "1iB", "1e9"])
def test_what_is_no_size_is_refused_by_its_flag(text):
    with pytest.raises(UsageError, match="--host-limit"):
        machine.parse_size(text, "--host-limit")


def test_the_machine_tells_what_is_free(tmp_path, monkeypatch):
    assert machine.available_memory() > 0
    assert machine.free_disk(tmp_path / "not" / "there" / "yet") > 0
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.available_memory() == 2000


# --- speeds --------------------------------------------------------------------------------------


def test_speeds_are_kept_per_model_device_and_dtype(tmp_path):
    speeds.remember(tmp_path, "m", "cpu", "float32", 1000, 2.0)
    speeds.remember(tmp_path, "m", "cuda", "float32", 1000, 1.0)
    speeds.remember(tmp_path, "m", "cpu", "float32", 1000, 4.0)
    speeds.remember(tmp_path, "m", "cpu", "float32", speeds.LEAST_TOKENS - 1, 1e-3)
    assert speeds.last_speed(tmp_path, "m", "cpu", "float32") == 250
    assert speeds.last_speed(tmp_path, "m", "cuda", "float32") == 1000
    assert speeds.last_speed(tmp_path, "n", "cpu", "float32") is None
    assert [path.name for path in tmp_path.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"m cpu float32": "fast"}'])
def test_a_broken_file_of_speeds_costs_an_estimate(tmp_path, content):
    (tmp_path / "speeds.json").write_text(content)
    assert speeds.last_speed(tmp_path, "m", "cpu", "float32") is None
    speeds.remember(tmp_path, "m", "cpu", "float32", 1000, 1.0)
    assert speeds.last_speed(tmp_path, "m", "cpu", "float32") == 1000


def test_speeds_that_cannot_be_written_cost_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    speeds.remember(tmp_path / "file", "m", "cpu", "float32", 1000, 1.0)


# --- limits --------------------------------------------------------------------------------------


def test_a_plan_tells_what_lies_on_disk_and_whether_the_limits_hold_it(place, monkeypatch):
    text = prose(40_000)
    roomy = Limits(10**12, None, 10**12, save=False)
    full = {"sizes": {"codec": Codec.FULL}}
    free = plan_of(place, text, limits=roomy, **full).needs[-1]
    assert free.disk_bytes == 0 and free.host_bytes > 4_000_000
    limits = replace(roomy, host=3_000_000)
    [*_, need] = plan_of(place, text, limits=limits, **full).needs
    assert (need.host_bytes, need.disk_bytes) == (3_000_000, free.host_bytes - 3_000_000)
    saved = plan_of(place, text, limits=replace(limits, save=True), **full)
    assert saved.fits(saved.needs[-1]) and saved.needs[-1].host_bytes == 3_000_000
    assert saved.saved_bytes == saved.needs[-1].disk_bytes > free.host_bytes
    assert any("kept for the next question" in line for line in plan.as_lines(saved))
    for harm in ({"host": 300_000}, {"disk": 1_000_000}):
        refused = plan_of(place, text, limits=replace(limits, **harm), **full)
        assert not refused.fits(refused.needs[-1]), harm
    over = plan_of(place, text, limits=replace(roomy, save=True, budget=1000), **full)
    assert over.saved_bytes == 0 and over.fits(over.needs[-1])
