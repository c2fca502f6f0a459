"""The tiered memory of one layer: a step attends sinks, window, and blocks found by lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.memory import lookup
from infllm_cli.memory.attended import note_tiers
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_cache import BlockSlots, DeviceCache
from infllm_cli.memory.knobs import CachePolicy, Positions, Relevance
from infllm_cli.memory.layer import HOST, LayerGeometry
from infllm_cli.memory.rotary import Table
from infllm_cli.memory.shortlist import Shortlist
from infllm_cli.memory.softmax import attend, attend_mass
from infllm_cli.memory.step import Phase, Step
from infllm_cli.memory.tiered_store import TieredStore
from infllm_cli.memory.two_distances import Keys, attend_two_distances


def sum_groups(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [H, L, d] summed over the heads that share a KV head -> [H_kv, L, d] float32.

    A few additions of whole tensors: a reduction over so short a dimension is slower.
    """
    groups = q.unflatten(0, (kv_heads, -1))
    total = groups[:, 0].float()
    for index in range(1, groups.shape[1]):
        total = total + groups[:, index]
    return total


def sum_queries(q: Tensor, kv_heads: int) -> Tensor:
    """Queries [H, L, d] summed over tokens and the heads that share a KV head -> [H_kv, d] float32.

    Over tokens first: one reduction over two separate dimensions is five times slower.
    """
    return q.sum(dim=1, dtype=torch.float32).unflatten(0, (kv_heads, -1)).sum(dim=1)


class LayerMemory(TieredStore):
    """Sinks and window on the layer's device, blocks in host memory (InfLLM, arXiv 2402.04617).

    Until the window overflows for the first time nothing is evicted and the result equals dense
    attention. `whole_tokens` lifts the window's limit to that many tokens, for documents that fit
    the trained length altogether; past it the memory turns to tiers.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        config: MemoryConfig,
        *,
        whole_tokens: int = 0,
        trained_length: int | None = None,
    ) -> None:
        super().__init__(geometry, config, whole_tokens=whole_tokens, trained_length=trained_length)
        g = geometry
        self.cache: BlockSlots | None = None
        if config.device_cache_blocks and not self.own_slots:
            shape = (g.kv_heads, config.block_tokens, g.head_dim, g.value_dim)
            self.cache = DeviceCache(
                config.device_cache_blocks, config.device_cache_policy, shape, g.dtype, g.device
            )
        self._same_distance = config.positions is Positions.SAME_DISTANCE
        self._placed: tuple[object, ...] = ()  # what lies in the slots before the window
        self._placed_blocks: Tensor | None = None
        self._shortlist: Shortlist | None = None  # while an answer is being written

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

            def attention(want_mass: bool) -> tuple[Tensor, Tensor | None]:
                parts = (far_q, rotated, lead_keys, near_keys, mask)
                return attend_two_distances(*parts, g.scaling, g.softcap, want_mass=want_mass)
        else:

            def attention(want_mass: bool) -> tuple[Tensor, Tensor | None]:
                given = (rotated, keys, values, mask, g.scaling, g.softcap)
                if want_mass:
                    return attend_mass(*given, causal=True)
                return attend(*given, causal=True), None

        out, drawn = attention(step.mass is not None or self.window.mass is not None)
        if drawn is None and blocks is not None and self._scores_cached:
            # On top: what is cached must not change a bit of what is computed.
            drawn = attention(True)[1]
        if drawn is not None:
            self._account(drawn, blocks, lead, step)
        if blocks is not None:
            step.loaded[g.index] = blocks
        self._evict(step)
        return out

    def _lookup(self, q: Tensor, step: Step) -> Tensor | None:
        reading = step.phase.reads
        # What is skimmed is compared with a question: it sees as many blocks.
        few = step.phase is Phase.READ
        wanted = self.config.read_blocks if few else self.config.answer_blocks
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
            else:
                query = g.rotary.rotate(sum_queries(q, g.kv_heads)[:, None], far)[:, 0]
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
        blocks, mass = self._exact(q, wanted)
        step.block_mass[g.index] = mass
        self._shortlist = self._listed(mass, wanted) if answering else None
        return blocks

    def _listed(self, mass: Tensor, wanted: int, *, native: bool = False) -> Shortlist | None:
        """The blocks that serve the next tokens, by the mass [H_kv, N] of a scan."""
        between = Shortlist.between(self.arena, self.config.scan_every, native=native)
        return Shortlist(self.arena, mass, wanted, between, native=native) if between else None

    def _exact(self, q: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """Blocks [H_kv, n] by all stored keys, and the mass [H_kv, N] of all: `lookup.exact`."""
        config = self.config
        ranks, sharing = config.exact_relevance, config.sharing
        return lookup.exact(q, self.arena, self.geometry.scaling, wanted, ranks, sharing)

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

    def _account(self, drawn: Tensor, blocks: Tensor | None, lead: int, step: Step) -> None:
        """Note what the mass [H, T] of this step tells of keys, blocks and positions."""
        per_key = drawn.unflatten(0, (self.geometry.kv_heads, -1)).sum(dim=1)  # [H_kv, T]
        if self.window.mass is not None:
            held = slice(self.window.first, self.window.last)
            self.window.mass[:, held, 0] += per_key[:, lead:]
        if self._scores_cached and blocks is not None:
            per_block = per_key[:, self.config.sink_tokens : lead].unflatten(
                1, (blocks.shape[1], -1)
            )
            self.cache.attended(blocks, per_block.sum(dim=-1))
        if step.mass is not None:
            size, start = self.config.block_tokens, self.window.start
            note_tiers(step, self.geometry.index, per_key, blocks, size, lead, start)

    # -- what follows the store ---------------------------------------------------------------

    def _forget_placed(self) -> None:
        self._placed, self._placed_blocks = (), None

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        super().rollback()
        if self.cache is not None:
            self.cache.forget_from(self.arena.count)
        # What a question loaded must not decide how the next one is computed.
        self._forget_placed()
        self._shortlist = None

    @property
    def device_bytes(self) -> int:
        """Bytes of window, scratch slots, sinks, representatives and cached blocks."""
        return super().device_bytes + (self.cache.nbytes if self.cache is not None else 0)
