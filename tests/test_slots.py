"""Which blocks leave a cache together: those that would leave one by one."""

from __future__ import annotations

import random

import pytest

from infllm_cli.memory.device_cache import Slots
from infllm_cli.memory.knobs import CachePolicy


class OneByOne(Slots):
    """Chooses a block that leaves anew for each one that comes: what `_victims` stands for."""

    def _take(self, missing: list[int], wanted: set[int]) -> None:
        for block in missing:
            if not self._free:
                candidates = [held for held in self._slot if held not in wanted]
                if self.policy is CachePolicy.RANDOM:
                    victim = self._random.choice(candidates)
                elif self.policy is CachePolicy.LRU_S:
                    victim = min(candidates, key=self.score.__getitem__)
                else:
                    victim = candidates[0]
                self._drop(victim)
            self._slot[block] = self._free.pop()
            self.score[block] = 0.0


@pytest.mark.parametrize("policy", list(CachePolicy))
def test_blocks_that_leave_together_are_those_that_leave_one_by_one(policy) -> None:
    draw = random.Random(7)
    ours, other = Slots(9, policy, seed=3), OneByOne(9, policy, seed=3)
    for _ in range(400):
        blocks = draw.sample(range(40), draw.randint(1, 9))
        assert ours.want(blocks) == other.want(blocks)
        mass = [draw.choice([0.0, 0.5, draw.random()]) for _ in blocks]
        for slots in (ours, other):
            slots.attended(blocks, mass)
        guess = [draw.randrange(40) for _ in range(draw.randint(0, 12))]
        assert ours.bring(guess) == other.bring(guess)
        if draw.random() < 0.1:
            for slots in (ours, other):
                slots.forget_from(20)
        assert (ours._slot, ours.score, ours._free) == (other._slot, other.score, other._free)
