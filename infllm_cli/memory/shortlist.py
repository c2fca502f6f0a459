"""The blocks that an answer is likely to need next: scored at every token, while a scan of all
stored keys is repeated only every few.

A scan grows with the document, an answer's interest hardly moves from one token to the next. What
the last scan ranked highest is listed, a few times as many blocks as join the attention, and the
next tokens choose among these. In torch they are kept unpacked, which for short memories costs more
than a scan; in C they are scored where they lie, and so more of them are listed.
"""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.exact_lookup import exact_lookup
from infllm_cli.memory.blocks import BlockArena

PER_LOADED = 2  # blocks listed for each one that joins the attention
PER_LOADED_NATIVE = 8  # the same in C
LEAST_BLOCKS = 192  # 24K tokens: where the two cost the same
# Where nothing is said, what is computed in C scans every so many tokens from so many blocks on,
# 24K tokens: there the scan is a quarter of the step. Of 36 answers on a novel 33 stay
# word for word with 2, and 30 with 4, which makes a right one wrong.
AUTO_EVERY = 2
AUTO_BLOCKS = 192


class Shortlist:
    """Blocks [H_kv, C] of one layer, in document order, with their keys.

    Args:
        mass: [H_kv, N], what each block was worth in the last scan.
        blocks: how many will join the attention of a step.
        tokens: how many answer tokens it may serve.
        native: whether listed blocks are scored where they lie.
    """

    def __init__(
        self, arena: BlockArena, mass: Tensor, blocks: int, tokens: int, *, native: bool = False
    ) -> None:
        most = (PER_LOADED_NATIVE if native else PER_LOADED) * blocks
        listed = mass.topk(min(most, mass.shape[1]), dim=1).indices
        self.blocks = listed.sort(dim=1).values
        self.count = arena.count
        self.left = tokens
        self._arena = arena

    @staticmethod
    def between(arena: BlockArena, scan_every: int, *, native: bool = False) -> int:
        """How many tokens a list serves behind a scan; 0: none is made.

        Where blocks were dropped, their places are not listed.

        Args:
            scan_every: as of `MemoryConfig`.
            native: as of the list.
        """
        if scan_every == 0:
            scan_every = AUTO_EVERY if native and arena.count >= AUTO_BLOCKS else 1
        pays = arena.count >= (1 if native else LEAST_BLOCKS) and not arena.dropped
        return scan_every - 1 if pays else 0

    def serves(self, arena: BlockArena) -> bool:
        """Whether it may be asked once more, and no block has been added."""
        return self.left > 0 and self.count == arena.count

    def take(self) -> Tensor:
        """The blocks [H_kv, C], for one token."""
        self.left -= 1
        return self.blocks

    @cached_property
    def _keys(self) -> Tensor:
        return self._arena.gather_keys(self.blocks)

    def best(self, folded: Tensor, wanted: int) -> Tensor:
        """Blocks [H_kv, wanted] in document order, by the mass that queries [H_kv, Q, d], scaled
        and rotated, give to those listed.
        """
        listed = self.take()
        lse, _ = exact_lookup(folded, self._keys, self._keys.shape[1])
        assert lse is not None
        chosen = block_mass(lse).topk(min(wanted, lse.shape[-1]), dim=1).indices
        return listed.gather(1, chosen.sort(dim=1).values)
