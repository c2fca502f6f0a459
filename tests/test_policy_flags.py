"""--policy and the knobs on the commands: what is read, what is saved, what is said."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_saved import CONFIG, ROOMY, begin
from tiny_folder import save_folder
from tiny_readers import SMALL, make_reader
from tiny_tokenizers import prose

from infllm_cli.document import decode_document
from infllm_cli.identity import key_facts, key_of
from infllm_cli.memory.config import FLAGS, MemoryConfig
from infllm_cli.memory.knobs import Policy, Positions
from infllm_cli.reader import Reader
from infllm_cli.sampling import Answering, AnswerOptions

ASK = ["--max-tokens", "3", "--dtype", "f32"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(6000))
    return folder


def common(place):
    return ["--model", place / "model", "--cache-dir", place / "cache"]


def told(done):
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.mark.parametrize("policy", [p for p in Policy if not p.has_blocks])
def test_every_policy_answers_alone_and_says_that_it_is_not_saved(server, place, policy):
    flags = ["--policy", policy.value, "--save", "--json", *ASK, *common(place)]
    done = server.run(["ask", place / "book.txt", "Who is it?", *flags])
    found = told(done)
    assert found["memory"]["config"]["policy"] == policy.value
    assert found["read"]["tokens"] == found["document"]["tokens"] > 1000
    assert found["answers"][0]["reread"] == [] and found["answers"][0]["quote"] is None
    assert found["memory"]["saved"] is None and found["memory"]["blocks"] == 0
    assert f"--policy {policy.value} keeps is not saved" in done.stderr.decode()


def test_a_policy_comes_from_the_environment_and_the_config_file(server, place, tmp_path):
    ask = ["ask", place / "book.txt", "Who?", "--json", *ASK, *common(place)]
    found = told(server.run(ask, env={"INFLLM_POLICY": "h2o", "INFLLM_BLOCK": "32"}))
    config = found["memory"]["config"]
    assert (config["policy"], config["block_tokens"]) == ("h2o", 32)
    (tmp_path / "infllm").mkdir()
    (tmp_path / "infllm" / "config.toml").write_text('policy = "streaming-llm"\nblock = 40\n')
    found = told(server.run(ask, env={"XDG_CONFIG_HOME": str(tmp_path)}))
    config = found["memory"]["config"]
    assert (config["policy"], config["block_tokens"]) == ("streaming-llm", 40)
    (tmp_path / "infllm" / "config.toml").write_text('policy = "best"\n')
    done = server.run(ask, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert done.returncode == 2 and "policy is 'best'" in done.stderr.decode()


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["--block", "32"], "block_tokens", 32),
        (["--representatives", "16"], "representatives_per_block", 16),
        (["--representative-rule", "exemplar"], "representative_rule", "exemplar"),
        (["--relevance", "mass"], "relevance", "mass"),
        (["--sharing", "layer"], "sharing", "layer"),
        (["--positions", "same-distance"], "positions", "same-distance"),
        (["--read-lookup", "exact"], "read_lookup", "exact"),
        (["--answer-lookup", "representatives"], "answer_lookup", "representatives"),
        (["--device-cache", "9", "--device-cache-policy", "lru-s"], "device_cache_blocks", 9),
    ],
)
def test_every_knob_reaches_the_memory(server, place, flags, name, value):
    ask = ["ask", place / "book.txt", "Who?", "--json", "--answering", "memory"]
    found = told(server.run([*ask, *flags, "--window", "256", *ASK, *common(place)]))
    assert found["memory"]["config"][name] == value
    assert found["memory"]["config"]["policy"] == "infllm" and found["memory"]["blocks"] > 0
    assert (found["memory"]["device_cache"] is not None) == ("--device-cache" in flags)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--block", "31"], "--block"),
        (["--block", "257"], "less than or equal to 256"),
        (["--representatives", "17"], "less than or equal to 16"),
        (["--policy", "best"], "streaming-llm"),
        (["--device-cache", "1"], "--device-cache is 1"),
    ],
)
def test_values_out_of_range_are_refused(server, place, flags, said):
    done = server.run(["ask", place / "book.txt", "Who?", *flags, *common(place)])
    assert done.returncode == 2 and said in done.stderr.decode()


def test_what_cannot_be_kept_is_not_read_to_be_kept(server, place):
    done = server.run(["read", place / "book.txt", "--policy", "dense", *common(place)])
    assert done.returncode == 2 and "--policy dense keeps nothing" in done.stderr.decode()


@pytest.mark.parametrize("policy", ["streaming-llm", "infllm-paper"])
def test_a_conversation_and_a_summary_work_with_any_policy(server, place, policy):
    flags = ["--policy", policy, "--dtype", "f32", *common(place)]
    done = server.run(
        ["chat", place / "book.txt", "--max-tokens", "2", *flags], input=b"Who?\n/stats\nWhere?\n"
    )
    assert done.returncode == 0, done.stderr.decode()
    assert ("blocks per layer" in done.stderr.decode()) == (policy == "infllm-paper")
    done = server.run(["summarize", place / "book.txt", "--length", "short", *flags])
    assert done.returncode == 0 and done.stdout, done.stderr.decode()


# --- saved memories ------------------------------------------------------------------------------


def test_the_published_method_is_saved_under_a_key_of_its_own(tmp_path):
    sizes = {n: getattr(CONFIG, n) for n in FLAGS if n != "read_blocks"}
    paper = MemoryConfig(policy=Policy.INFLLM_PAPER, segment_blocks=6, codec=CONFIG.codec, **sizes)
    loaded = make_reader().loaded
    options = AnswerOptions(max_tokens=4, answering=Answering.MEMORY)
    answers, reused = [], []
    for config in (CONFIG, paper, paper, CONFIG):
        reader = Reader(loaded, config)
        read = begin(reader, tmp_path, prose(3000), ROOMY)
        reused.append(read.memory.reused_tokens > 0)
        for _ in reader.read_steps(read.memory):
            read.keeper.chunk_read()
        read.keeper.finish()
        answers.append(reader.ask(read.memory, "Who is it?", options).text)
        read.close()
    assert reused == [False, False, True, True]
    assert answers[0] == answers[3] and answers[1] == answers[2]


def test_the_key_of_a_memory_is_as_it_was_before_there_were_knobs(tmp_path):
    def key(config: MemoryConfig) -> str:
        reader = make_reader(config=config)
        memory = reader.open(decode_document(b"text", "a"), allow_whole=False)
        return key_of(key_facts(reader, memory, tmp_path, lambda *_: None))

    reader = make_reader()
    memory = reader.open(decode_document(b"text", "a"), allow_whole=False)
    facts = key_facts(reader, memory, tmp_path, lambda *_: None)
    assert set(facts["config"]) == {
        "sink_tokens",
        "window_tokens",
        "block_tokens",
        "chunk_tokens",
        "read_blocks",
        "representatives_per_block",
        "segment_blocks",
        "read_lookup",
        "codec",
    }
    same = replace(SMALL, device_cache_blocks=5, answer_blocks=4)
    assert key(same) == key(SMALL)
    assert key(replace(SMALL, positions=Positions.SAME_DISTANCE)) != key(SMALL)
