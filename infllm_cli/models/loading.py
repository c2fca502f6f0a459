"""From a model folder to a frozen model whose attention is ours, vouched for."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infllm_cli import attention
from infllm_cli.budget import LayerShape
from infllm_cli.errors import CapacityError, ModelError, UsageError
from infllm_cli.memory.device_path import DeviceOptions
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.sliding import windows_only
from infllm_cli.models.lean_import import lean
from infllm_cli.models.packed import pack_linears
from infllm_cli.models.probe import depends_on_length, probe_layers
from infllm_cli.models.selftest import vouch

SPREAD = "gpus"  # of --device
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

SUPPORTED = (
    "Llama (SmolLM2, TinyLlama, Llama-2 and -3), Mistral, Ministral-3, Mixtral, Qwen2, Qwen3, "
    "Qwen3-MoE, Phi-3, Gemma-2, Gemma-3, SmolLM3, Granite, OLMo-2, GLM-4, Starcoder2, Seed-OSS, "
    "ERNIE-4.5"
)


@dataclass
class LoadedModel:
    """A frozen model with its tokenizer.

    Attributes:
        name: what the user called it.
        trained_length: positions it was trained on (of a model that slides in every layer: its
            sliding window).
        layers: geometry per layer, for contexts of ordinary length.
        folder: where it was loaded from, if from files.
        device_options: how memories use a GPU.
        cache_dir: where what belongs to it is kept, if anywhere.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    trained_length: int
    layers: list[LayerGeometry]
    load_seconds: float = 0.0
    device_options: DeviceOptions = field(default_factory=DeviceOptions)
    folder: Path | None = None
    cache_dir: Path | None = None
    _by_length: dict[int, list[LayerGeometry]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """The class name of the model, for reports."""
        return type(self.model).__name__

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.get_input_embeddings().weight.dtype

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device

    @property
    def shapes(self) -> list[LayerShape]:
        """What each layer keeps of a token."""
        return [
            LayerShape(g.kv_heads, g.head_dim, g.value_dim, g.sliding_window) for g in self.layers
        ]

    def layers_for(self, context_length: int) -> list[LayerGeometry]:
        """Geometry for contexts of up to `context_length` tokens (LongRoPE changes with it)."""
        if not depends_on_length(self.model.config.get_text_config()):
            return self.layers
        if context_length not in self._by_length:
            self._by_length[context_length] = probe_layers(self.model, context_length)
        return self._by_length[context_length]


def choose_device(device: str) -> torch.device:
    """`auto` is the first GPU, else the processor; `gpus` stands for all of them.

    Raises:
        UsageError: no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == SPREAD:
        if not torch.cuda.is_available():
            raise UsageError(f"--device {SPREAD} cannot be used here: there is no GPU.")
        return torch.device("cuda")
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {device} cannot be used here: {reason}") from error
    return chosen


def device_map(device: str, chosen: torch.device) -> dict[str, torch.device] | str | None:
    """What `from_pretrained` is told: None for the processor; `gpus` lets accelerate divide."""
    if device == SPREAD:
        return "auto"
    return None if chosen.type == "cpu" else {"": chosen}


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bf16 where the device computes it natively, else float32.

    Raises:
        UsageError: not one of auto, bf16, f16, f32.
    """
    if dtype == "auto":
        return torch.bfloat16 if _native_bf16(device) else torch.float32
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is unknown; choose auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _native_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu":
        return False
    flags = ""
    with contextlib.suppress(OSError):
        flags = Path("/proc/cpuinfo").read_text()
    words = set(flags.split())
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & words)


def import_library() -> None:
    """Import of transformers what every model needs: most of what a short command takes."""
    with lean():
        from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: F401


def load_model(
    folder: Path, name: str, *, device: str = "auto", dtype: str = "auto", memo: Path | None = None
) -> LoadedModel:
    """Load the model in `folder`, probe it, and test it unless `memo` says that its kind passed.

    Raises:
        ModelError: cannot be loaded or vouched for.
        UsageError: a device or dtype that is not there.
        CapacityError: the weights do not fit.
    """
    chosen_device = choose_device(device)
    chosen_dtype = choose_dtype(dtype, chosen_device)
    with lean(), quiet_transformers():
        attention.register()
        config = _read_config(folder, name)
        _refuse_by_config(config, name)
        where = device_map(device, chosen_device)
        model, tokenizer = _from_folder(folder, name, chosen_dtype, where)
        pack_linears(model)  # before the first pass, which else packs them for itself alone
        try:
            layers = probe_layers(model)
            vouch(model, layers, memo)
        except ModelError as error:
            raise ModelError(f"{name}: {error} Known to work: {SUPPORTED}.") from error
        except (TypeError, AttributeError, NotImplementedError) as error:
            raise ModelError(
                f"{name}: {type(model).__name__} cannot be probed ({error}). "
                f"Known to work: {SUPPORTED}."
            ) from error
    trained = _trained_length(config.get_text_config(), name)
    trained = min(trained, windows_only(layers) or trained)
    return LoadedModel(name, model, tokenizer, trained, layers, folder=folder)


def load_plain(loaded: LoadedModel) -> nn.Module:
    """The same weights once more, as the library itself loads and runs them: to compare with."""
    assert loaded.folder is not None
    with lean(), quiet_transformers():
        model, _ = _from_folder(loaded.folder, loaded.name, loaded.dtype, loaded.device)
        model.set_attn_implementation("sdpa")
    return model


@dataclass
class Outline:
    """What is known of a model without its weights: enough to count tokens and bytes.

    Attributes:
        config: of the language model (of a multimodal one, its text part).
        trained_length: as of a `LoadedModel`.
        layers: keys and values of each layer.
    """

    name: str
    config: Any
    tokenizer: Any
    generation_config: Any
    trained_length: int
    layers: list[LayerShape]


def load_outline(folder: Path, name: str) -> Outline:
    """Read the tokenizer and the configuration of the model in `folder`, not its weights.

    Raises:
        ModelError: they cannot be read, or the model is of a kind that is refused.
    """
    from transformers import GenerationConfig

    with lean(), quiet_transformers():
        config = _read_config(folder, name)
        _refuse_by_config(config, name)
        try:
            tokenizer = _read_tokenizer(folder, name)
            try:
                generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
            except OSError:
                generation = GenerationConfig.from_model_config(config)
        except (OSError, ValueError) as error:
            raise ModelError(f"{name} cannot be read: {_first_line(error)}") from error
    text = config.get_text_config()
    layers = shapes_of(text)
    windows = [layer.sliding_window for layer in layers]
    trained = _trained_length(text, name)
    if None not in windows:
        trained = min(trained, *(w for w in windows if w is not None))
    return Outline(name, text, tokenizer, generation, trained, layers)


def shapes_of(config: Any) -> list[LayerShape]:
    """The layers that a language model's configuration describes."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    kinds = kinds or ["sliding_attention" if window else "full_attention"] * count
    return [
        LayerShape(kv_heads, head_dim, head_dim, window if kind == "sliding_attention" else None)
        for kind in kinds
    ]


def _trained_length(config: Any, name: str) -> int:
    trained = int(getattr(config, "max_position_embeddings", 0) or 0)
    if trained <= 0:
        raise ModelError(f"{name}: config.json does not say the trained length.")
    return trained


def _read_config(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        kind = ""
        with contextlib.suppress(OSError, ValueError):
            kind = json.loads((folder / "config.json").read_text()).get("model_type", "")
        raise ModelError(
            f"{name}: transformers does not know this model (model_type {kind!r}): "
            f"{_first_line(error)}. Known to work: {SUPPORTED}."
        ) from error


def _refuse_by_config(config: Any, name: str) -> None:
    """Refuse before loading gigabytes what is known not to work."""
    text = config.get_text_config()
    reason = None
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif getattr(text, "kv_lora_rank", None):
        reason = "it keeps compressed keys (multi-head latent attention)"
    elif not (getattr(text, "rope_parameters", None) or getattr(text, "rope_theta", None)):
        reason = "it has no rotary positions"
    else:
        kinds = set(getattr(text, "layer_types", None) or [])
        foreign = kinds - {"full_attention", "sliding_attention"}
        if foreign:
            reason = f"it has layers of kind {', '.join(sorted(foreign))}"
    if reason:
        raise ModelError(
            f"{name} ({config.model_type}) cannot be read: {reason}. Known to work: {SUPPORTED}."
        )


def _from_folder(
    folder: Path, name: str, dtype: torch.dtype, device_map: dict[str, torch.device] | str | None
) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM

    try:
        tokenizer = _read_tokenizer(folder, name)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention.NAME,
            local_files_only=True,
            device_map=device_map,
        )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise CapacityError(
            f"{name} does not fit there; choose a smaller --model, --device cpu or, with several "
            f"GPUs, --device {SPREAD}."
        ) from error
    except ModelError:
        raise
    except Exception as error:  # the library's errors have no common kind
        raise ModelError(f"{name} cannot be loaded: {_first_line(error)}") from error
    return model.eval().requires_grad_(False), tokenizer


def _read_tokenizer(folder: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"{name} has no fast tokenizer (tokenizer.json).")
    return tokenizer


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the library's bars and warnings off the terminal, for the time of a call."""
    from transformers.utils import logging as library

    level = library.get_verbosity()
    bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()
