"""What RAM and disk do not hold as usual is stored in fewer bits, or refused before it is read."""

import json
from dataclasses import replace

import pytest
from test_saved import CONFIG, OPTIONS, ROOMY, begin
from tiny_folder import save_folder
from tiny_readers import make_reader
from tiny_tokenizers import prose

from infllm_cli import budget, plan
from infllm_cli.budget import LayerShape
from infllm_cli.capacity import Capacity, Room
from infllm_cli.document import decode_document
from infllm_cli.errors import CapacityError
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Policy
from infllm_cli.shelf import Shelf

LAYERS = [LayerShape(3, 64, 64)] * 4
CONTEXT = 200_000
INT8 = MemoryConfig()
INT4 = replace(INT8, codec=Codec.INT4)


def bytes_of(config: MemoryConfig) -> int:
    return budget.of_policy(LAYERS, 2, config, CONTEXT).host_peak_bytes


def capacity(host: int, disk: int = 0, **settings: bool) -> Capacity:
    return Capacity(LAYERS, 2, Room(host, disk, denser=True, **settings))


def test_what_fits_as_usual_is_stored_as_usual():
    for room in (capacity(bytes_of(INT8)), capacity(bytes_of(INT8) // 2, bytes_of(INT8))):
        assert room.choose(INT8, CONTEXT) is INT8
        room.check("book", INT8, 0, CONTEXT)


def test_disk_comes_before_fewer_bits_and_fewer_bits_before_a_refusal():
    least = budget.least_host_bytes(LAYERS, 2, INT8)
    between = (bytes_of(INT8) + bytes_of(INT4)) // 2
    for room in (capacity(between), capacity(least, between - least)):
        assert room.choose(INT8, CONTEXT) == INT4
        room.check("book", INT4, 0, CONTEXT)
        with pytest.raises(CapacityError, match=r"book: .* 200,000 tokens take .* as int8"):
            room.check("book", INT8, 0, CONTEXT)


def test_what_fits_in_no_form_is_refused_with_the_usual_one():
    room = capacity(bytes_of(INT4) // 2)
    assert room.choose(INT8, CONTEXT) is INT8
    with pytest.raises(CapacityError, match="as int8; the limits are"):
        room.check("book", INT8, 10, CONTEXT)
    room.check("book", INT4, 0, CONTEXT, estimated=True)  # twice as much may be an error of ours


def test_what_may_be_dropped_is_stored_in_fewer_bits_so_that_less_of_it_is():
    room = capacity(bytes_of(INT4) // 2, may_drop=True)
    assert room.choose(INT8, CONTEXT) == INT4
    room.check("book", INT4, 0, CONTEXT)


def test_what_is_chosen_by_hand_stays_and_what_has_no_blocks_too():
    tight = Room(bytes_of(INT4))
    assert Capacity(LAYERS, 2, tight).choose(INT8, CONTEXT) is INT8
    config = MemoryConfig(policy=Policy.STREAMING_LLM)
    assert capacity(1).choose(config, CONTEXT) is config


def test_such_a_memory_is_read_as_planned_and_answers(tmp_path):
    usual = replace(CONFIG, codec=Codec.INT8)
    reader = make_reader(config=usual)
    document = decode_document(prose(3000).encode(), "book")
    sizes = [_host_bytes(make_reader(config=c), document) for c in (usual, _int4(usual))]
    memory = reader.open(document, allow_whole=False, room=Room(sum(sizes) // 2, denser=True))
    assert memory.is_denser(reader)
    for _ in reader.read_steps(memory):
        assert memory.state.host_bytes <= sum(sizes) // 2
    same = begin(make_reader(config=_int4(usual)), tmp_path, prose(3000), ROOMY)
    for _ in make_reader(config=_int4(usual)).read_steps(same.memory):
        pass
    answers = [reader.ask(m, "Who?", OPTIONS) for m in (memory, same.memory)]
    assert answers[0].text == answers[1].text
    same.close()


def _int4(config: MemoryConfig) -> MemoryConfig:
    return replace(config, codec=Codec.INT4)


def _host_bytes(reader, document) -> int:
    memory = reader.open(document, allow_whole=False)
    layers = [LayerShape(g.kv_heads, g.head_dim, g.value_dim) for g in reader.loaded.layers]
    context = memory.prefix_tokens + len(memory.tokens)
    return budget.of_policy(layers, 4, reader.config, context).host_peak_bytes


# --- the commands --------------------------------------------------------------------------------


def test_the_commands_say_it_and_keep_such_a_memory_under_a_key_of_its_own(server, tmp_path):
    save_folder(tmp_path / "model")
    (tmp_path / "book.txt").write_text(prose(60_000))
    model = ["--model", tmp_path / "model", "--dtype", "f32"]
    common = [tmp_path / "book.txt", *model, "--cache-dir", tmp_path / "cache"]
    told = {}
    for store in ("int8", "int4"):
        run = server.run(["plan", *common, "--no-save", "--store", store, "--json"])
        need = json.loads(run.stdout)["policies"][-1]
        told[store] = need["host_bytes"] + need["host_reading_bytes"]
    limit = ["--host-limit", (told["int8"] + told["int4"]) // 2, "--disk-limit", "0"]
    planned = server.run(["plan", *common, *limit])
    assert b"store     as int4" in planned.stdout
    assert json.loads(server.run(["plan", *common, *limit, "--json"]).stdout)["stored_denser"]
    asked = server.run(
        ["ask", *common, "Who?", *limit, "--json", "--answering", "memory", "--max-tokens", 3]
    )
    memory = json.loads(asked.stdout)["memory"]
    assert memory["stored_denser"] and memory["config"]["codec"] == "int4"
    assert asked.stderr.count(b"it is stored as int4") == 1
    refused = server.run(["ask", *common, "Who?", *limit, "--store", "int8"])
    assert refused.returncode == 5 and b"as int8" in refused.stderr
    roomy = server.run(["read", *common, "--json", "-q"])
    assert not json.loads(roomy.stdout)["memory"]["stored_denser"]
    assert len(Shelf(tmp_path / "cache" / "memories").entries()) == 1  # the other was not kept


def test_a_plan_counts_what_is_stored(tmp_path):
    save_folder(tmp_path / "model")
    document = decode_document(prose(60_000).encode(), "text")
    settings = {
        "model": str(tmp_path / "model"),
        "cache_dir": tmp_path / "cache",
        "dtype": "f32",
        "denser": True,
    }
    need = {
        codec: plan.plan_document(document, sizes={"codec": codec}, **settings).needs[-1]
        for codec in (Codec.INT8, Codec.INT4)
    }
    between = sum(n.host_peak_bytes for n in need.values()) // 2
    limits = replace(ROOMY, host=between, disk=0, save=False)
    found = plan.plan_document(document, sizes={}, limits=limits, **settings)
    assert found.denser and found.needs[-1].host_bytes == need[Codec.INT4].host_bytes
    assert found.fits(found.needs[-1])
