"""The tiered memory of a layer on a CPU, with the one token of an answer computed in C.

Such a step moves little, and as torch operations it would be spent on calling them: here it is five
calls. Whatever the functions do not know (other codecs, policies, positions) is left to
`LayerMemory`, part by part.
"""

from __future__ import annotations

from ctypes import byref, sizeof

import torch
from torch import Tensor

from infllm_cli.kernels.native.choice import NativeKernels
from infllm_cli.kernels.native.library import (
    MOST_DIM,
    LayerArgument,
    Native,
    PartArgument,
    work_floats,
)
from infllm_cli.memory.attended import add_mass, mass_of
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Lookup, Positions, Relevance, Sharing
from infllm_cli.memory.layer import HOST, LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.lookup import fold
from infllm_cli.memory.native_parts import NativeParts
from infllm_cli.memory.shortlist import Shortlist
from infllm_cli.memory.step import Phase, Step


def suits(geometry: LayerGeometry, config: MemoryConfig) -> bool:
    """Whether some step of such a layer can be computed in C."""
    g = geometry
    return (
        g.device == HOST
        and g.dtype is torch.bfloat16
        and g.softcap is None
        and g.rotary.scale_beta == 0.0
        and max(g.head_dim, g.value_dim) <= MOST_DIM
        and not config.device_cache_blocks
        and config.positions is Positions.CONSECUTIVE
    )


class NativeLayer(LayerMemory):
    """`LayerMemory` that computes one token of an answer in C, where there is a compiler.

    Args:
        kernels: where the functions are.
    """

    def __init__(
        self,
        geometry: LayerGeometry,
        config: MemoryConfig,
        kernels: NativeKernels,
        *,
        whole_tokens: int = 0,
        trained_length: int | None = None,
    ) -> None:
        super().__init__(geometry, config, whole_tokens=whole_tokens, trained_length=trained_length)
        g = geometry
        self._kernels = kernels
        self._native: Native | None = None
        self._argument: LayerArgument | None = None
        self._buffer: Tensor | None = None  # of the window that the argument tells of
        self._parts = NativeParts()
        # Scans know one query per head, one softmax over all blocks, and the best per KV head.
        self._scans = (
            config.answer_lookup is Lookup.EXACT
            and config.exact_relevance is Relevance.MASS
            and config.sharing is Sharing.PER_KV_HEAD
        )
        self._rotated = torch.empty(g.heads, g.head_dim, dtype=g.dtype)
        self._folded = torch.empty_like(self._rotated)

    # -- one step ---------------------------------------------------------------------------

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], all un-rotated -> out [H, L, d]."""
        if not self._serves(step):
            return super().attend(q, k, v, step)
        assert step.start == self.window.end, "a step begins where the last one ended"
        self._make_room(step)
        self._push(q, k, v, step)
        blocks = self._look(q, step)
        lead = self._load_changed(blocks, step)
        out = self._attend_slots(blocks, lead, step)
        if blocks is not None:
            step.loaded[self.geometry.index] = blocks
        self._evict(step)
        return out

    def _serves(self, step: Step) -> bool:
        """Whether this step is for the functions, and they are there."""
        if step.length != 1 or step.phase.reads or self.window.mass is not None:
            return False
        return self._is_there() and step.mass is not None

    def _is_there(self) -> bool:
        """Whether the functions run here."""
        if self._native is None:
            self._native = self._kernels.get()
            if self._native is not None:
                self._argument = self._new_argument(self._native)
        return self._native is not None

    def _new_argument(self, native: Native) -> LayerArgument:
        g, config = self.geometry, self.config
        return native.layer(
            (g.heads, g.kv_heads, g.head_dim, g.value_dim),
            half=len(g.rotary.inv_freq),
            interleaved=g.rotary.interleaved,
            block_tokens=config.block_tokens,
            scaling=g.scaling,
        )

    def _push(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> None:
        """Append the token to the window; its queries, rotated, to `_rotated` and `_folded`."""
        g, window = self.geometry, self.window
        self._place_window()
        at = step.table(g.rotary, step.start, 1)
        far = step.table(g.rotary, self.config.window_tokens, 1)
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        self._native.begin(
            byref(self._argument),
            window.last,
            window.first,
            *(part for x in (q, k, v) for part in (x.data_ptr(), x.stride(0))),
            *(x.data_ptr() for x in (*at, *far)),
            self._rotated.data_ptr(),
            self._folded.data_ptr(),
        )
        window.last += 1

    def _place_window(self) -> None:
        window = self.window
        if self._buffer is not window.rotated:
            self._buffer = window.rotated
            buffers = (window.rotated, window.values, window.raw, window.query_sums)
            self._native.place(self._argument, *buffers)

    def _look(self, q: Tensor, step: Step) -> Tensor | None:
        """Blocks [H_kv, n] that join the attention, by a scan of all stored keys."""
        arena, wanted = self.arena, self.config.answer_blocks
        if arena.count == 0 or wanted == 0:
            return None
        if not self._scans or not self._parts.follow(arena):
            return self._lookup(q, step)
        rows = self.geometry.heads // self.geometry.kv_heads
        if self._shortlist is not None and self._shortlist.serves(self.arena):
            return self._scan_listed(self._shortlist, rows, wanted)
        blocks, mass = self._scan(self._folded, rows, wanted)
        step.block_mass[self.geometry.index] = mass
        self._shortlist = None
        if step.phase is Phase.ANSWER:
            self._shortlist = self._listed(mass, wanted, native=True)
        return blocks

    def _scan_listed(self, listed: Shortlist, rows: int, wanted: int) -> Tensor:
        """As `_scan` of a token's queries, among listed blocks [H_kv, C] alone."""
        kv_heads, count = listed.blocks.shape
        chosen = min(wanted, count)
        layer = byref(self._argument)
        lse, peak = torch.empty(2, kv_heads, rows, count).unbind()
        mass = torch.empty(kv_heads, count)
        places = torch.empty(kv_heads, chosen, dtype=torch.int64)
        self._native.scan_listed(
            layer,
            self._parts.table,
            self._parts.count,
            listed.take().data_ptr(),
            count,
            self._folded.data_ptr(),
            rows,
            lse.data_ptr(),
            peak.data_ptr(),
        )
        self._native.choose(
            layer, lse.data_ptr(), rows, count, chosen, mass.data_ptr(), places.data_ptr()
        )
        return listed.blocks.gather(1, places)

    def _exact(self, q: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
        """As `LayerMemory` has it: a question's tokens are only more rows of the same scan."""
        if not self._scans or not self._is_there() or not self._parts.follow(self.arena):
            return super()._exact(q, wanted)
        folded = fold(q, self.geometry.kv_heads, self.geometry.scaling).contiguous()
        return self._scan(folded, folded.shape[1], wanted)

    def _scan(self, folded: Tensor, rows: int, wanted: int) -> tuple[Tensor, Tensor]:
        """Blocks [H_kv, n] and mass [H_kv, N] for queries [H_kv, rows, d], scaled."""
        kv_heads, count = self.geometry.kv_heads, self.arena.count
        native, layer, chosen = self._native, byref(self._argument), min(wanted, count)
        lse, peak = torch.empty(2, kv_heads, rows, count).unbind()
        mass = torch.empty(kv_heads, count)
        blocks = torch.empty(kv_heads, chosen, dtype=torch.int64)
        queries, scores = folded.data_ptr(), (lse.data_ptr(), peak.data_ptr())
        for first, parts, column in self._parts.stretches():
            table = byref(self._parts.table, first * sizeof(PartArgument))
            native.scan(layer, table, parts, queries, rows, column, count, *scores)
        native.choose(layer, scores[0], rows, count, chosen, mass.data_ptr(), blocks.data_ptr())
        return blocks, mass

    def _load_changed(self, blocks: Tensor | None, step: Step) -> int:
        """As `_place`: what is there already stays."""
        window, config = self.window, self.config
        size = 0 if blocks is None else blocks.shape[1] * config.block_tokens
        placed = (window.first, window.start, size)
        there = self._placed_blocks
        if placed != self._placed or there is None or not self._parts.follow(self.arena):
            return self._place(blocks, step)
        lead = config.sink_tokens + size
        rotary = self.geometry.rotary
        table = step.table(rotary, window.start - lead, lead)
        skipped = config.sink_tokens * len(rotary.inv_freq) * table.cos.itemsize
        self._native.load(
            byref(self._argument),
            self._parts.table,
            self._parts.count,
            blocks.data_ptr(),
            there.data_ptr(),
            blocks.shape[1],
            window.first,
            table.cos.data_ptr() + skipped,
            table.sin.data_ptr() + skipped,
        )
        self._placed_blocks = blocks
        return lead

    def _attend_slots(self, blocks: Tensor | None, lead: int, step: Step) -> Tensor:
        """Attention [H, 1, d_v] over sinks, blocks and window; what they drew goes to the step."""
        g, window, layer = self.geometry, self.window, byref(self._argument)
        first, keys = window.first - lead, lead + len(window)
        out = torch.empty(g.heads, 1, g.value_dim, dtype=g.dtype)
        per_key = torch.empty(g.kv_heads, keys)
        work = torch.empty(work_floats(g.heads, keys, g.value_dim))
        pointers = (out.data_ptr(), per_key.data_ptr(), work.data_ptr())
        self._native.attend(layer, self._rotated.data_ptr(), first, keys, *pointers)
        mass = mass_of(step, g.index)
        chosen = (None, 0) if blocks is None else (blocks.data_ptr(), blocks.shape[1])
        sinks = lead - chosen[1] * self.config.block_tokens
        tiers = (*chosen, sinks, window.start)
        self._native.note(layer, per_key.data_ptr(), keys, *tiers, mass.data_ptr())
        add_mass(step, mass)
        return out

    def rollback(self) -> None:
        """Return to the state that was marked last."""
        super().rollback()
        self._parts.forget()
