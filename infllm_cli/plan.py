"""`infllm plan`: what reading a document would take, before it is read.

Loads the tokenizer and the configuration of the model, not the weights; with the figures of a
model given by hand, neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infllm_cli import budget, machine, scan_plan, wording
from infllm_cli.budget import LayerShape, Need
from infllm_cli.capacity import Capacity, Room
from infllm_cli.errors import UsageError
from infllm_cli.limits import Limits, disk_room, memories_folder
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Policy
from infllm_cli.memory.scan_cost import Scan
from infllm_cli.shelf import Shelf

if TYPE_CHECKING:
    from infllm_cli.document import Document

VALUE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
LIBRARY_BYTES = 600_000_000  # what the process holds besides: interpreter, torch, transformers
WORKING_BYTES = 120  # per token: its id and span, the text, attention mass while asking
TABLE_TOKENS = (4_096, 32_768, 128_000, 1_000_000)


@dataclass(frozen=True)
class Plan:
    """What reading so many tokens takes.

    Attributes:
        document: its name, or None for a number of tokens.
        tokens: of the document; with `estimated`, about.
        whole: attended whole, without blocks.
        needs: of every policy, in the order of `budget.NAMES`.
        weight_bytes: of the model, None where it is not there.
        free_disk_bytes: that the document may take.
        saved_bytes: of the files that are kept for the next question; 0: none.
        host_limit_bytes: of keys and values; None: no limit.
        seconds: for reading, at the speed last measured here; None: not measured yet.
        scan: of stored keys, for a token of an answer; None: nothing is scanned, or nobody knows
            by what.
        denser: stored in fewer bits than usual, for want of room.
    """

    document: str | None
    tokens: int
    estimated: bool
    blocks: int
    whole: bool
    needs: list[Need]
    config: MemoryConfig
    model: dict[str, Any]
    weight_bytes: int | None = None
    available_bytes: int = 0
    free_disk_bytes: int = 0
    saved_bytes: int = 0
    host_limit_bytes: int | None = None
    tokens_per_second: float | None = None
    scan: Scan | None = None
    denser: bool = False

    @property
    def need(self) -> Need:
        """Of the policy that the document is to be read by."""
        return next(n for n in self.needs if n.policy == budget.NAMES[self.config.policy])

    @property
    def seconds(self) -> float | None:
        """Estimated time of reading."""
        return self.tokens / self.tokens_per_second if self.tokens_per_second else None

    def memory_bytes(self, need: Need) -> int:
        """RAM that a policy takes altogether, with the weights (0 where they are unknown)."""
        rest = LIBRARY_BYTES + WORKING_BYTES * self.tokens
        total = need.host_peak_bytes + rest
        if self.model.get("device", "cpu") == "cpu":
            total += need.device_bytes + need.device_growing_bytes + (self.weight_bytes or 0)
        return total

    def fits(self, need: Need) -> bool:
        """Whether a policy fits the memory and disk that are free here."""
        return (
            self.memory_bytes(need) <= self.available_bytes
            and need.disk_bytes <= self.free_disk_bytes
            and need.host_peak_bytes <= (self.host_limit_bytes or need.host_peak_bytes)
        )


def plan_document(
    document: Document,
    *,
    model: str | None = None,
    cache_dir: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    sizes: dict[str, Any] | None = None,
    limits: Limits | None = None,
    denser: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Plan:
    """Plan the reading of a document by a model, which is fetched if it is the catalog's.

    Args:
        denser: as of `capacity.Room`.

    Raises:
        InfllmError: as `catalog.resolve`, `load_outline`, and `MemoryConfig.for_model`.
    """
    from infllm_cli import prompts, speeds
    from infllm_cli.models import catalog
    from infllm_cli.models.loading import choose_device, choose_dtype, load_outline
    from infllm_cli.reader import RESERVE_TOKENS

    cache_dir = cache_dir or catalog.default_cache_dir()
    wanted = model or catalog.DEFAULT_MODEL
    catalog.describe(wanted, cache_dir)  # a plan must not fetch gigabytes from a hub
    folder = catalog.resolve(wanted, cache_dir, progress)
    facts = catalog.describe(wanted, cache_dir)
    outline = load_outline(folder.path, folder.name)
    sizes = sizes or {}

    def config_of(policy: Policy | None) -> MemoryConfig:
        return MemoryConfig.for_model(outline.trained_length, **{**sizes, "policy": policy})

    def held_by(policy: Policy | None) -> MemoryConfig:
        found = config_of(policy)
        on_gpu = chosen.type == "cuda" and found.policy.has_blocks
        return replace(found, device_cache_blocks=found.gpu_slots) if on_gpu else found

    config = config_of(sizes.get("policy"))
    usual = config.codec
    prompt = prompts.build_prompt(outline.tokenizer, outline.generation_config)

    def count(text: str) -> int:
        return sum(map(len, prompt.tokenizer.iter_encode(text)))

    estimated = len(document.text) > budget.MOST_COUNTED_CHARS
    tokens = budget.estimate_tokens(count, document.text) if estimated else count(document.text)
    chosen = choose_device(device)
    kind = str(choose_dtype(dtype, chosen)).removeprefix("torch.")
    value_bytes = 4 if kind == "float32" else 2
    context = len(prompt.prefix) + tokens
    # How blocks are stored says nothing about whether there are to be any.
    by_hand = any(size is not None for name, size in sizes.items() if name != "codec")
    whole = not by_hand and context + RESERVE_TOKENS <= outline.trained_length
    limits = limits or Limits.usual()
    room = disk_room(Shelf(memories_folder(cache_dir)), limits.disk)
    capacity = Capacity(outline.layers, value_bytes, Room(limits.host, room, denser=denser))
    if not whole:
        config = capacity.choose(config, context)
        sizes = {**sizes, "codec": config.codec}
    needs = _needs(
        outline.layers, value_bytes, held_by, context, context + RESERVE_TOKENS if whole else 0
    )
    least = budget.least_host_bytes(outline.layers, value_bytes, config)
    chosen_need = list(budget.NAMES).index(config.policy)
    saved = 0
    if config.policy.has_blocks:
        saved = budget.saved_bytes(needs[chosen_need], config, len(outline.layers), context)
        if not limits.save or saved > min(limits.budget, room):
            saved = 0
        needs[chosen_need] = within(needs[chosen_need], limits, least, saved)
    return Plan(
        document=document.name,
        tokens=tokens,
        estimated=estimated,
        denser=config.codec is not usual,
        blocks=0 if whole or not config.policy.has_blocks else budget.blocks_of(config, context),
        whole=whole,
        needs=needs,
        config=config,
        model={
            "name": folder.name,
            "layers": len(outline.layers),
            "kv_heads": outline.layers[0].kv_heads,
            "head_dim": outline.layers[0].key_dim,
            "trained_length": outline.trained_length,
            "dtype": kind,
            "device": str(chosen),
        },
        weight_bytes=(facts["parameters"] or 0) * value_bytes or None,
        available_bytes=machine.available_memory(),
        free_disk_bytes=room,
        saved_bytes=saved,
        host_limit_bytes=limits.host,
        tokens_per_second=speeds.last_speed(cache_dir, folder.name, str(chosen), kind),
        scan=None
        if whole
        else budget.scan(
            outline.layers,
            value_bytes,
            config,
            context,
            group=outline.config.num_attention_heads // outline.layers[0].kv_heads,
            has_device=chosen.type == "cuda",
            cores=machine.cores(),
            device_room=scan_plan.device_room(chosen, limits.device),
        ),
    )


def within(need: Need, limits: Limits, least: int, saved: int) -> Need:
    """Where blocks lie: in RAM up to the limit, beyond it on disk, if they are not saved.

    Args:
        least: host memory below which blocks cannot move to disk; such a plan stays as it is, and
            does not fit.
        saved: bytes of the files of the saved memory, which hold every block; 0: it is not saved.
    """
    host = need.host_peak_bytes
    if host > limits.host >= least:
        return replace(
            need,
            host_bytes=limits.host,
            host_reading_bytes=0,
            disk_bytes=saved or host - limits.host,
        )
    return replace(need, disk_bytes=saved)


def plan_shape(
    layers: int | None,
    kv_heads: int | None,
    head_dim: int | None,
    tokens: int,
    *,
    dtype: str = "auto",
    sizes: dict[str, Any] | None = None,
) -> Plan:
    """Plan for a model that is not here, by its figures.

    Raises:
        UsageError: a figure is missing or below 1, or sizes that cannot work.
    """
    given = {"--layers": layers, "--kv-heads": kv_heads, "--head-dim": head_dim}
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        raise UsageError(f"the calculator also needs {' and '.join(missing)}.")
    for flag, value in {**given, "--tokens": tokens}.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} is {value}; it must be at least 1.")
    assert layers and kv_heads and head_dim
    chosen = {k: v for k, v in (sizes or {}).items() if v is not None}

    def config_of(policy: Policy) -> MemoryConfig:
        return MemoryConfig(**{**chosen, "policy": policy})

    config = config_of(chosen.get("policy", Policy.INFLLM))
    kind = "bf16" if dtype == "auto" else dtype
    shapes = [LayerShape(kv_heads, head_dim, head_dim)] * layers
    return Plan(
        document=None,
        tokens=tokens,
        estimated=False,
        blocks=budget.blocks_of(config, tokens) if config.policy.has_blocks else 0,
        whole=False,
        needs=_needs(shapes, VALUE_BYTES[kind], config_of, tokens, 0),
        config=config,
        model={"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": kind},
        available_bytes=machine.available_memory(),
        free_disk_bytes=machine.free_disk(Path()),
    )


def _needs(
    layers: Sequence[LayerShape],
    value_bytes: int,
    config_of: Callable[[Policy], MemoryConfig],
    context: int,
    whole_tokens: int,
) -> list[Need]:
    """Of every policy; only the program's own attends a context whole that fits."""
    return [
        budget.of_policy(
            layers,
            value_bytes,
            config_of(policy),
            context,
            whole_tokens=whole_tokens if policy is Policy.INFLLM else 0,
        )
        for policy in budget.NAMES
    ]


# --- output --------------------------------------------------------------------------------------


def to_json(plan: Plan) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {
        "schema": 1,
        "document": plan.document,
        "tokens": plan.tokens,
        "estimated": plan.estimated,
        "blocks": plan.blocks,
        "whole": plan.whole,
        "policies": [
            {**asdict(need), "memory_bytes": plan.memory_bytes(need), "fits": plan.fits(need)}
            for need in plan.needs
        ],
        "saved_bytes": plan.saved_bytes,
        "stored_denser": plan.denser,
        "machine": {
            "available_bytes": plan.available_bytes,
            "host_limit_bytes": plan.host_limit_bytes,
            "free_disk_bytes": plan.free_disk_bytes,
        },
        "scan": scan_plan.as_json(plan.scan),
        "reading": {"tokens_per_second": plan.tokens_per_second, "seconds": plan.seconds},
        "model": {**plan.model, "weight_bytes": plan.weight_bytes},
        "config": plan.config.as_dict(),
    }


def as_lines(plan: Plan) -> list[str]:
    """What the command prints for a reader."""
    about = "about " if plan.estimated else ""
    model = plan.model
    head_dim, kv_heads = model["head_dim"], model["kv_heads"]
    name = f"{model['name']}, " if "name" in model else ""
    where = f" on {model['device']}" if "device" in model else ""
    weights = f", {wording.size(plan.weight_bytes)} of weights" if plan.weight_bytes else ""
    how = f"read by {plan.need.policy}"
    if plan.config.policy.has_blocks:
        how = f"{plan.blocks:,} blocks of {plan.config.block_tokens} per layer"
    lines = [
        f"document  {plan.document or 'any'}: {about}{plan.tokens:,} tokens, "
        f"{'attended whole, no blocks' if plan.whole else how}",
        f"model     {name}{model['layers']} layers, {kv_heads} KV heads of {head_dim}, "
        f"{model['dtype']}{where}{weights}",
        "",
        f"{'policy':<14}{'device':>12}{'host':>12}{'disk':>10}  fits  attends",
    ]
    for need in plan.needs:
        device = need.device_bytes + need.device_growing_bytes
        lines.append(
            f"{need.policy:<14}{wording.size(device):>12}{wording.size(need.host_bytes):>12}"
            f"{wording.size(need.disk_bytes):>10}  {'yes' if plan.fits(need) else 'no ':<4}"
            f"  {need.attends}"
        )
    need = plan.need
    verdict = "fits" if plan.fits(need) else "does not fit"
    lines += [
        "",
        f"memory    {need.policy} takes about {wording.size(plan.memory_bytes(need))} in all; "
        f"{wording.size(plan.available_bytes)} is free here: it {verdict}",
        f"disk      {wording.size(need.disk_bytes)}"
        + (", kept for the next question" if plan.saved_bytes else "")
        + f"; it may take {wording.size(plan.free_disk_bytes)}",
    ]
    if plan.denser:
        lines.append(f"store     as {plan.config.codec.value}, for want of room for the usual bits")
    if plan.scan is not None:
        lines.append(scan_plan.line(plan.scan))
    if plan.document is not None:
        time = "not measured yet for this model on this device"
        if plan.seconds is not None:
            time = (
                f"about {wording.duration(plan.seconds)} at {plan.tokens_per_second:,.0f} "
                "tokens/s, as measured here last"
            )
        lines.append(f"reading   {time}")
    return lines


def render(plans: Sequence[Plan], *, as_json: bool) -> str:
    """All that the command writes: one plan, or a table of several."""
    if as_json:
        told = [to_json(plan) for plan in plans]
        return json.dumps(told[0] if len(told) == 1 else told) + "\n"
    lines = as_lines(plans[0]) if len(plans) == 1 else table_lines(plans)
    return "".join(f"{wording.visible(line)}\n" for line in lines)


def table_lines(plans: Sequence[Plan]) -> list[str]:
    """The calculator's table: bytes on the device by policy, a line per length."""
    names = [need.policy for need in plans[0].needs]
    lines = [f"{'tokens':>10}" + "".join(f"{name:>13}" for name in names) + "  InfLLM host"]
    for plan in plans:
        held = [need.device_bytes + need.device_growing_bytes for need in plan.needs]
        host = plan.needs[-1].host_bytes
        lines.append(
            f"{plan.tokens:>10,}"
            + "".join(f"{wording.size(count):>13}" for count in held)
            + f"{wording.size(host):>13}"
        )
    return lines
