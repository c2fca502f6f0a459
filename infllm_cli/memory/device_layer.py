"""The tiered memory of a layer on a GPU: `LayerMemory` with everything read where it lies.

Sinks, slots and window are attended in one kernel; blocks are chosen on the device, where the
representatives and, if there is room, the stored keys are. Which blocks these are must be known to
the host before it can send them: a few numbers per step and layer, the only thing it waits for.

While a layer computes, the next one's blocks are on their way: those that it ranked highest in the
step before. That is a guess. The lookup decides, what the guess missed is fetched, and so the
result is the same with or without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.block_relevance import block_relevance
from infllm_cli.kernels.segment_lookup import segment_lookup
from infllm_cli.kernels.tiered_attention import Mass, Tiers, tiered_attention
from infllm_cli.memory import lookup
from infllm_cli.memory.attended import note_tiers
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_arena import DeviceArena
from infllm_cli.memory.device_blocks import DeviceBlocks
from infllm_cli.memory.device_keys import DeviceKeys, stream
from infllm_cli.memory.device_path import DevicePath
from infllm_cli.memory.knobs import CachePolicy, Relevance
from infllm_cli.memory.layer import HOST, LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory, sum_groups, sum_queries
from infllm_cli.memory.scan_cost import Place, estimate
from infllm_cli.memory.shortlist import Shortlist
from infllm_cli.memory.step import Phase, Step


class DeviceLayer(LayerMemory):
    """Sinks, window and some blocks on the layer's device, all blocks in pinned host memory.

    Attributes:
        following: the layer that computes next, whose blocks are fetched meanwhile.
        scanned: where the stored keys were scanned last; None: they were not.
    """

    own_slots = True

    def __init__(
        self,
        geometry: LayerGeometry,
        config: MemoryConfig,
        path: DevicePath,
        *,
        whole_tokens: int = 0,
        trained_length: int | None = None,
    ) -> None:
        super().__init__(geometry, config, whole_tokens=whole_tokens, trained_length=trained_length)
        g = geometry
        self.path = path
        self.transfers = path.transfers(g.device)
        self.arena = DeviceArena(
            g.kv_heads,
            config.block_tokens,
            g.head_dim,
            g.value_dim,
            g.dtype,
            config.segment_blocks,
            config.codec,
            self.transfers,
        )
        self.cache: DeviceBlocks | None = None  # made when the first block is looked up
        self.keys = DeviceKeys(self.transfers, path.budget(g.device))
        self.following: DeviceLayer | None = None
        self.scanned: Place | None = None
        self._predicted: list[list[int]] = []
        empty = torch.empty(g.kv_heads, 0, g.head_dim, dtype=g.dtype, device=g.device)
        values = torch.empty(g.kv_heads, 0, g.value_dim, dtype=g.dtype, device=g.device)
        self._no_sinks = (empty, values)
        self._no_slots = torch.zeros(g.kv_heads, 0, dtype=torch.int32, device=g.device)

    # -- one step ---------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        assert step.start == self.window.end, "a step begins where the last one ended"
        self._make_room(step)
        if self.whole_tokens:  # nothing is evicted, nothing looked up
            return super().attend(q, k, v, step)
        g, window, config = self.geometry, self.window, self.config
        table = step.table(g.rotary, step.start, step.length)
        rotated = g.rotary.rotate(q, table)
        queries = None
        if window.query_sums is not None:
            queries = sum_groups(rotated, g.kv_heads)
        window.push(k, g.rotary.rotate(k, table), v, queries)
        blocks = self._lookup(q, step)
        tiers = self._tiers(blocks, step)
        scale = g.rotary.query_scale(tiers.keys - step.length, step.length)
        if scale is not None:
            rotated = (rotated * scale).to(rotated.dtype)
        mass: Mass = "none"
        if step.mass is not None or window.mass is not None:
            mass = "keys"
        elif blocks is not None and config.device_cache_policy is CachePolicy.LRU_S:
            mass = "blocks"
        out, drawn = tiered_attention(rotated, tiers, g.scaling, g.softcap, mass)
        if self.cache is not None:
            self.cache.used()
        if drawn is not None:
            self._note(drawn, mass, blocks, tiers.lead, step)
        if blocks is not None:
            step.loaded[g.index] = blocks
        if self.following is not None:
            self.following.fetch_predicted()
        self._evict(step)
        return out

    def _tiers(self, blocks: Tensor | None, step: Step) -> Tiers:
        """What the step attends, blocks [H_kv, n] brought to the device."""
        g, window, config = self.geometry, self.window, self.config
        slots, sinks = self._no_slots, self.sinks or self._no_sinks
        shape = (g.kv_heads, config.block_tokens, g.head_dim, g.value_dim)
        if self.cache is None and blocks is not None:
            self.cache = DeviceBlocks(
                config.gpu_slots,
                config.device_cache_policy,
                shape,
                g.dtype,
                self.transfers,
                self.path.native,
            )
        if blocks is not None:
            assert self.cache is not None
            slots = self.cache.place(blocks, self.arena)
        lead = sinks[0].shape[1] + slots.shape[1] * config.block_tokens
        table = step.table(g.rotary, window.start - lead, lead)
        held = slice(window.first, window.last)
        if self.cache is None:
            slot_keys, slot_values = (x.new_empty(0, shape[1], x.shape[2]) for x in sinks)
        else:
            slot_keys, slot_values = self.cache.keys, self.cache.values
        return Tiers(
            *sinks,
            slot_keys,
            slot_values,
            slots,
            window.rotated[:, held],
            window.values[:, held],
            *table,
            g.rotary.interleaved,
        )

    def fetch_predicted(self) -> None:
        """Bring blocks that the next step will probably want."""
        if self.cache is not None and self._predicted and not self.whole_tokens:
            self.cache.prefetch(self._predicted, self.arena)
            self._predicted = []

    # -- lookup -------------------------------------------------------------------------------

    def _lookup(self, q: Tensor, step: Step) -> Tensor | None:
        config, g = self.config, self.geometry
        reading = step.phase.reads
        wanted = config.read_blocks if step.phase is Phase.READ else config.answer_blocks
        if self.arena.count == 0 or wanted == 0:
            return None
        far = step.table(g.rotary, config.window_tokens, 1)
        kind = config.read_lookup if reading else config.answer_lookup
        if kind is Lookup.EXACT:
            rotated = g.rotary.rotate(q, far)
            answering = step.phase is Phase.ANSWER
            if answering and self._shortlist is not None and self._shortlist.serves(self.arena):
                folded = lookup.fold(rotated, g.kv_heads, g.scaling)
                return self._shortlist.best(folded, wanted)
            found, mass = self._exact(rotated)
            between = Shortlist.between(self.arena, config.scan_every) if answering else 0
            listed = Shortlist(self.arena, mass.to(HOST), wanted, between) if between else None
            self._shortlist = listed
            step.deferred.append(lambda: step.block_mass.update({g.index: mass.to(HOST)}))
        else:
            found = self._by_representatives(q, far)
        found = lookup.shared(found, config.sharing)
        # Chosen by itself, as elsewhere: of equals another number may come first among more.
        blocks = lookup.top_blocks(found, wanted)
        chosen = blocks.shape[-1]
        if more := self.path.options.predicted_blocks:
            best = found.topk(min(wanted + more, found.shape[-1]), dim=-1).indices
            blocks = torch.cat([blocks, best], dim=-1)
        blocks = blocks.to(HOST)  # the host waits here
        self._predicted = blocks[:, chosen:].tolist() if more else []
        blocks = blocks[:, :chosen].contiguous()
        if kind is Lookup.REPRESENTATIVES:
            self.arena.note_use(blocks)
        return blocks

    def _by_representatives(self, q: Tensor, far: tuple[Tensor, Tensor]) -> Tensor:
        """Relevance [H_kv, N]."""
        g, kept = self.geometry, self.representatives
        missing = self.arena.missing()
        if missing is not None:
            missing = missing.to(g.device)
        rule = self.config.representatives_relevance
        if rule is Relevance.SUM:
            query = g.rotary.rotate(sum_queries(q, g.kv_heads)[:, None], far)
            return block_relevance(query, kept.key_sum[:, : kept.count, None], "sum", missing)
        assert kept.each_key is not None
        queries = g.rotary.rotate(q, far).float().reshape(g.kv_heads, -1, g.head_dim) * g.scaling
        return block_relevance(queries, kept.each_key[:, : kept.count], rule.value, missing)

    def _exact(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What blocks are chosen by, [H_kv, N], and their mass [H_kv, N] on the host."""
        g, arena = self.geometry, self.arena
        rule = self.config.exact_relevance
        place = self.choose_scan(q.shape[1] * (g.heads // g.kv_heads))
        if rule is Relevance.SUM:  # linear: the host needs one query for it
            place = Place.HOST
        self.scanned = place
        if place is Place.HOST:
            if self.keys.nbytes:
                self.keys.drop()
            return lookup.exact_relevance(q, arena, g.scaling, rule)
        folded = (q.float() * g.scaling).to(q.dtype).reshape(g.kv_heads, -1, g.head_dim)
        if place is Place.DEVICE:
            lse, peak = segment_lookup(folded, self.keys.tables(arena), arena.count)
        else:
            lse, peak = stream(folded, arena, self.transfers)
        mass = block_mass(lse)
        return (mass if rule is Relevance.MASS else peak.sum(dim=1)), mass

    def choose_scan(self, rows: int) -> Place:
        """Where so many queries of each KV head meet the stored keys for the least time."""
        if self.path.options.scan is not None:
            return self.path.options.scan
        g = self.geometry
        needed = self.keys.needs(self.arena)
        numbers = self.arena.count * g.kv_heads * self.config.block_tokens * g.head_dim
        return estimate(
            needed,
            numbers,
            rows,
            has_device=True,
            cores=torch.get_num_threads(),
            device_room=self.path.budget(g.device).room(self.keys.nbytes),
        ).place

    # -- what attention tells -------------------------------------------------------------------

    def _note(
        self, drawn: Tensor, mass: Mass, blocks: Tensor | None, lead: int, step: Step
    ) -> None:
        """Note what the mass of keys [H_kv, T] or blocks [H_kv, n] tells.

        On a GPU the numbers are still to be computed: the host looks at them after the step.
        """
        g, config, window = self.geometry, self.config, self.window
        sinks = config.sink_tokens if self.sinks is not None else 0
        per_block = None
        if blocks is not None and config.device_cache_policy is CachePolicy.LRU_S:
            per_block = drawn
            if mass == "keys":
                per_block = drawn[:, sinks:lead].unflatten(1, (blocks.shape[1], -1)).sum(dim=-1)
        if window.mass is not None:
            window.mass[:, window.first : window.last, 0] += drawn[:, lead:]
        start = window.start

        def later() -> None:
            if per_block is not None:
                assert self.cache is not None and blocks is not None
                self.cache.attended(blocks, per_block.to(HOST))
            if step.mass is not None:
                note_tiers(step, g.index, drawn, blocks, config.block_tokens, lead, start)

        step.deferred.append(later)

    # -- questions leave no trace --------------------------------------------------------------

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        super().rollback()
        self.keys.truncate(self.arena.count)
        self._predicted = []

    @property
    def device_bytes(self) -> int:
        """Bytes of window, sinks, representatives, slots and copied keys."""
        return super().device_bytes + self.keys.nbytes
