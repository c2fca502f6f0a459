"""Every architecture through our memory gives the library's own logits; others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, COMMON, VARIANTS, build
from tiny_tokenizers import backend_of
from torch import Tensor, nn

from infllm_cli import attention
from infllm_cli.attention import MemoryCall, forward
from infllm_cli.errors import ModelError
from infllm_cli.memory import layer_memory as layer_module
from infllm_cli.memory import sliding as sliding_module
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.rotary import Rotary
from infllm_cli.memory.sliding import windows_only
from infllm_cli.memory.softmax import attend
from infllm_cli.memory.step import Phase
from infllm_cli.models import selftest
from infllm_cli.models.loading import LoadedModel, load_model
from infllm_cli.models.probe import probe_layers
from infllm_cli.models.selftest import self_test, vouch

TOKENS = 70
# Logits are about +-1. What a mistake changes is a thousand times more than what rounding does.
EQUAL = 1e-5
DIFFERENT = 1e-3

KINDS = [*ARCHITECTURES, *VARIANTS]


@pytest.fixture(scope="module", params=KINDS)
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """A model, token ids, and the logits that the library's own eager attention gives."""
    model = build(request.param)
    ids = torch.randint(3, 160, (TOKENS,), generator=torch.Generator().manual_seed(0))
    yield model, ids, library_logits(model, ids)


def library_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [V] of the last token."""
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        try:
            return model(ids[None], use_cache=False).logits[0, -1].float()
        finally:
            model.set_attn_implementation(attention.NAME)


def geometry(model: nn.Module, tokens: int = TOKENS) -> list[LayerGeometry]:
    """As `Reader.open` has it for a context of so many tokens."""
    return LoadedModel("tiny", model, None, 512, probe_layers(model)).layers_for(tokens)


def our_logits(
    model: nn.Module,
    ids: Tensor,
    chunk: int,
    layers: list[LayerGeometry] | None = None,
    whole_tokens: int = 512,
) -> Tensor:
    config = MemoryConfig(chunk_tokens=chunk)
    memory = ModelMemory(
        layers or geometry(model), config, trained_length=512, whole_tokens=whole_tokens
    )
    logits = None
    for piece in ids.split(chunk):
        step = memory.step(Phase.READ, len(piece))
        last = step.end == len(ids)
        with torch.inference_mode():
            logits = forward(model, piece, MemoryCall(memory, step), want_logits=int(last))
        memory.finish(step)
    assert logits is not None
    return logits[0]


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("chunk", [1, 7, 64, TOKENS])
def test_memory_gives_the_librarys_logits(
    subject: tuple[nn.Module, Tensor, Tensor], chunk: int
) -> None:
    model, ids, expected = subject
    assert 0.3 <= float(expected.std()) <= 1
    assert difference(our_logits(model, ids, chunk), expected) < EQUAL


def test_tiers_change_nothing_before_the_window_overflows(
    subject: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, ids, expected = subject
    assert difference(our_logits(model, ids, 16, whole_tokens=0), expected) < EQUAL


def test_a_wrong_pairing_of_dimensions_would_be_seen(
    subject: tuple[nn.Module, Tensor, Tensor],
) -> None:
    model, ids, expected = subject
    wrong = [
        replace(layer, rotary=replace(layer.rotary, interleaved=not layer.rotary.interleaved))
        for layer in geometry(model)
    ]
    assert difference(our_logits(model, ids, 16, wrong), expected) > DIFFERENT


def test_a_lost_key_would_be_seen(
    subject: tuple[nn.Module, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, expected = subject

    def forgetful(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
        **how: bool,
    ) -> Tensor:
        lost = k.shape[1] - q.shape[1] - 1  # the token just before the step
        if lost < 0 or mask is None:
            return attend(q, k, v, mask, scaling, softcap, **how)
        kept = [key for key in range(k.shape[1]) if key != lost]
        return attend(q, k[:, kept], v[:, kept], mask[:, kept], scaling, softcap)

    for module in (layer_module, sliding_module):
        monkeypatch.setattr(module, "attend", forgetful)
    assert difference(our_logits(model, ids, 16), expected) > DIFFERENT


def test_a_model_that_slides_everywhere_has_its_window_as_trained_length() -> None:
    assert windows_only(geometry(build("mistral sliding"))) == 160
    assert windows_only(geometry(build("gemma3_text"))) is None
    assert windows_only(geometry(build("llama"))) is None


def test_layers_of_one_kind_share_one_rotary() -> None:
    kinds = {id(layer.rotary) for layer in geometry(build("gemma3_text"))}
    assert len(kinds) == 2
    assert len({id(layer.rotary) for layer in geometry(build("llama"))}) == 1


def test_long_contexts_take_the_long_factors() -> None:
    short, long = geometry(build("phi3"), 20)[0], geometry(build("phi3"), 70)[0]
    assert not torch.equal(short.rotary.inv_freq, long.rotary.inv_freq)


# --- refusals ----------------------------------------------------------------------------------

SMALL: dict[str, Any] = {**COMMON, "num_hidden_layers": 2}
MLA = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
REFUSED_BY_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({"n_embd": 48, "n_head": 6, "n_layer": 2}, "no rotary positions"),
    "t5": ({"d_model": 48}, "encoder-decoder"),
    "deepseek_v2": (MLA, "multi-head latent attention"),
    "deepseek_v3": (MLA, "multi-head latent attention"),
    "mamba": ({}, "no rotary positions"),
    "jamba": ({}, "no rotary positions"),
    "qwen3_next": ({"head_dim": 16}, "layers of kind linear_attention"),
}


@pytest.mark.parametrize("kind", REFUSED_BY_CONFIG)
def test_refused_by_the_config_before_any_weight_is_loaded(kind: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    settings, reason = REFUSED_BY_CONFIG[kind]
    AutoConfig.for_model(kind, **{**SMALL, **settings}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        load_model(tmp_path, "mine", device="cpu", dtype="f32")
    assert "mine" in str(refusal.value) and "Known to work: Llama" in str(refusal.value)


def foreign(kind: str, **settings: object) -> nn.Module:
    """A tiny model of an architecture that we cannot read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    attention.register()
    config = AutoConfig.for_model(kind, **{**SMALL, **settings})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    return model.eval().requires_grad_(False)


def save(model: nn.Module, folder: Path) -> Path:
    """A model's folder, with a tokenizer."""
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend_of("byte_level"), eos_token="<|im_end|>"
    )
    tokenizer.save_pretrained(folder)
    return folder


def test_attention_with_sinks_of_its_own_is_refused(tmp_path: Path) -> None:
    model = foreign(
        "gpt_oss", head_dim=16, num_local_experts=2, num_experts_per_tok=1, vocab_size=700
    )
    with pytest.raises(ModelError, match=r"mine: .* its attention uses s_aux"):
        load_model(save(model, tmp_path), "mine", device="cpu", dtype="f32")


def test_positions_of_another_kind_are_refused() -> None:
    with pytest.raises(ModelError, match=r"its attention uses|no rotary positions|its own way"):
        probe_layers(foreign("gpt2", n_embd=48, n_head=6, n_layer=2))


def test_hybrid_layers_are_refused_by_the_probe() -> None:
    model = foreign(
        "bamba",
        attn_layer_indices=[1],
        mamba_n_heads=6,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_expand=2,
    )
    with pytest.raises(ModelError, match="layers 0 have no ordinary attention"):
        probe_layers(model)


def test_an_unknown_argument_of_the_attention_is_refused() -> None:
    model = build("llama")
    for layer in model.model.layers:
        old = layer.self_attn.forward
        layer.self_attn.forward = lambda *a, _old=old, **k: _old(*a, **{**k, "alibi": 1.0})
    with pytest.raises(ModelError, match="its attention uses alibi"):
        probe_layers(model)


# --- the self-test ------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Results of the self-tests that ran."""
    ran: list[float] = []

    def counting(model: nn.Module, layers: list[LayerGeometry]) -> float:
        ran.append(self_test(model, layers))
        return ran[-1]

    monkeypatch.setattr(selftest, "self_test", counting)
    return ran


def with_biased_keys() -> nn.Module:
    """Keys with a large bias lose most of their digits in half precision, as Qwen2's do."""
    model = build("qwen2").to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(30 * torch.randn(bias.shape, generator=generator))
    return model


def test_rounding_that_the_library_shows_too_is_no_fault() -> None:
    model = with_biased_keys()
    difference = self_test(model, probe_layers(model))
    assert difference > selftest.TOLERANCE[torch.bfloat16]


def test_a_wrong_position_is_found_among_such_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_biased_keys()
    layers = probe_layers(model)
    rotate = Rotary.rotate
    monkeypatch.setattr(Rotary, "rotate", lambda self, x, table: rotate(self, x, table).flip(-2))
    with pytest.raises(ModelError, match="differ from"):
        self_test(model, layers)


def test_a_passed_self_test_is_remembered(counted: list[float], tmp_path: Path) -> None:
    memo = tmp_path / "new folder" / "selftest.json"
    model = build("llama")
    for _ in range(3):
        vouch(model, probe_layers(model), memo)
    assert len(counted) == 1
    assert list(json.loads(memo.read_text()).values()) == counted
    assert counted[0] < 1e-4
    assert [path.name for path in memo.parent.iterdir()] == [memo.name]


def test_other_weights_of_the_same_kind_are_not_tested_again(
    counted: list[float], tmp_path: Path
) -> None:
    memo = tmp_path / "selftest.json"
    model = build("llama")
    vouch(model, probe_layers(model), memo)
    model.model.layers[0].mlp.up_proj.weight *= 2
    vouch(model, probe_layers(model), memo)
    assert len(counted) == 1


def test_another_dtype_or_geometry_is_tested_again(counted: list[float], tmp_path: Path) -> None:
    memo = tmp_path / "selftest.json"
    models = [
        build("llama"),
        build("llama").to(torch.bfloat16),
        build("llama", num_hidden_layers=3),
        build("llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    ]
    for _ in range(2):
        for model in models:
            vouch(model, probe_layers(model), memo)
    assert len(counted) == len(models) == len(json.loads(memo.read_text()))


def test_a_broken_memo_costs_one_test(counted: list[float], tmp_path: Path) -> None:
    memo = tmp_path / "selftest.json"
    model = build("llama")
    for broken in ("{", "[]", "null", '"text"'):
        memo.write_text(broken)
        vouch(model, probe_layers(model), memo)
    assert len(counted) == 4
    vouch(model, probe_layers(model), memo)
    assert len(counted) == 4


def test_a_memo_that_cannot_be_written_costs_one_test(counted: list[float], tmp_path: Path) -> None:
    model = build("llama")
    vouch(model, probe_layers(model), tmp_path)  # a folder
    (tmp_path / "file").touch()
    vouch(model, probe_layers(model), tmp_path / "file" / "selftest.json")
    assert len(counted) == 2


def lossy(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend_a_little_wrong(self: LayerMemory, *arguments: Any) -> Tensor:
        return attend(self, *arguments) * 0.98

    return attend_a_little_wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_whose_attention_differs_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memo = tmp_path / "selftest.json"
    model = build("qwen3").to(dtype)
    layers = probe_layers(model)
    if dtype is torch.bfloat16:  # far above half precision's own rounding
        layers = [replace(g, rotary=replace(g.rotary, interleaved=True)) for g in layers]
    else:
        monkeypatch.setattr(LayerMemory, "attend", lossy(LayerMemory.attend))
    with pytest.raises(ModelError, match="differ from the library's own"):
        vouch(model, layers, memo)
    assert not memo.exists()


def test_a_loaded_model_is_vouched_for_and_named(
    monkeypatch: pytest.MonkeyPatch, counted: list[float], tmp_path: Path
) -> None:
    folder = save(build("llama", vocab_size=700), tmp_path / "model")
    memo = tmp_path / "selftest.json"
    for _ in range(2):
        loaded = load_model(folder, "mine", device="cpu", dtype="f32", memo=memo)
    assert len(counted) == 1
    assert loaded.trained_length == 512 and len(loaded.layers) == 4
    assert loaded.dtype is torch.float32 and loaded.architecture == "LlamaForCausalLM"
    monkeypatch.setattr(LayerMemory, "attend", lossy(LayerMemory.attend))
    with pytest.raises(ModelError, match=r"mine: .*differ.*Known to work: Llama"):
        load_model(folder, "mine", device="cpu", dtype="f32", memo=None)
