"""Gates of Infini-attention: fitted on text, kept beside the model, used by the policy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_folder import save_folder
from tiny_models import build
from tiny_readers import SMALL, make_reader, read_text
from tiny_tokenizers import prose

from infllm_cli.errors import ModelError, UsageError
from infllm_cli.fitting import FitOptions, Fitted, Fitting, SegmentDone, _SegmentCall
from infllm_cli.gates import BETA, choose_gates, load_gates, save_gates
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import InfiniGates, Policy
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.step import Phase
from infllm_cli.models.probe import probe_layers
from infllm_cli.policies.compressive import Memory
from infllm_cli.policies.infini import InfiniLayer

SEGMENT = 24
CONFIG = MemoryConfig(
    policy=Policy.INFINI,
    sink_tokens=4,
    window_tokens=48,
    block_tokens=16,
    chunk_tokens=SEGMENT,
    answer_blocks=2,
    infini_segment_tokens=SEGMENT,
    codec=Codec.FULL,
)


def repeating(tokens: int, seed: int = 0) -> np.ndarray:
    """Ids [n]: what stood in one segment stands again in the next, so that a memory helps."""
    generator = np.random.default_rng(seed)
    piece = generator.integers(3, 150, SEGMENT)
    return np.concatenate([piece] * (tokens // SEGMENT + 1))[:tokens]


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "ministral3", "glm4", "phi3 partial"])
def test_a_fit_sees_what_reading_computes(kind) -> None:
    """The last logits of every segment, against the layers that read."""
    model = build(kind)
    layers = probe_layers(model)
    ids = torch.from_numpy(repeating(5 * SEGMENT))
    gates = torch.rand(len(layers), layers[0].heads, generator=torch.Generator().manual_seed(2))
    state = ModelMemory(layers, CONFIG, trained_length=512, gates=gates)
    assert any(isinstance(layer, InfiniLayer) for layer in state.layers)
    memories = [Memory.empty(g.kv_heads, g.head_dim, g.value_dim, g.device) for g in layers]
    from infllm_cli.attention import ARGUMENT, MemoryCall, forward

    for start in range(0, len(ids), SEGMENT):
        piece = ids[start : start + SEGMENT]
        step = state.step(Phase.READ, SEGMENT)
        with torch.inference_mode():
            expected = forward(model, piece, MemoryCall(state, step), want_logits=1)[0]
        state.finish(step)
        call = _SegmentCall(layers, memories, gates, CONFIG.infini_update)
        zeros = torch.zeros(1, SEGMENT, dtype=torch.long)
        found = model(
            input_ids=piece[None], position_ids=zeros, use_cache=False, **{ARGUMENT: call}
        )
        memories = [
            memory if added is None else memory.plus(added)
            for memory, added in zip(memories, call.added, strict=True)
        ]
        if start == 0 or kind != "gemma3_text":  # sliding layers look back over the border
            torch.testing.assert_close(found.logits[0, -1], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mistral sliding"])
def test_fitting_trains_the_gates_and_nothing_else(kind) -> None:
    model = build(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = probe_layers(model)
    options = FitOptions(epochs=6, learning_rate=0.3)
    fitting = Fitting(model, layers, CONFIG, [repeating(12 * SEGMENT)], options)
    *events, fitted = fitting.steps()
    assert isinstance(fitted, Fitted) and all(isinstance(e, SegmentDone) for e in events)
    assert fitted.segments == (9, 3)
    assert fitted.beta.shape == (len(layers), layers[0].heads)
    sliding = [
        i for i, g in enumerate(layers) if g.sliding_window is not None and kind == "gemma3_text"
    ]
    gated = [i for i in range(len(layers)) if i not in sliding]
    assert bool((fitted.beta[gated] != -3).any()) and bool((fitted.beta[sliding] == -3).all())
    assert fitted.trained["fitted"] < fitted.trained["off"], "what was seen is told better"
    assert fitted.losses.keys() == {"off", "half", "fitted"}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    again = list(Fitting(model, layers, CONFIG, [repeating(12 * SEGMENT)], options).steps())[-1]
    assert torch.equal(again.beta, fitted.beta), "the same text, the same gates"


def test_each_document_has_a_memory_of_its_own_and_short_ones_are_refused() -> None:
    model = build("llama")
    layers = probe_layers(model)
    texts = [repeating(5 * SEGMENT), repeating(2 * SEGMENT), repeating(4 * SEGMENT + 3)]
    fitting = Fitting(model, layers, CONFIG, texts, FitOptions(most_tokens=10_000))
    assert fitting.trained == [4, 0, 3]
    *events, fitted = fitting.steps()
    assert fitted.segments == (7, 2)
    steps = [event for event in events if event.stage == "fitting the gates"]
    assert [event.loss is None for event in steps] == [True, *[False] * 3, True, *[False] * 2]
    with pytest.raises(UsageError, match="at least 72 tokens"):
        Fitting(model, layers, CONFIG, [repeating(2 * SEGMENT)], FitOptions())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"epochs": 0}, "--epochs is 0"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
        ({"most_tokens": 0}, "--most-tokens is 0"),
    ],
)
def test_what_fits_nothing_is_refused(options, flag) -> None:
    with pytest.raises(UsageError, match=flag):
        FitOptions(**options)


def test_gates_come_from_the_file_of_the_weights_or_are_off_and_it_is_said(tmp_path) -> None:
    sizes = {n: getattr(SMALL, n) for n in ("sink_tokens", "window_tokens", "block_tokens")}
    config = MemoryConfig(
        policy=Policy.INFINI, chunk_tokens=32, answer_blocks=2, infini_segment_tokens=64, **sizes
    )
    reader = make_reader(config=config)
    assert reader.gates.weights is None and "fit-gates" in reader.gates.told
    loaded = reader.loaded
    loaded.cache_dir, loaded.folder = tmp_path / "cache", tmp_path / "model"
    save_folder(loaded.folder)
    assert choose_gates(loaded, config).weights is None
    from infllm_cli.gates import gates_path

    path = gates_path(loaded, loaded.cache_dir)
    shape = (len(loaded.layers), loaded.layers[0].heads)
    beta = torch.randn(shape)
    save_gates(path, beta, {"documents": "a.txt", "segment": 32})
    found = choose_gates(loaded, config)
    assert torch.equal(found.weights, torch.sigmoid(beta)) and found.path == path
    assert "fitted on a.txt" in found.told and "of 32 tokens; these are of 64" in found.told
    assert load_gates(path, shape)[1]["segment"] == "32"
    off = choose_gates(loaded, replace(config, infini_gates=InfiniGates.OFF))
    half = choose_gates(loaded, replace(config, infini_gates=InfiniGates.HALF))
    assert off.weights is None and bool((half.weights == 0.5).all())
    assert choose_gates(loaded, SMALL).told == "" and choose_gates(loaded, SMALL).as_dict() is None
    save_gates(path, torch.zeros(1, 2), {})
    with pytest.raises(ModelError, match="run `infllm fit-gates` again"):
        choose_gates(loaded, config)
    path.write_bytes(b"broken")
    with pytest.raises(ModelError, match="cannot be read"):
        choose_gates(loaded, config)


def test_gates_decide_what_is_answered() -> None:
    config = replace(CONFIG, infini_gates=InfiniGates.OFF)
    reader = make_reader(config=config)
    texts = [prose(1500), prose(1500)[::-1][:700] + prose(1500)[-800:]]
    ids = torch.arange(3, 9)

    def logits(gates: InfiniGates) -> list[torch.Tensor]:
        reader.gates = choose_gates(reader.loaded, replace(config, infini_gates=gates))
        found = []
        for text in texts:
            memory = read_text(reader, text)
            found.append(reader.forward(memory.state, Phase.ASK, ids, want_logits=True)[1])
        return found

    off, half = logits(InfiniGates.OFF), logits(InfiniGates.HALF)
    assert not torch.equal(off[0], half[0])


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fit")
    save_folder(folder / "model")
    (folder / "book.txt").write_text(prose(3000))
    return folder


def test_the_command_fits_tells_losses_and_asking_uses_the_file(server, place) -> None:
    where = ["--model", place / "model", "--cache-dir", place / "cache", "--dtype", "f32"]
    before = server.run(
        ["ask", place / "book.txt", "Who?", "--policy", "infini", "--max-tokens", "2", *where]
    )
    assert (
        before.returncode == 0 and "no gates have been fitted for model" in before.stderr.decode()
    )
    done = server.run(["fit-gates", place / "book.txt", "--infini-segment", "64", *where])
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert [line[:16].strip() for line in lines] == [
        "nats per token",
        "memory off",
        "gates at 0.5",
        "gates fitted",
        "segments",
    ]
    written = list((place / "cache" / "gates").iterdir())
    assert len(written) == 1 and written[0].suffix == ".safetensors"
    assert str(written[0]) in done.stderr.decode().replace("\n", "")
    told = server.run(
        ["fit-gates", place / "book.txt", "--infini-segment", "64", "--json", "-q", *where]
    )
    facts = json.loads(told.stdout)
    assert facts["file"] == str(written[0]) and facts["loss"].keys() == {"off", "half", "fitted"}
    assert told.stderr.decode() == ""
    ask = ["ask", place / "book.txt", "Who?", "--policy", "infini", "--max-tokens", "2", "--json"]
    asked = server.run([*ask, "--infini-segment", "64", *where])
    assert "fitted on" in asked.stderr.decode() and "book.txt" in asked.stderr.decode()
    gates = json.loads(asked.stdout)["memory"]["gates"]
    assert gates["file"] == str(written[0]) and 0 < gates["mean"] < 1
    beta, _ = load_gates(written[0], np.array(facts["gates"]).shape)
    torch.testing.assert_close(torch.sigmoid(beta), torch.tensor(facts["gates"]))
    assert BETA == "beta"


def test_other_policies_have_no_gates_to_fit(server, place) -> None:
    done = server.run(["fit-gates", "--policy", "h2o", place / "book.txt"])
    assert done.returncode == 2 and "--policy h2o has no gates" in done.stderr.decode()
