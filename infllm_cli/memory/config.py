"""Sizes and choices of the context memory, validated when built."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace

from infllm_cli.errors import UsageError
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.knobs import (
    CachePolicy,
    InfiniGates,
    InfiniUpdate,
    Lookup,
    Policy,
    Positions,
    Relevance,
    RepresentativeRule,
    Sharing,
)

# What a policy does where nothing else is said. Fields that are None are filled in from here.
_PAPER = {
    "read_lookup": Lookup.REPRESENTATIVES,
    "answer_lookup": Lookup.REPRESENTATIVES,
    "representative_rule": RepresentativeRule.ATTENTION,
    "sharing": Sharing.PER_LAYER,
    "positions": Positions.SAME_DISTANCE,
}
_OURS = {
    "read_lookup": Lookup.REPRESENTATIVES,
    "answer_lookup": Lookup.EXACT,
    "representative_rule": RepresentativeRule.DOT,
    "sharing": Sharing.PER_KV_HEAD,
    "positions": Positions.CONSECUTIVE,
}
MOST_REPRESENTATIVES = 16


# On a GPU, per KV head: slots at least, slots for each block of a step, and how many blocks are
# fetched before they are asked for.
GPU_SLOTS, GPU_SLOTS_PER_BLOCK, PREDICTED_BLOCKS = 32, 3, 4


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Sizes in tokens or blocks, as the names say, and the choices of the method (see `knobs`).

    What is None becomes what the policy does: of `infllm-paper`, what was published.

    Raises:
        UsageError: a size that cannot work, naming the flag.
    """

    sink_tokens: int = 64  # first tokens of the context, always attended
    window_tokens: int = 1024  # most recent tokens, always attended
    block_tokens: int = 128  # unit of storage and of lookup
    chunk_tokens: int = 512  # tokens per step while reading
    read_blocks: int | None = None  # blocks per KV head that join a step while reading; 1
    answer_blocks: int = 8  # the same while asking and answering
    representatives_per_block: int = 4
    segment_blocks: int = 64  # blocks of a layer that are written to disk together
    read_lookup: Lookup | None = None
    answer_lookup: Lookup | None = None
    codec: Codec = Codec.INT8  # how sealed blocks are stored
    scan_every: int = 0  # answer tokens: how often one of them scans all keys; 0: as it pays
    policy: Policy = Policy.INFLLM
    representative_rule: RepresentativeRule | None = None
    relevance: Relevance = Relevance.AUTO
    sharing: Sharing | None = None
    positions: Positions | None = None
    device_cache_blocks: int = 0  # slots per KV head for blocks on the device; 0: no cache
    device_cache_policy: CachePolicy = CachePolicy.LRU
    infini_segment_tokens: int = 2048  # attended locally, then written into the memory
    infini_update: InfiniUpdate = InfiniUpdate.DELTA
    infini_gates: InfiniGates = InfiniGates.FITTED

    def __post_init__(self) -> None:
        """Fill in what the policy decides, and refuse sizes that no memory could hold."""
        paper = self.policy is Policy.INFLLM_PAPER
        own = _PAPER if paper else _OURS
        # As published, every phase loads the same number.
        own = {**own, "read_blocks": self.answer_blocks if paper else 1}
        for name, value in own.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        at_least = {
            "sink_tokens": 1,
            "window_tokens": 16,
            "block_tokens": 8,
            "chunk_tokens": 1,
            "read_blocks": 0,
            "answer_blocks": 1,
            "representatives_per_block": 1,
            "segment_blocks": 1,
            "scan_every": 0,
            "device_cache_blocks": 0,
            "infini_segment_tokens": 16,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value < least:
                flag = {**FLAGS, **KNOB_FLAGS}.get(name, name)
                raise UsageError(f"{flag} is {value}; it must be at least {least}.")
        if self.representatives_per_block > self.block_tokens:
            raise UsageError(
                f"representatives per block ({self.representatives_per_block}) cannot exceed "
                f"the block's {self.block_tokens} tokens."
            )
        if self.representatives_per_block > MOST_REPRESENTATIVES:
            raise UsageError(
                f"--representatives is {self.representatives_per_block}; it can be at most "
                f"{MOST_REPRESENTATIVES}."
            )
        if 0 < self.device_cache_blocks < self.most_blocks:
            raise UsageError(
                f"--device-cache is {self.device_cache_blocks}; it must hold at least the "
                f"{self.most_blocks} blocks of a step (or be 0: no cache)."
            )
        if self.scan_every > 1 and (
            self.exact_relevance is not Relevance.MASS or self.sharing is not Sharing.PER_KV_HEAD
        ):
            raise UsageError(
                f"--scan-every is {self.scan_every}; between two scans blocks are chosen by "
                "mass and per KV head only: leave it out with other --relevance and --sharing."
            )
        if self.window_tokens < self.block_tokens:
            raise UsageError(
                f"--window is {self.window_tokens}; it must hold at least one block "
                f"({self.block_tokens} tokens)."
            )

    @property
    def most_blocks(self) -> int:
        """Blocks per KV head that any phase may load."""
        return max(self.read_blocks, self.answer_blocks)

    @property
    def gpu_slots(self) -> int:
        """Slots per KV head for blocks on a GPU, which is never without: as asked for, but room
        for a step, for those of the last ones, and for what is predicted.
        """
        usual = max(GPU_SLOTS, GPU_SLOTS_PER_BLOCK * self.most_blocks)
        return max(self.most_blocks + PREDICTED_BLOCKS, self.device_cache_blocks or usual)

    @property
    def budget_tokens(self) -> int:
        """Past tokens that a step attends at most: sinks, window and loaded blocks.

        Every policy that forgets keeps so many, whatever it calls them.
        """
        return self.sink_tokens + self.window_tokens + self.most_blocks * self.block_tokens

    @property
    def representatives_relevance(self) -> Relevance:
        """How a lookup by representatives ranks."""
        return Relevance.SUM if self.relevance is Relevance.AUTO else self.relevance

    @property
    def exact_relevance(self) -> Relevance:
        """How an exact lookup ranks."""
        return Relevance.MASS if self.relevance is Relevance.AUTO else self.relevance

    @property
    def context_tokens(self) -> int:
        """Largest distance in tokens between a query and a key that it attends, while reading.

        The window gives up whole blocks, so up to one block more than `window_tokens` waits in it.
        """
        return (
            self.sink_tokens
            + self.most_blocks * self.block_tokens
            + self.window_tokens
            + self.block_tokens
            + self.chunk_tokens
        )

    def check_fits(self, trained_length: int) -> None:
        """Refuse a context whose positions would pass those that the model was trained on.

        Raises:
            UsageError: the sum of the parts and the trained length, and which flags shrink it.
        """
        if self.policy is Policy.INFINI and self.infini_segment_tokens > trained_length:
            raise UsageError(
                f"--infini-segment is {self.infini_segment_tokens} tokens, but the model was "
                f"trained on {trained_length}."
            )
        if self.context_tokens > trained_length:
            raise UsageError(
                f"sinks {self.sink_tokens} + blocks {self.most_blocks} x {self.block_tokens} + "
                f"window {self.window_tokens} + {self.block_tokens} + chunk {self.chunk_tokens} = "
                f"{self.context_tokens} tokens, but the model was trained on {trained_length}. "
                "Lower --window, --blocks or --chunk."
            )

    @classmethod
    def for_model(cls, trained_length: int, **overrides: object) -> MemoryConfig:
        """Defaults that fit `trained_length` tokens; `overrides` that are None were not given.

        Raises:
            UsageError: the overrides do not fit.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        config = cls(**given)  # type: ignore[arg-type]
        # Small models (2,048 tokens and less) cannot hold the defaults: halve what was not given.
        shrinkable = {
            "chunk_tokens": 64,
            "window_tokens": max(256, config.block_tokens),
            "answer_blocks": 2,
            "read_blocks": 1,
            "sink_tokens": 4,
        }
        while config.context_tokens > trained_length:
            smaller = {
                name: max(least, getattr(config, name) // 2)
                for name, least in shrinkable.items()
                if name not in given and getattr(config, name) > least
            }
            if not smaller and "block_tokens" not in given and config.block_tokens > 32:
                smaller = {"block_tokens": config.block_tokens // 2}
            if not smaller:
                break
            config = replace(config, **smaller)
        if "infini_segment_tokens" not in given:
            # The question and its answer stay in the segment that they begin in.
            segment = max(16, min(config.infini_segment_tokens, trained_length // 2))
            config = replace(config, infini_segment_tokens=segment)
        config.check_fits(trained_length)
        return config

    @classmethod
    def from_dict(cls, values: dict[str, int | str]) -> MemoryConfig:
        """What `as_dict` told of another one."""
        return cls(**{name: KINDS.get(name, int)(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, int | str]:
        """Plain values, for reports."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}


# The choices, by the name of their field.
KINDS: dict[str, type[enum.Enum]] = {
    "read_lookup": Lookup,
    "answer_lookup": Lookup,
    "codec": Codec,
    "policy": Policy,
    "representative_rule": RepresentativeRule,
    "relevance": Relevance,
    "sharing": Sharing,
    "positions": Positions,
    "device_cache_policy": CachePolicy,
    "infini_update": InfiniUpdate,
    "infini_gates": InfiniGates,
}
FLAGS = {
    "sink_tokens": "--sinks",
    "window_tokens": "--window",
    "chunk_tokens": "--chunk",
    "read_blocks": "--read-blocks",
    "answer_blocks": "--blocks",
    "block_tokens": "--block",
    "scan_every": "--scan-every",
    "representatives_per_block": "--representatives",
}
# Of the method's knobs, which are no sizes of every memory.
KNOB_FLAGS = {
    "policy": "--policy",
    "read_lookup": "--read-lookup",
    "answer_lookup": "--answer-lookup",
    "representative_rule": "--representative-rule",
    "relevance": "--relevance",
    "sharing": "--sharing",
    "positions": "--positions",
    "device_cache_blocks": "--device-cache",
    "device_cache_policy": "--device-cache-policy",
    "infini_segment_tokens": "--infini-segment",
    "infini_update": "--infini-update",
    "infini_gates": "--infini-gates",
}
