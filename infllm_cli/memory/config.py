"""Sizes and choices of the context memory, validated when built."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, replace

from infllm_cli.errors import UsageError
from infllm_cli.memory.codecs import Codec


class Lookup(enum.Enum):
    """How a step finds the blocks that join its attention."""

    REPRESENTATIVES = "representatives"  # a few keys stand for their block: cheap, approximate
    EXACT = "exact"  # every stored key is scored


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Sizes in tokens or blocks, as the names say.

    Raises:
        UsageError: a size that cannot work, naming the flag.
    """

    sink_tokens: int = 64  # first tokens of the context, always attended
    window_tokens: int = 1024  # most recent tokens, always attended
    block_tokens: int = 128  # unit of storage and of lookup
    chunk_tokens: int = 512  # tokens per step while reading
    read_blocks: int = 1  # blocks per KV head that join a step while reading
    answer_blocks: int = 8  # the same while asking and answering
    representatives_per_block: int = 4
    segment_blocks: int = 64  # blocks of a layer that are written to disk together
    read_lookup: Lookup = Lookup.REPRESENTATIVES
    answer_lookup: Lookup = Lookup.EXACT
    codec: Codec = Codec.INT8  # how sealed blocks are stored
    scan_every: int = 1  # answer tokens: how often one of them scans all stored keys

    def __post_init__(self) -> None:
        """Refuse sizes that no memory could hold."""
        at_least = {
            "sink_tokens": 1,
            "window_tokens": 16,
            "block_tokens": 8,
            "chunk_tokens": 1,
            "read_blocks": 0,
            "answer_blocks": 1,
            "representatives_per_block": 1,
            "segment_blocks": 1,
            "scan_every": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value < least:
                flag = FLAGS.get(name, name)
                raise UsageError(f"{flag} is {value}; it must be at least {least}.")
        if self.representatives_per_block > self.block_tokens:
            raise UsageError(
                f"representatives per block ({self.representatives_per_block}) cannot exceed "
                f"the block's {self.block_tokens} tokens."
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
        config.check_fits(trained_length)
        return config

    @classmethod
    def from_dict(cls, values: dict[str, int | str]) -> MemoryConfig:
        """What `as_dict` told of another one."""
        kinds = {"read_lookup": Lookup, "answer_lookup": Lookup, "codec": Codec}
        return cls(**{name: kinds.get(name, int)(value) for name, value in values.items()})

    def as_dict(self) -> dict[str, int | str]:
        """Plain values, for reports."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: v.value if isinstance(v, enum.Enum) else v for n, v in values.items()}


FLAGS = {
    "sink_tokens": "--sinks",
    "window_tokens": "--window",
    "chunk_tokens": "--chunk",
    "read_blocks": "--read-blocks",
    "answer_blocks": "--blocks",
    "block_tokens": "--block",
    "scan_every": "--scan-every",
}
