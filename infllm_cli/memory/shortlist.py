"""The blocks that an answer is likely to need next: scored at every token, while a scan of all
stored keys is repeated only every few.

A scan grows with the document, an answer's interest hardly moves from one token to the next. What
the last scan ranked highest is kept unpacked, a few times as many blocks as join the attention,
and the next tokens choose among these. For short memories a scan costs less than keeping them.
"""

from __future__ import annotations

from torch import Tensor

from infllm_cli.kernels.block_mass import block_mass
from infllm_cli.kernels.exact_lookup import exact_lookup
from infllm_cli.memory.blocks import BlockArena

PER_LOADED = 2  # blocks listed for each one that joins the attention
LEAST_BLOCKS = 192  # 24K tokens: where the two cost the same


class Shortlist:
    """Blocks [H_kv, C] of one layer, in document order, with their keys.

    Args:
        mass: [H_kv, N], what each block was worth in the last scan.
        blocks: how many will join the attention of a step.
        tokens: how many answer tokens it may serve.
    """

    def __init__(self, arena: BlockArena, mass: Tensor, blocks: int, tokens: int) -> None:
        listed = mass.topk(min(PER_LOADED * blocks, mass.shape[1]), dim=1).indices
        self.blocks = listed.sort(dim=1).values
        self.count = arena.count
        self.left = tokens
        self._keys = arena.gather_keys(self.blocks)

    @staticmethod
    def pays(arena: BlockArena) -> bool:
        """Whether a scan takes longer; where blocks were dropped, their places are not listed."""
        return arena.count >= LEAST_BLOCKS and not arena.dropped

    def serves(self, arena: BlockArena) -> bool:
        """Whether it may be asked once more, and no block has been added."""
        return self.left > 0 and self.count == arena.count

    def best(self, folded: Tensor, wanted: int) -> Tensor:
        """Blocks [H_kv, wanted] in document order, by the mass that queries [H_kv, Q, d], scaled
        and rotated, give to those listed.
        """
        self.left -= 1
        lse, _ = exact_lookup(folded, self._keys, self._keys.shape[1])
        assert lse is not None
        chosen = block_mass(lse).topk(min(wanted, lse.shape[-1]), dim=1).indices
        return self.blocks.gather(1, chosen.sort(dim=1).values)
