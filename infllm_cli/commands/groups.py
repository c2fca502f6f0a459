"""Flags that belong together, each group one parameter of a command. Imports no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from infllm_cli.eval_options import (
    Depths,
    EvalAnswering,
    FormChoice,
    FormOption,
    HeatmapFiles,
    JsonLines,
    Lengths,
    LimitSeconds,
    Policies,
    ResultsFile,
    Samples,
    TaskSeed,
    Vary,
)
from infllm_cli.method_options import (
    AnswerLookup,
    Block,
    CachePolicyOption,
    DeviceCacheOption,
    InfiniGatesOption,
    InfiniSegment,
    InfiniUpdateOption,
    PolicyOption,
    PositionsOption,
    ReadLookup,
    RelevanceOption,
    RepresentativeRuleOption,
    Representatives,
    SharingOption,
)
from infllm_cli.options import (
    AllowDrop,
    AnsweringChoice,
    AnsweringOption,
    Blocks,
    Cache,
    Candidates,
    Chunk,
    Device,
    DeviceLimit,
    DiskLimit,
    Dtype,
    Encoder,
    HostLimit,
    MaxTokens,
    MemoryBudget,
    Model,
    Precision,
    Quiet,
    Quote,
    QuoteChoice,
    ReadBlocks,
    RereadTokens,
    Save,
    ScanEvery,
    Seed,
    Sinks,
    Store,
    StoreChoice,
    Temperature,
    TopP,
    Window,
)

if TYPE_CHECKING:
    from infllm_cli.limits import Limits

DEFAULT_ENCODER = "all-minilm-l6-v2"  # of `models.encoders`, which is not imported for a help text


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and where and how it runs."""

    model: Model = None
    device: Device = "auto"
    dtype: Precision = Dtype.AUTO
    cache_dir: Cache = None

    @property
    def cache(self) -> Path:
        """The folder of models and memories."""
        from infllm_cli.models.catalog import default_cache_dir

        return self.cache_dir or default_cache_dir()


@dataclass(frozen=True)
class SamplingFlags:
    """How an answer is drawn."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0
    answering: AnsweringOption = None
    quote: Quote = QuoteChoice.AUTO


@dataclass(frozen=True)
class RecallFlags:
    """What stands beside a question."""

    reread_tokens: RereadTokens = None
    encoder: Encoder = DEFAULT_ENCODER
    candidates: Candidates = 128


@dataclass(frozen=True)
class GridFlags:
    """What `infllm eval` measures, and where the results go."""

    lengths: Lengths = "4k,8k"
    depths: Depths = 5
    policies: Policies = None
    vary: Vary = None
    samples: Samples = 1
    seed: TaskSeed = 0
    answering: EvalAnswering = AnsweringChoice.MEMORY
    form: FormOption = FormChoice.PUBLISHED
    limit_seconds: LimitSeconds = None
    output: ResultsFile = None
    heatmap: HeatmapFiles = None
    as_json: JsonLines = False
    quiet: Quiet = False


@dataclass(frozen=True)
class SpaceFlags:
    """What may be taken of RAM and disk by a memory that is not kept."""

    host_limit: HostLimit = None
    disk_limit: DiskLimit = None

    def parsed(self) -> Limits:
        """In bytes.

        Raises:
            UsageError: what is no size, by its flag.
        """
        from infllm_cli.limits import DEFAULT_BUDGET, parse_limits

        return parse_limits(self.host_limit, self.disk_limit, DEFAULT_BUDGET, save=False)


@dataclass(frozen=True)
class RoomFlags:
    """What may be taken of RAM and disk, and whether a memory is kept."""

    host_limit: HostLimit = None
    disk_limit: DiskLimit = None
    device_limit: DeviceLimit = None
    save: Save = True
    memory_budget: MemoryBudget = "20GB"

    def parsed(self) -> Limits:
        """In bytes.

        Raises:
            UsageError: what is no size, by its flag.
        """
        from infllm_cli.limits import parse_limits

        return parse_limits(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class LimitFlags(RoomFlags):
    """And what happens to a document that they do not hold."""

    allow_drop: AllowDrop = False


@dataclass(frozen=True)
class KeepFlags:
    """The same for a command that always keeps what it reads."""

    host_limit: HostLimit = None
    disk_limit: DiskLimit = None
    device_limit: DeviceLimit = None
    memory_budget: MemoryBudget = "20GB"
    allow_drop: AllowDrop = False

    def and_save(self) -> LimitFlags:
        """As of a command that may also not keep it."""
        return LimitFlags(**{field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class KnobFlags:
    """Policy and knobs of the method; None means the default."""

    policy: PolicyOption = None
    block: Block = None
    representatives: Representatives = None
    representative_rule: RepresentativeRuleOption = None
    relevance: RelevanceOption = None
    sharing: SharingOption = None
    positions: PositionsOption = None
    read_lookup: ReadLookup = None
    answer_lookup: AnswerLookup = None
    device_cache: DeviceCacheOption = None
    device_cache_policy: CachePolicyOption = None
    infini_segment: InfiniSegment = None
    infini_update: InfiniUpdateOption = None
    infini_gates: InfiniGatesOption = None

    def knobs(self) -> dict[str, Any]:
        """By the names of `MemoryConfig`."""
        named = {
            "block": "block_tokens",
            "representatives": "representatives_per_block",
            "device_cache": "device_cache_blocks",
            "infini_segment": "infini_segment_tokens",
        }
        return {
            named.get(field.name, field.name): getattr(self, field.name)
            for field in fields(KnobFlags)
        }


@dataclass(frozen=True)
class SizeFlags(KnobFlags):
    """Sizes of the memory, None means the default; and how it is stored."""

    window: Window = None
    sinks: Sinks = None
    blocks: Blocks = None
    read_blocks: ReadBlocks = None
    chunk: Chunk = None
    store: Store = StoreChoice.AUTO
    scan_every: ScanEvery = 0

    @property
    def given(self) -> bool:
        """Whether any size or knob was given by hand."""
        return any(size is not None for size in self.sizes().values())

    @property
    def may_be_denser(self) -> bool:
        """Whether a document that does not fit may be stored in fewer bits than usual."""
        return self.store is StoreChoice.AUTO

    def sizes(self) -> dict[str, Any]:
        """Sizes and knobs, by the names of `MemoryConfig`."""
        return {
            **self.knobs(),
            "window_tokens": self.window,
            "sink_tokens": self.sinks,
            "answer_blocks": self.blocks,
            "read_blocks": self.read_blocks,
            "chunk_tokens": self.chunk,
        }

    def as_dict(self) -> dict[str, Any]:
        """Sizes and codec, by the names of `MemoryConfig`."""
        from infllm_cli.memory.codecs import Codec

        return {
            **self.sizes(),
            "codec": Codec.INT8 if self.may_be_denser else Codec(self.store.value),
            "scan_every": self.scan_every,
        }


@dataclass(frozen=True)
class TaskFlags(SizeFlags, SpaceFlags, RecallFlags, ModelFlags, GridFlags):
    """All that every task of `infllm eval` takes; the last group comes first."""


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each parameter whose type is one of the groups into a flag for each of its fields.

    Typer reads a command's signature and knows no groups, so the signature is written out for it.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    written: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        if not is_dataclass(hint):
            written.append(parameter.replace(annotation=hint))
            continue
        groups[parameter.name] = hint
        of_field = get_type_hints(hint, include_extras=True)
        written += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=of_field[field.name],
            )
            for field in fields(hint)
        ]

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    del call.__wrapped__  # else what looks for a signature finds the old one
    keyword = inspect.Parameter.KEYWORD_ONLY
    written = [parameter.replace(kind=keyword) for parameter in written]
    call.__signature__ = inspect.Signature(written)
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in written}
    return call
