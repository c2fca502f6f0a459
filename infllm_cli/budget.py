"""What does a context of so many tokens take, by policy and by tier? Arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infllm_cli.checksums import PAGE
from infllm_cli.memory import codecs
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.knobs import Policy, Relevance, RepresentativeRule
from infllm_cli.memory.scan_cost import Scan, estimate

# Above this a document is counted by a sample when the count only decides whether to go on.
MOST_COUNTED_CHARS = 20_000_000
# Files are larger than their numbers: every tensor of a layer is padded to pages.
TENSORS_OF_SEGMENT, TENSORS_OF_STATE, HEADER_BYTES = 10, 10, 200_000
_SAMPLES, _SAMPLE_CHARS = 64, 16_384


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values per token; `sliding_window` where it was trained to see one."""

    kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None

    def values_per_token(self) -> int:
        """Numbers kept for a token: its key and its value, for every KV head."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def stored_bytes(
        self, codec: Codec, config: MemoryConfig, blocks: int, value_bytes: int
    ) -> int:
        """Bytes of sealed blocks in segments."""
        dims = (self.key_dim, self.value_dim)
        block = codecs.block_bytes(codec, self.kv_heads, config.block_tokens, *dims, value_bytes)
        segments = -(-blocks // config.segment_blocks)
        return blocks * block + segments * codecs.segment_bytes(codec, self.kv_heads, self.key_dim)


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a policy takes, by tier, when a context has been read.

    Attributes:
        policy: one of `NAMES`.
        device_bytes: InfLLM's part that does not grow with the context, or all of it.
        device_growing_bytes: representatives.
        attends: what a step sees, for the reader.
        host_reading_bytes: on top of `host_bytes` while it is read: of blocks that are not packed
            before their segment is full.
    """

    policy: str
    attends: str
    device_bytes: int
    device_growing_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    host_reading_bytes: int = 0

    @property
    def host_peak_bytes(self) -> int:
        """The most host memory that keys and values take at any time."""
        return self.host_bytes + self.host_reading_bytes


# What policies are called in reports, in the order of tables: what the program does by itself last.
NAMES = {
    Policy.DENSE: "dense",
    Policy.STREAMING_LLM: "StreamingLLM",
    Policy.LM_INFINITE: "LM-Infinite",
    Policy.H2O: "H2O",
    Policy.INFINI: "Infini",
    Policy.INFLLM_PAPER: "InfLLM-paper",
    Policy.INFLLM: "InfLLM",
}


def of_policy(
    layers: Sequence[LayerShape],
    value_bytes: int,
    config: MemoryConfig,
    context_tokens: int,
    *,
    whole_tokens: int = 0,
) -> Need:
    """What `config.policy` takes.

    Args:
        whole_tokens: see `infllm`; until a context outgrows them no policy has a say.
    """
    policy = config.policy
    if whole_tokens or policy.has_blocks:
        return infllm(layers, value_bytes, config, context_tokens, whole_tokens=whole_tokens)
    if policy is Policy.DENSE:
        return dense(layers, value_bytes, context_tokens)
    of_others = {Policy.H2O: h2o, Policy.INFINI: infini}
    return of_others.get(policy, streaming)(layers, value_bytes, config, context_tokens)


def blocks_of(config: MemoryConfig, context_tokens: int) -> int:
    """Sealed blocks per layer once a context has been read through the tiers."""
    surplus = context_tokens - config.sink_tokens - config.window_tokens
    return max(0, surplus // config.block_tokens)


def dense(layers: Sequence[LayerShape], value_bytes: int, context_tokens: int) -> Need:
    """Everything is kept on the device: `2 * layers * kv_heads * head_dim * tokens * bytes`."""
    total = 0
    for layer in layers:
        kept = min(context_tokens, layer.sliding_window or context_tokens)
        total += layer.values_per_token() * kept
    return Need("dense", "everything", total * value_bytes)


def streaming(
    layers: Sequence[LayerShape], value_bytes: int, config: MemoryConfig, context_tokens: int
) -> Need:
    """Sinks and window; the middle is gone (StreamingLLM, LM-Infinite: `policies.sink_window`).

    The window is as large as what others attend besides sinks, so that all see as many tokens.
    """
    sinks, reach = config.sink_tokens, config.budget_tokens - config.sink_tokens
    total = 0
    for layer, tiered in _with_kind(layers):
        if tiered:
            slots = min(context_tokens, sinks) + _reach_slots(config, context_tokens)
        else:
            slots = _sliding_slots(layer.sliding_window, config.chunk_tokens, context_tokens)
        total += layer.values_per_token() * slots * value_bytes
    infinite = config.policy is Policy.LM_INFINITE
    name = NAMES[Policy.LM_INFINITE if infinite else Policy.STREAMING_LLM]
    return Need(name, f"the first {sinks} and last {reach:,} tokens", total)


def h2o(
    layers: Sequence[LayerShape], value_bytes: int, config: MemoryConfig, context_tokens: int
) -> Need:
    """Sinks, window and heavy hitters; the rest is gone (`policies.h2o`)."""
    kept = min(context_tokens, config.budget_tokens)
    total = 0
    for layer, tiered in _with_kind(layers):
        if tiered:
            # Besides keys and values the mass that each has drawn, and its position.
            per_token = layer.values_per_token() * value_bytes + layer.kv_heads * (4 + 8)
            total += kept * per_token
        else:
            slots = _sliding_slots(layer.sliding_window, config.chunk_tokens, context_tokens)
            total += layer.values_per_token() * slots * value_bytes
    heavy = config.budget_tokens - config.sink_tokens - config.window_tokens
    attends = (
        f"{config.sink_tokens} + {config.window_tokens:,} tokens and the {heavy:,} attended most"
    )
    return Need(NAMES[Policy.H2O], attends, total)


def infini(
    layers: Sequence[LayerShape], value_bytes: int, config: MemoryConfig, context_tokens: int
) -> Need:
    """A segment, and a matrix per KV head for all before it (`policies.infini`): a constant."""
    total = 0
    for layer, tiered in _with_kind(layers):
        if tiered:
            # The memory, and what the segment so far will add to it, in float32.
            matrix = layer.kv_heads * layer.key_dim * (layer.value_dim + 1) * 4
            segment = config.infini_segment_tokens * layer.values_per_token() * value_bytes
            total += segment + 2 * matrix
        else:
            slots = _sliding_slots(layer.sliding_window, config.chunk_tokens, context_tokens)
            total += layer.values_per_token() * slots * value_bytes
    attends = f"a segment of {config.infini_segment_tokens:,} tokens and a matrix per KV head"
    return Need(NAMES[Policy.INFINI], attends, total)


def infllm(
    layers: Sequence[LayerShape],
    value_bytes: int,
    config: MemoryConfig,
    context_tokens: int,
    *,
    whole_tokens: int = 0,
) -> Need:
    """The memory as `infllm_cli.memory` builds it.

    Args:
        whole_tokens: room for a context that is attended whole; 0: through the tiers.
    """
    tiered = tiered_layers(layers)
    blocks = 0 if whole_tokens else blocks_of(config, context_tokens)
    lead = config.sink_tokens + config.most_blocks * config.block_tokens
    fixed = growing = host = reading = 0
    for layer in layers:
        if layer not in tiered:
            assert layer.sliding_window is not None
            slots = _sliding_slots(layer.sliding_window, config.chunk_tokens, context_tokens)
            fixed += slots * layer.values_per_token() * value_bytes
            continue
        slots = lead + whole_tokens if whole_tokens else _window_slots(config, context_tokens)
        # The window holds raw and rotated keys, values, and running sums of queries in float32
        # (by attention mass: one number for each key).
        fixed += slots * layer.kv_heads * (2 * layer.key_dim + layer.value_dim) * value_bytes
        if not whole_tokens:
            scores = {RepresentativeRule.DOT: layer.key_dim, RepresentativeRule.ATTENTION: 1}
            fixed += slots * layer.kv_heads * scores.get(config.representative_rule, 0) * 4
        cached = config.device_cache_blocks * config.block_tokens
        fixed += cached * layer.values_per_token() * value_bytes
        if blocks:
            fixed += config.sink_tokens * layer.values_per_token() * value_bytes
            mean = config.representative_rule is RepresentativeRule.MEAN
            keys = 1 if mean else config.representatives_per_block
            each = 0 if config.representatives_relevance is Relevance.SUM else keys
            per_block = 4 * layer.key_dim * (1 + each) + 2 * keys
            growing += blocks * layer.kv_heads * per_block
            host += layer.stored_bytes(config.codec, config, blocks, value_bytes)
            tail = min(blocks, config.segment_blocks)
            full = layer.stored_bytes(Codec.FULL, config, tail, value_bytes)
            reading += full - layer.stored_bytes(config.codec, config, tail, value_bytes)
    attends = (
        "everything: it fits the trained length"
        if whole_tokens
        else f"{config.sink_tokens} + {config.window_tokens:,} tokens and, of all others, the "
        f"{config.answer_blocks} blocks found by lookup"
    )
    paper = config.policy is Policy.INFLLM_PAPER
    name = NAMES[Policy.INFLLM_PAPER if paper else Policy.INFLLM]
    return Need(name, attends, fixed, growing, host, host_reading_bytes=reading)


def least_host_bytes(layers: Sequence[LayerShape], value_bytes: int, config: MemoryConfig) -> int:
    """Host memory without which blocks cannot move to disk: the segment that is being filled, and
    the one before it until it is written.
    """
    return sum(
        layer.stored_bytes(codec, config, config.segment_blocks, value_bytes)
        for layer in tiered_layers(layers)
        for codec in (Codec.FULL, config.codec)
    )


def saved_bytes(need: Need, config: MemoryConfig, layers: int, context_tokens: int) -> int:
    """Bytes of the files of a saved memory (`infllm_cli.saved`), at most."""
    segments = blocks_of(config, context_tokens) // config.segment_blocks + 1
    padding = PAGE * layers * (segments * TENSORS_OF_SEGMENT + TENSORS_OF_STATE)
    held = need.host_peak_bytes + need.device_bytes + need.device_growing_bytes
    return held + padding + HEADER_BYTES


def scan(
    layers: Sequence[LayerShape],
    value_bytes: int,
    config: MemoryConfig,
    context_tokens: int,
    *,
    group: int,
    has_device: bool,
    device_room: int,
    cores: int,
) -> Scan | None:
    """Where an answer's tokens meet the stored keys, and about how long each of them takes.

    Args:
        group: query heads of a KV head.
        has_device: whether the model is on a GPU.
        device_room: bytes of it that copies of the keys may take.
        cores: of the host.

    Returns:
        None where nothing is scanned: no blocks, or another lookup.
    """
    blocks = blocks_of(config, context_tokens)
    if not (blocks and config.policy.has_blocks and config.answer_lookup is Lookup.EXACT):
        return None
    tiered = tiered_layers(layers)
    size = config.block_tokens
    found = sum(
        blocks * codecs.key_bytes(config.codec, layer.kv_heads, size, layer.key_dim, value_bytes)
        for layer in tiered
    )
    numbers = sum(blocks * size * layer.kv_heads * layer.key_dim for layer in tiered)
    return estimate(
        found,
        numbers,
        group,
        has_device=has_device,
        device_room=device_room,
        cores=cores,
        layers=len(tiered),
    )


def fits_host_and_disk(needed: int, least: int, host: int, disk: int) -> bool:
    """Whether `needed` bytes of blocks fit `host` bytes of RAM, the rest `disk` bytes of disk."""
    return needed <= host or (least <= host and needed <= host + disk)


def tiered_layers(layers: Sequence[LayerShape]) -> list[LayerShape]:
    """The layers that keep blocks: all but the sliding ones, or all where every one slides."""
    full = [layer for layer in layers if layer.sliding_window is None]
    return full or list(layers)


def _with_kind(layers: Sequence[LayerShape]) -> list[tuple[LayerShape, bool]]:
    """Each layer, and whether the policy decides what it keeps."""
    tiered = tiered_layers(layers)
    return [(layer, layer in tiered) for layer in layers]


def _reach_slots(config: MemoryConfig, context_tokens: int) -> int:
    """Slots of the window buffer of `policies.sink_window`; sinks do not go into it."""
    reach = config.budget_tokens - config.sink_tokens

    def evicted(held: int, seen: int) -> int:
        return max(0, held - (reach - 1))

    return _slots(
        0, config.chunk_tokens, 2, reach, context_tokens, evicted, skipped=config.sink_tokens
    )


def _window_slots(config: MemoryConfig, context_tokens: int) -> int:
    """Slots of a layer's window buffer, as `memory.window` and `memory.tiered_store` grow it."""
    lead = config.sink_tokens + config.most_blocks * config.block_tokens
    kept_most = config.sink_tokens + config.window_tokens + config.block_tokens

    def evicted(held: int, seen: int) -> int:
        sinks = config.sink_tokens if seen == 0 else 0
        blocks = max(0, held - sinks - config.window_tokens) // config.block_tokens
        return sinks + blocks * config.block_tokens if blocks else 0

    return _slots(lead, config.chunk_tokens, 2, kept_most, context_tokens, evicted)


def _sliding_slots(sliding_window: int, chunk_tokens: int, context_tokens: int) -> int:
    def evicted(held: int, seen: int) -> int:
        return max(0, held - (sliding_window - 1))

    return _slots(0, chunk_tokens, 1, sliding_window, context_tokens, evicted)


def _slots(
    lead: int,
    chunk: int,
    slack_chunks: int,
    kept_most: int,
    tokens: int,
    evicted: Callable[[int, int], int],
    skipped: int = 0,
) -> int:
    """The capacity that a window's buffer grows to.

    Args:
        skipped: first tokens, which are kept elsewhere.
    """
    capacity = first = last = lead
    seen = read = 0
    # After a few windows the buffer has its final size.
    tokens = min(tokens, 4 * (lead + kept_most) + 8 * chunk)
    while read < tokens:
        length = min(chunk, tokens - read)
        read += length
        length = min(length, read - skipped)
        if length <= 0:
            continue
        if last + length > capacity:
            held = last - first
            needed = lead + held + length
            if needed > capacity:
                capacity = needed + slack_chunks * chunk
            first, last = lead, lead + held
        last += length
        gone = evicted(last - first, seen)
        first += gone
        seen += gone
    return capacity


def estimate_tokens(count: Callable[[str], int], text: str) -> int:
    """About how many tokens a long text has, by `count` on pieces spread evenly over it."""
    step = len(text) / _SAMPLES
    pieces = [text[int(i * step) : int(i * step) + _SAMPLE_CHARS] for i in range(_SAMPLES)]
    chars = sum(map(len, pieces))
    return round(sum(map(count, pieces)) * len(text) / max(chars, 1))
