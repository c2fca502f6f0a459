"""What a layer keeps in which tier, and how tokens move from one to the next.

Sinks and the local window are on the layer's device; what the window gives up is sealed into blocks
in host memory. A question leaves no trace: `mark` and `rollback`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infllm_cli.kernels.representative_scores import representative_scores
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Policy, Relevance, RepresentativeRule
from infllm_cli.memory.layer import HOST, LayerGeometry
from infllm_cli.memory.representatives import Representatives
from infllm_cli.memory.step import Step
from infllm_cli.memory.window import Window


@dataclass(slots=True)
class _Mark:
    """A state to return to. Window slots are copied only when they are about to be lost."""

    start: int
    held: int
    blocks: int
    sinks: tuple[Tensor, Tensor] | None
    whole_tokens: int
    copied: Window | None = None


class TieredStore:
    """Sinks, window, blocks and their representatives of one layer.

    Args:
        whole_tokens: the window holds that many tokens before anything is evicted, for documents
            that fit the trained length altogether; past it the memory turns to tiers.
        trained_length: what a question may fill that stays in the window.
    """

    own_slots = False  # whether loaded blocks lie elsewhere than in slots before the window

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
        self.sinks: tuple[Tensor, Tensor] | None = None  # raw keys, values [H_kv, S, d]
        self._expected_tokens = 0
        self._marks: list[_Mark] = []

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
            self._forget_placed()
        if self.whole_tokens:
            # One allocation for the whole document instead of a growing one.
            slack = max(0, self._expected_tokens - held - step.length)
        else:
            slack = 2 * self.config.chunk_tokens
        self.window.make_room(step.length, slack)

    def _forget_placed(self) -> None:
        """The slots before the window are not what they were; for those who fill them."""

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
        self.sinks = mark.sinks
        self.whole_tokens = mark.whole_tokens

    # -- sizes --------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens, so that growing need not copy."""
        self._expected_tokens = tokens

    @property
    def device_bytes(self) -> int:
        """Bytes of window, scratch slots, sinks and representatives."""
        sinks = sum(t.nbytes for t in self.sinks) if self.sinks else 0
        return self.window.nbytes + sinks + self.representatives.used_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the sealed blocks in host memory."""
        return self.arena.host_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the sealed blocks in files that are mapped in."""
        return self.arena.mapped_bytes
