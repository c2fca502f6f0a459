"""The tiered memory of one layer: sinks, local window, and blocks found by lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from infllm_cli.kernels.representative_scores import representative_scores
from infllm_cli.memory import lookup
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_cache import DeviceCache
from infllm_cli.memory.knobs import CachePolicy, Policy, Positions, Relevance, RepresentativeRule
from infllm_cli.memory.representatives import Representatives
from infllm_cli.memory.rotary import Rotary, Table
from infllm_cli.memory.shortlist import Shortlist
from infllm_cli.memory.softmax import attend, attend_weights
from infllm_cli.memory.step import Phase, Step
from infllm_cli.memory.two_distances import Keys, attend_two_distances
from infllm_cli.memory.window import Window

if TYPE_CHECKING:
    from infllm_cli.memory.device_blocks import DeviceBlocks

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What a layer's attention is made of, as seen on a probe through the model."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scaling: float
    softcap: float | None
    sliding_window: int | None
    rotary: Rotary
    dtype: torch.dtype
    device: torch.device


class Layer(Protocol):
    """What every memory policy implements, so that one reader and one test matrix serve all."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        ...

    def mark(self) -> None:
        """Remember this state: everything until `rollback` belongs to a question."""
        ...

    def rollback(self) -> None:
        """Return to the marked state."""
        ...

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens, so that growing need not copy."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes held on the layer's device."""
        ...

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes held in files that are mapped in."""
        ...


@dataclass(slots=True)
class _Mark:
    """A state to return to. Window slots are copied only when they are about to be lost."""

    start: int
    held: int
    blocks: int
    sinks: tuple[Tensor, Tensor] | None
    whole_tokens: int
    copied: Window | None = None


def sum_groups(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [H, L, d] summed over the heads that share a KV head -> [H_kv, L, d] float32.

    A few additions of whole tensors: a reduction over so short a dimension is slower.
    """
    groups = q.unflatten(0, (kv_heads, -1))
    total = groups[:, 0].float()
    for index in range(1, groups.shape[1]):
        total = total + groups[:, index]
    return total


class LayerMemory:
    """Sinks and window on the layer's device, blocks in host memory (InfLLM, arXiv 2402.04617).

    Until the window overflows for the first time nothing is evicted and the result equals dense
    attention. `whole_tokens` lifts the window's limit to that many tokens, for documents that fit
    the trained length altogether; past it the memory turns to tiers.
    """

    own_slots = False  # whether the blocks on the device are the subclass's affair

    def __init__(
        self,
        geometry: LayerGeometry,
        config: MemoryConfig,
        *,
        whole_tokens: int = 0,
        trained_length: int | None = None,
    ) -> None:
        g = geometry
        self.geometry = g
        self.config = config
        self.whole_tokens = whole_tokens
        # Tokens that the question holds back in the window may fill what the model was trained on.
        self.most_tokens = max(trained_length or config.context_tokens, config.context_tokens)
        rule = config.representative_rule
        lead = config.sink_tokens + config.most_blocks * config.block_tokens
        self.window = Window(
            g.kv_heads,
            g.head_dim,
            g.value_dim,
            lead=0 if self.own_slots else lead,
            dtype=g.dtype,
            device=g.device,
            keep_raw=True,
            keep_query_sums=whole_tokens == 0 and rule is RepresentativeRule.DOT,
            keep_mass=whole_tokens == 0 and rule is RepresentativeRule.ATTENTION,
        )
        self.arena = BlockArena(
            g.kv_heads,
            config.block_tokens,
            g.head_dim,
            g.value_dim,
            g.dtype,
            config.segment_blocks,
            config.codec,
        )
        self.representatives = Representatives(
            g.kv_heads,
            config.representatives_per_block,
            g.head_dim,
            g.device,
            rule,
            keep_each=config.representatives_relevance is not Relevance.SUM,
        )
        self.cache: DeviceCache | DeviceBlocks | None = None
        if config.device_cache_blocks and not self.own_slots:
            shape = (g.kv_heads, config.block_tokens, g.head_dim, g.value_dim)
            self.cache = DeviceCache(
                config.device_cache_blocks, config.device_cache_policy, shape, g.dtype, g.device
            )
        self._same_distance = config.positions is Positions.SAME_DISTANCE
        self.sinks: tuple[Tensor, Tensor] | None = None  # raw keys, values [H_kv, S, d]
        self._expected_tokens = 0
        self._placed: tuple[object, ...] = ()  # what lies in the slots before the window
        self._placed_blocks: Tensor | None = None
        self._shortlist: Shortlist | None = None  # while an answer is being written
        self._marks: list[_Mark] = []

    # -- one step ---------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        assert step.start == self.window.end, "a step begins where the last one ended"
        g = self.geometry
        self._make_room(step)
        table = step.table(g.rotary, step.start, step.length)
        # One call for both: for a single token the calls are what it costs.
        rotated, own = g.rotary.rotate(torch.cat([q, k]), table).split([g.heads, g.kv_heads])
        queries = None
        if self.window.query_sums is not None:
            queries = sum_groups(rotated, g.kv_heads)
        self.window.push(k, own, v, queries)
        blocks = self._lookup(q, step)
        lead = self._place(blocks, step)
        context = slice(self.window.first - lead, self.window.last)
        keys, values = self.window.rotated[:, context], self.window.values[:, context]
        # Positions are consecutive in the context: this is where the step's tokens stand in it.
        scale = g.rotary.query_scale(keys.shape[1] - step.length, step.length)
        if scale is not None:
            rotated = (rotated * scale).to(rotated.dtype)
        mask = step.mask(keys.shape[1], q)
        if self._same_distance and lead:
            far_q = g.rotary.rotate(q, step.table(g.rotary, self.config.window_tokens, 1))
            far_q = far_q if scale is None else (far_q * scale).to(far_q.dtype)
            lead_keys = Keys(keys[:, :lead], values[:, :lead])
            near_keys = Keys(keys[:, lead:], values[:, lead:])

            def attention(want_weights: bool) -> tuple[Tensor, Tensor | None]:
                parts = (far_q, rotated, lead_keys, near_keys, mask)
                return attend_two_distances(*parts, g.scaling, g.softcap, want_weights=want_weights)
        else:

            def attention(want_weights: bool) -> tuple[Tensor, Tensor | None]:
                given = (rotated, keys, values, mask, g.scaling, g.softcap)
                if want_weights:
                    return attend_weights(*given)
                return attend(*given, causal=True), None

        out, weights = attention(step.mass is not None or self.window.mass is not None)
        if weights is None and blocks is not None and self._scores_cached:
            # On top: what is cached must not change a bit of what is computed.
            weights = attention(True)[1]
        if weights is not None:
            self._account(weights, blocks, lead, step)
        if blocks is not None:
            step.loaded[g.index] = blocks
        self._evict(step)
        return out

    def _lookup(self, q: Tensor, step: Step) -> Tensor | None:
        reading = step.phase is Phase.READ
        wanted = self.config.read_blocks if reading else self.config.answer_blocks
        if self.arena.count == 0 or wanted == 0:
            return None
        g = self.geometry
        # Every stored key counts as one window away (same distance, as in the paper).
        far = step.table(g.rotary, self.config.window_tokens, 1)
        kind = self.config.read_lookup if reading else self.config.answer_lookup
        sharing = self.config.sharing
        if kind is Lookup.REPRESENTATIVES:
            missing = self.arena.missing()
            relevance = self.config.representatives_relevance
            if relevance is not Relevance.SUM:
                chosen = lookup.by_each_representative(
                    g.rotary.rotate(q, far),
                    self.representatives,
                    wanted,
                    relevance,
                    g.scaling,
                    missing,
                    sharing,
                )
                blocks = chosen.to(HOST)
                self.arena.note_use(blocks)
                return blocks
            # Over tokens first: one reduction over two separate dimensions is five times slower.
            summed = q.sum(dim=1, dtype=torch.float32).unflatten(0, (g.kv_heads, -1)).sum(dim=1)
            query = g.rotary.rotate(summed[:, None], far)[:, 0]
            chosen = lookup.by_representatives(
                query, self.representatives, wanted, missing, sharing
            )
            blocks = chosen.to(HOST)
            self.arena.note_use(blocks)
            return blocks
        q = g.rotary.rotate(q, far)
        answering = step.phase is Phase.ANSWER
        if answering and self._shortlist is not None and self._shortlist.serves(self.arena):
            return self._shortlist.best(lookup.fold(q, g.kv_heads, g.scaling), wanted)
        ranks = self.config.exact_relevance
        blocks, mass = lookup.exact(q, self.arena, g.scaling, wanted, ranks, sharing)
        step.block_mass[g.index] = mass
        between = self.config.scan_every - 1
        pays = answering and between and Shortlist.pays(self.arena)
        self._shortlist = Shortlist(self.arena, mass, wanted, between) if pays else None
        return blocks

    def _place(self, blocks: Tensor | None, step: Step) -> int:
        """Write sinks and blocks [H_kv, n] into the slots before the window; their tokens.

        Positions are consecutive: blocks end where the window starts, sinks where the blocks do;
        or, where all are to be at the same distance, keys stay un-rotated and the query is turned.
        """
        if self.sinks is None:
            assert blocks is None
            return 0
        g, window = self.geometry, self.window
        sink_tokens = self.config.sink_tokens
        block_tokens = 0 if blocks is None else blocks.shape[1] * self.config.block_tokens
        lead = sink_tokens + block_tokens
        placed = (window.first, window.start, block_tokens)
        same_place = placed == self._placed
        if self._same_distance:
            table = type(step.table(g.rotary, 0, 1))(
                *(x.expand(lead, -1) for x in step.table(g.rotary, 0, 1))
            )
        else:
            table = step.table(g.rotary, window.start - lead, lead)
        if not same_place:
            slots = slice(window.first - lead, window.first - block_tokens)
            keys, values = self.sinks
            head = type(table)(table.cos[:sink_tokens], table.sin[:sink_tokens])
            g.rotary.rotate(keys, head, out=window.rotated[:, slots])
            window.values[:, slots] = values
        if blocks is not None:
            tail = type(table)(table.cos[sink_tokens:], table.sin[sink_tokens:])
            self._load(blocks, tail, self._placed_blocks if same_place else None)
        self._placed, self._placed_blocks = placed, blocks
        return lead

    def _load(self, blocks: Tensor, table: Table, there: Tensor | None) -> None:
        """Write blocks [H_kv, n] into the slots before the window, but those that are `there`.

        From one answer token to the next most blocks stay where they are.
        """
        g, window = self.geometry, self.window
        chosen = blocks.shape[1]
        size = self.config.block_tokens
        slots = slice(window.first - chosen * size, window.first)
        keys, values = window.rotated[:, slots], window.values[:, slots]
        if there is not None and torch.equal(blocks, there):
            return
        if there is None or self.cache is not None:
            raw, new = self._fetch(blocks)
            g.rotary.rotate(raw.to(g.device, non_blocking=True), table, out=keys)
            values[:] = new.to(g.device, non_blocking=True)
            return
        heads, places = (blocks != there).nonzero(as_tuple=True)
        raw, new = self.arena.pick(heads, blocks[heads, places])  # [m, B, d]
        raw, new = raw.to(g.device, non_blocking=True), new.to(g.device, non_blocking=True)
        at = Table(*(part.unflatten(0, (chosen, size))[places] for part in table))
        keys.unflatten(1, (chosen, size))[heads, places] = g.rotary.rotate(raw, at)
        values.unflatten(1, (chosen, size))[heads, places] = new

    def _fetch(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, n * B, d] of blocks [H_kv, n]."""
        if self.cache is not None:
            assert isinstance(self.cache, DeviceCache)
            self.cache.follow(self.arena.sealed)
            return self.cache.fetch(blocks, self.arena.gather)
        return self.arena.gather(blocks)

    @property
    def _scores_cached(self) -> bool:
        """Whether blocks leave the device cache by the attention that they drew."""
        return self.cache is not None and self.cache.policy is CachePolicy.LRU_S

    def _account(self, weights: Tensor, blocks: Tensor | None, lead: int, step: Step) -> None:
        """Note what the weights [H_kv, G * L, T] of this step tell of keys, blocks, positions."""
        per_key = weights.sum(dim=1)  # [H_kv, T]
        if self.window.mass is not None:
            held = slice(self.window.first, self.window.last)
            self.window.mass[:, held, 0] += per_key[:, lead:]
        if self._scores_cached and blocks is not None:
            per_block = per_key[:, self.config.sink_tokens : lead].unflatten(
                1, (blocks.shape[1], -1)
            )
            self.cache.attended(blocks, per_block.sum(dim=-1))
        if step.mass is None:
            return
        per_key = per_key.to(step.mass.device)
        mass = step.mass
        if step.by_layer is not None:
            mass = step.by_layer[self.geometry.index] = torch.zeros_like(step.mass)
        window = self.window
        mass[window.start : window.end] += per_key[:, lead:].sum(dim=0)
        if lead:
            sink_tokens, size = self.config.sink_tokens, self.config.block_tokens
            mass[:sink_tokens] += per_key[:, :sink_tokens].sum(dim=0)
            if blocks is not None:
                positions = sink_tokens + blocks[..., None] * size + torch.arange(size)
                mass.index_add_(0, positions.flatten(), per_key[:, sink_tokens:lead].flatten())
        if step.by_layer is not None:
            step.mass += mass

    # -- eviction ---------------------------------------------------------------------------

    def _make_room(self, step: Step) -> None:
        held = len(self.window)
        if self.whole_tokens and held + step.length > self.whole_tokens:
            # Outgrown: from now on a window of the usual size, and tiers.
            self.whole_tokens = 0
            self._evict(step)
        if self.window.last + step.length > self.window.rotated.shape[1]:
            self._before_loss()
            # The window moves, maybe into new memory: what was placed before it is gone, even
            # where it comes to stand at the same slot.
            self._placed, self._placed_blocks = (), None
        if self.whole_tokens:
            # One allocation for the whole document instead of a growing one.
            slack = max(0, self._expected_tokens - held - step.length)
        else:
            slack = 2 * self.config.chunk_tokens
        self.window.make_room(step.length, slack)

    def _evict(self, step: Step) -> None:
        """Seal the oldest whole blocks of a window that is longer than it should be."""
        config = self.config
        held = len(self.window)
        if self.whole_tokens:
            return
        sinks = config.sink_tokens if self.sinks is None else 0
        surplus = held - sinks - config.window_tokens
        if step.keep_from is not None:
            # The question stays in the window, unless the context would outgrow the training.
            free = step.keep_from - self.window.start - sinks
            lead = config.sink_tokens + config.most_blocks * config.block_tokens
            reach = held + lead + config.block_tokens + config.chunk_tokens
            forced = reach - self.most_tokens
            surplus = min(surplus, max(free, forced))
        self._evict_blocks(surplus // config.block_tokens)

    def _evict_blocks(self, blocks: int) -> None:
        """Move the window's oldest blocks (and before them the sinks) out of it."""
        if blocks <= 0:
            return
        config = self.config
        self._before_loss()
        window = self.window
        if self.sinks is None:
            slots = slice(window.first, window.first + config.sink_tokens)
            self.sinks = (window.raw[:, slots].clone(), window.values[:, slots].clone())
            window.drop(config.sink_tokens)
        tokens = blocks * config.block_tokens
        slots = slice(window.first, window.first + tokens)
        keys, values = window.raw[:, slots], window.values[:, slots]
        self.representatives.append(keys, self._scores(tokens), config.block_tokens)
        self.arena.append(keys, values)
        window.drop(tokens)

    @torch.inference_mode()
    def seal(self) -> None:
        """Turn all of the window but a rest of less than a block into blocks.

        The published method does no such thing.
        """
        if self.config.policy is Policy.INFLLM_PAPER:
            return
        if not self.whole_tokens and self.sinks is not None:
            self._evict_blocks(len(self.window) // self.config.block_tokens)

    def _scores(self, tokens: int) -> Tensor:
        """Representative scores [H_kv, tokens] of the window's oldest tokens."""
        window = self.window
        if window.mass is not None:
            return window.mass[:, window.first : window.first + tokens, 0]
        rotated = window.rotated[:, window.first : window.first + tokens]
        if window.query_sums is None:
            # A document that was attended whole is only asked from now on, and asking scores every
            # key: the choice is free. Key length is a cheap stand-in.
            return rotated.float().square().sum(dim=-1)
        followers = min(self.config.window_tokens, len(window) - tokens)
        if followers <= 0:
            return rotated.float().square().sum(dim=-1)
        prefix = window.query_sums[:, window.first : window.last]
        return representative_scores(prefix, rotated, followers)

    def stretch(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Un-rotated keys and values [H_kv, last - first, d] of positions, wherever held."""
        assert 0 <= first < last <= self.window.end and self.window.raw is not None
        sinks = self.config.sink_tokens if self.sinks is not None else 0
        begin = self.window.start
        parts = []
        if first < sinks:
            assert self.sinks is not None
            parts.append([tensor[:, first : min(last, sinks)] for tensor in self.sinks])
        if first < begin and last > sinks:
            parts.append(self.arena.stretch(max(first, sinks) - sinks, min(last, begin) - sinks))
        if last > begin:
            at = slice(
                self.window.first + max(first, begin) - begin, self.window.first + last - begin
            )
            parts.append([self.window.raw[:, at], self.window.values[:, at]])
        if len(parts) == 1:
            return parts[0][0], parts[0][1]
        keys, values = zip(*parts, strict=True)
        return (
            torch.cat([part.to(HOST) for part in keys], dim=1),
            torch.cat([part.to(HOST) for part in values], dim=1),
        )

    # -- questions leave no trace --------------------------------------------------------------

    def mark(self) -> None:
        """Remember this state: everything until `rollback` belongs to a question.

        Marks can be nested: a question within a conversation.
        """
        w = self.window
        self._marks.append(_Mark(w.start, len(w), self.arena.count, self.sinks, self.whole_tokens))
        self.arena.temporary = True

    def _before_loss(self) -> None:
        """Copy the window before slots of the marked state are moved or given up."""
        # The last mark's copy holds what the marks before it need, if nothing was lost since them.
        if self._marks and self._marks[-1].copied is None:
            copied = self.window.copy()
            copied.last = copied.first + self._marks[-1].held
            self._marks[-1].copied = copied

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        mark = self._marks.pop()
        if mark.copied is not None:
            self.window = mark.copied
        else:
            assert self.window.start == mark.start
            self.window.last = self.window.first + mark.held
        self.arena.truncate(mark.blocks)
        self.arena.temporary = bool(self._marks)
        self.representatives.truncate(mark.blocks)
        if self.cache is not None:
            self.cache.forget_from(mark.blocks)
        self.sinks = mark.sinks
        self.whole_tokens = mark.whole_tokens
        # What a question loaded must not decide how the next one is computed.
        self._placed, self._placed_blocks = (), None
        self._shortlist = None

    # -- sizes --------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens, so that growing need not copy."""
        self._expected_tokens = tokens

    @property
    def device_bytes(self) -> int:
        """Bytes of window, scratch slots, sinks and representatives."""
        sinks = sum(t.nbytes for t in self.sinks) if self.sinks else 0
        cached = self.cache.nbytes if self.cache is not None else 0
        return self.window.nbytes + sinks + self.representatives.used_bytes + cached

    @property
    def host_bytes(self) -> int:
        """Bytes of the sealed blocks in host memory."""
        return self.arena.host_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the sealed blocks in files that are mapped in."""
        return self.arena.mapped_bytes
