"""How does a GGUF file become a folder that `from_pretrained` loads?

transformers reads GGUF by unpacking every weight, which takes half a minute for the smallest model,
so it is done once and the result is kept as bfloat16 safetensors. The conversion is checked by
loading the result back before anybody uses it.
"""

from __future__ import annotations

import contextlib
import errno
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infllm_cli.errors import CapacityError, InfllmError, ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

Progress = Callable[[str, int, int], None]
"""Called with the stage's text, how much is done, and the total (bytes or steps; 0 = unknown)."""

CONVERTER_VERSION = 1
"""Raise it when the converted folders change, so that older ones are made again."""

GGUF_MAGIC = b"GGUF"

# Special tokens of the common families, spaces, digits, a script outside Latin and an emoji: what a
# tokenizer loses when a part of it (added tokens, pre-tokenizer, byte fallback) is not saved.
PROBE_TEXTS = (
    "<|im_start|>user\nHello  wörld 12345, it's </s><s><|im_end|>\n<|endoftext|>",
    "<bos><start_of_turn>model\n\tdef f(x):\n        return x<end_of_turn><|eot_id|>",
    " leading space, 日本語 and 🙂 " + "a" * 40,
)


@dataclass(frozen=True)
class GgufFacts:
    """What the GGUF's metadata says and the loaders may drop."""

    ends: list[int]  # ids of the tokens that end an answer
    special: dict[str, int]  # bos_token, eos_token, ... -> id
    scaled_rotary: bool  # whether the rotary angles are scaled


def is_gguf(path: Path) -> bool:
    """Whether the file at `path` begins like GGUF; False for folders and unreadable files."""
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def convert_gguf(
    gguf: Path, target: Path, dtype: str = "bfloat16", progress: Progress | None = None
) -> None:
    """Write the model in the file `gguf` into the folder `target` as safetensors, and check it.

    `target` is made if it does not exist. `dtype` is a torch type's name. Host memory of about the
    dense model's size is needed. Nothing is written beside `gguf`. Progress counts tensors.

    Raises ModelError for a file that is broken, split, of an architecture that transformers cannot
    convert or with a rotary scaling that would be lost; CapacityError when memory or disk runs
    out. The target may then hold a part of the files: the caller throws it away.
    """
    report = progress or (lambda stage, done, total: None)
    report("reading the GGUF file", 0, 0)
    facts = _inspect(gguf)
    try:
        with _quiet(report), tempfile.TemporaryDirectory(prefix="infllm-gguf-") as alone:
            # A folder that holds nothing but the GGUF: beside it the user may keep another
            # model's tokenizer_config.json, which transformers would mix in.
            (Path(alone) / "model.gguf").symlink_to(gguf.resolve())
            _convert(Path(alone), target, dtype, facts, report)
    except InfllmError:
        raise
    except MemoryError as exc:
        raise _out_of_memory(gguf) from exc
    except Exception as exc:
        # Whatever the loaders raise (ValueError, KeyError, RuntimeError, ...), the user's way on is
        # the same one, except when the machine was too small.
        if is_disk_full(exc):
            message = f"the disk is full while converting {gguf}: free some space"
            raise CapacityError(message) from exc
        if "can't allocate memory" in str(exc):
            raise _out_of_memory(gguf) from exc
        reason = str(exc).strip().splitlines() or [type(exc).__name__]
        if isinstance(exc, ImportError):
            raise ModelError(
                f"cannot convert {gguf}, the installation is not complete ({reason[0]}): "
                "pip install --upgrade infllm-cli"
            ) from exc
        raise ModelError(
            f"{gguf}: transformers cannot convert this GGUF file ({reason[0]}); "
            "give the model's safetensors folder instead"
        ) from exc


def is_disk_full(exc: BaseException) -> bool:
    """Whether `exc` or one of its causes says that the disk, or the user's share of it, is full."""
    seen: BaseException | None = exc
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # safetensors writes in Rust and carries the reason as text only.
        if "StorageFull" in str(seen) or "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _out_of_memory(gguf: Path) -> CapacityError:
    return CapacityError(
        f"not enough host memory to unpack {gguf}: close other programs or take a smaller model"
    )


def _inspect(gguf: Path) -> GgufFacts:
    """Read the metadata; refuse what would be converted wrongly and without a word."""
    if not is_gguf(gguf):
        raise ModelError(f"{gguf}: not a GGUF file (it does not begin with 'GGUF')")
    if re.search(r"-\d{5}-of-\d{5}$", gguf.stem):
        raise ModelError(
            f"{gguf}: one part of a split GGUF; join them: llama-gguf-split --merge FIRST OUT"
        )
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf)
    except Exception as exc:  # the reader does not check lengths: numpy raises what it likes
        raise ModelError(
            f"{gguf}: the GGUF file is cut short or broken; download it again"
        ) from exc
    architecture = _scalar(reader, "general.architecture")
    kinds = ("bos", "eos", "eot", "eom", "padding", "unknown")
    ids = {kind: _scalar(reader, f"tokenizer.ggml.{kind}_token_id") for kind in kinds}
    ends = [ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] is not None]
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
    scaling = _scalar(reader, f"{architecture}.rope.scaling.type")
    scaled = scaling not in (None, "none") or any(
        tensor.name.startswith(("rope_freqs", "rope_factors")) for tensor in reader.tensors
    )
    return GgufFacts(
        ends=list(dict.fromkeys(ends)),
        special={
            f"{name}_token": ids[kind] for kind, name in names.items() if ids[kind] is not None
        },
        scaled_rotary=scaled,
    )


def _scalar(reader: GGUFReader, key: str) -> Any:
    """A metadata value that is a number or a string; None when the file lacks it."""
    field = reader.get_field(key)
    if field is None or not field.data:
        return None
    part = field.parts[field.data[0]]
    if field.types[0].name == "STRING":
        return bytes(part).decode("utf-8", "replace")
    return part[0].item()


def _convert(folder: Path, target: Path, dtype: str, facts: GgufFacts, report: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    wanted: dict[str, Any] = {
        "gguf_file": "model.gguf",
        # A local folder never leads to a network connection.
        "local_files_only": True,
    }
    report("reading the tokenizer", 0, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder, **wanted)
    _mend_tokenizer(tokenizer, facts.special)
    with contextlib.suppress(ImportError):
        # Newer releases keep the weights packed where a kernel exists; dense is what we save.
        from transformers import GgufConfig

        wanted["quantization_config"] = GgufConfig(dequantize=True)
    report("converting the weights", 0, 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **wanted)
    _check_rotary(model.config, facts.scaled_rotary)

    # Dense now, although the loader left its mark; with the mark save_pretrained refuses.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    generation = model.generation_config
    known = generation.eos_token_id
    known = known if isinstance(known, list) else [] if known is None else [known]
    ends = list(dict.fromkeys([*known, *facts.ends]))
    if ends != known:
        # GGUF keeps the end of a turn apart from the end of text; both must end an answer.
        generation.eos_token_id = ends
        generation._from_model_config = False
    tied = bool(getattr(model.config, "tie_word_embeddings", False))

    report("writing safetensors", 0, 0)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for weights in target.glob("*.safetensors"):
        # safetensors makes its files private to the user; a shared cache needs the usual mode.
        weights.chmod((target / "config.json").stat().st_mode)
    eos = generation.eos_token_id
    del model  # before the check loads a second copy

    report("checking the converted model", 0, 0)
    _check_tokenizer(tokenizer, target)
    _check_model(target, getattr(torch, dtype), tied, eos)


def _mend_tokenizer(tokenizer: Any, special: dict[str, int]) -> None:
    """Give the tokenizer the special tokens that the file names, and none of our settings."""
    for name, token_id in special.items():
        # transformers 5.17 takes the begin of text for its end, so the file's word counts.
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is not None and getattr(tokenizer, name) != token:
            setattr(tokenizer, name, token)
    # An old habit of BERT's that would take spaces out of what the model wrote.
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    # How it was loaded here is not a property of the tokenizer.
    for leftover in ("local_files_only", "is_local", "gguf_file"):
        tokenizer.init_kwargs.pop(leftover, None)


def _check_rotary(config: Any, scaled: bool) -> None:
    """Refuse a rotary scaling that stands in the file and was dropped by the loader."""
    parameters = getattr(config, "rope_parameters", None) or {}
    # Models with two kinds of layers hold one dictionary for each.
    each = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    kept = any(p.get("rope_type", "default") != "default" for p in each)
    if scaled and not kept:
        raise ValueError("its rotary scaling would be lost")


def _check_tokenizer(tokenizer: Any, target: Path) -> None:
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(target, local_files_only=True)
    for text in PROBE_TEXTS:
        for special in (False, True):
            before = tokenizer(text, add_special_tokens=special)["input_ids"]
            after = saved(text, add_special_tokens=special)["input_ids"]
            if list(before) != list(after):
                raise ValueError(f"the saved tokenizer reads {text[:30]!r} differently")
            if tokenizer.decode(before) != saved.decode(after):
                raise ValueError(f"the saved tokenizer writes {text[:30]!r} differently")
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "chat_template"):
        if getattr(tokenizer, name) != getattr(saved, name):
            raise ValueError(f"the saved tokenizer lost its {name}")


def _check_model(target: Path, dtype: Any, tied: bool, eos: int | list[int] | None) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        target, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(problem):
            raise ValueError(f"the saved weights have {problem}: {sorted(info[problem])[:3]}")
    odd = sorted({str(p.dtype) for p in model.parameters() if p.dtype != dtype})
    if odd:
        raise ValueError(f"the saved weights hold {', '.join(odd)} beside {dtype}")
    head = model.get_output_embeddings()
    if head is not None and (head.weight is model.get_input_embeddings().weight) != tied:
        raise ValueError("the saved output embedding is tied differently from the GGUF's")
    if model.generation_config.eos_token_id != eos:
        raise ValueError("the saved generation_config.json lost its eos_token_id")


@contextlib.contextmanager
def _quiet(report: Progress) -> Iterator[None]:
    """No bars or warnings from the libraries inside; their settings are put back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.set_verbosity, verbosity)
        logging.set_verbosity_error()
        if bars:
            stack.callback(logging.enable_progress_bar)
        logging.disable_progress_bar()
        with contextlib.suppress(ImportError, AttributeError):
            # This loader takes tqdm directly, past the switch above; it is also the slow part, so
            # its bar becomes our progress.
            from transformers import modeling_gguf_pytorch_utils as loader

            stack.callback(setattr, loader, "tqdm", loader.tqdm)
            loader.tqdm = lambda items, **_: _reported(items, report)
        yield


def _reported(items: Iterable[Any], report: Progress) -> Iterator[Any]:
    tensors = list(items)
    for done, tensor in enumerate(tensors):
        report("converting the weights", done, len(tensors))
        yield tensor
