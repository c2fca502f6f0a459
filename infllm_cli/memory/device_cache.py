"""Blocks that stay on the device between steps, in a fixed number of slots.

Which block leaves when another one needs its slot is decided per KV head by `Slots`, which knows
numbers only; `BlockSlots` holds the keys and values.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from infllm_cli.memory.knobs import CachePolicy

DECAY = 0.1  # of an `lru-s` score at every step (InfLLM, arXiv 2402.04617)

Load = Callable[[Tensor], tuple[Tensor, Tensor]]


class Slots:
    """Which block lies in which slot, for one KV head.

    Args:
        capacity: slots; at least the blocks of a step.
        seed: of the `random` policy.

    Attributes:
        hits, misses: blocks wanted that were there, and that were not.
        score: of each block that is held, under `lru-s`.
    """

    def __init__(self, capacity: int, policy: CachePolicy, seed: int = 0) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.policy = policy
        self.hits = self.misses = 0
        self.score: dict[int, float] = {}
        self._slot: dict[int, int] = {}  # by block; in the order of leaving, for lru and fifo
        self._free = list(range(capacity - 1, -1, -1))
        self._random = random.Random(seed)

    def __contains__(self, block: int) -> bool:
        return block in self._slot

    @property
    def blocks(self) -> list[int]:
        """What is held."""
        return list(self._slot)

    def want(self, blocks: list[int]) -> tuple[list[int], list[int]]:
        """Make room for the blocks of a step.

        Returns:
            The slot of each block, and those of the blocks that have to be loaded into theirs.
        """
        assert len(set(blocks)) == len(blocks) <= self.capacity, "a step fits the cache"
        wanted = set(blocks)
        missing = [block for block in blocks if block not in self._slot]
        self.hits += len(blocks) - len(missing)
        self.misses += len(missing)
        if self.policy is not CachePolicy.FIFO:
            for block in blocks:
                if block in self._slot:  # last used last
                    self._slot[block] = self._slot.pop(block)
        self._take(missing, wanted)
        return [self._slot[block] for block in blocks], missing

    def bring(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Make room for blocks that may be wanted soon; nothing is counted.

        Returns:
            Each block that was not there, with its slot. What takes more slots than there are is
            left out.
        """
        blocks = blocks[: self.capacity]
        missing = [block for block in dict.fromkeys(blocks) if block not in self._slot]
        self._take(missing, set(blocks))
        return [(block, self._slot[block]) for block in missing]

    def _take(self, missing: list[int], wanted: set[int]) -> None:
        """Give a slot to each block that is missing, of those that are `wanted`."""
        surplus = len(missing) - len(self._free)
        # In turns, so that slots are given away in the order in which they are left.
        victims = iter(self._victims(surplus, wanted) if surplus > 0 else ())
        for block in missing:
            if not self._free:
                self._drop(next(victims))
            self._slot[block] = self._free.pop()
            self.score[block] = 0.0

    def _victims(self, count: int, wanted: set[int]) -> list[int]:
        """Of the blocks that the step does not need, those that leave, the first one first."""
        candidates = [block for block in self._slot if block not in wanted]
        if self.policy is CachePolicy.RANDOM:
            left = []
            for _ in range(count):
                left.append(self._random.choice(candidates))
                candidates.remove(left[-1])
            return left
        if self.policy is CachePolicy.LRU_S:
            candidates.sort(key=self.score.__getitem__)  # of equals the one used first
        return candidates[:count]

    def _drop(self, block: int) -> None:
        self._free.append(self._slot.pop(block))
        del self.score[block]

    def attended(self, blocks: list[int], mass: list[float]) -> None:
        """A step gave each of its blocks so much attention: `s_b = s_b * d + mass_b`.

        What is held and was not attended fades, too.
        """
        for block in self.score:
            self.score[block] *= DECAY
        for block, share in zip(blocks, mass, strict=True):
            self.score[block] += share

    def forget_from(self, count: int) -> None:
        """The blocks from number `count` on are no more, or others now."""
        for block in [block for block in self._slot if block >= count]:
            self._drop(block)


class BlockSlots:
    """Keys and values of some blocks on a device, in a fixed number of slots per KV head.

    Args:
        capacity: slots per KV head; at least the blocks of a step.
        keys, values: room for all slots.
    """

    def __init__(
        self, kv_heads: int, capacity: int, policy: CachePolicy, keys: Tensor, values: Tensor
    ) -> None:
        self.policy = policy
        self.slots = [Slots(capacity, policy, seed=head) for head in range(kv_heads)]
        self.keys = keys
        self.values = values
        self._sealed = 0

    @property
    def hits(self) -> int:
        """Blocks that were there when they were wanted."""
        return sum(slots.hits for slots in self.slots)

    @property
    def misses(self) -> int:
        """Blocks that had to be loaded when they were wanted."""
        return sum(slots.misses for slots in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.keys.nbytes + self.values.nbytes

    def follow(self, sealed: int) -> None:
        """So many blocks are in segments now: those that were packed meanwhile are others."""
        if sealed != self._sealed:
            self.forget_from(min(sealed, self._sealed))
            self._sealed = sealed

    def attended(self, blocks: Tensor, mass: Tensor) -> None:
        """A step gave its blocks [H_kv, n] attention mass [H_kv, n]."""
        for slots, row, share in zip(self.slots, blocks.tolist(), mass.tolist(), strict=True):
            slots.attended(row, share)

    def forget_from(self, count: int) -> None:
        """The blocks from number `count` on are no more, or others now."""
        for slots in self.slots:
            slots.forget_from(count)


class DeviceCache(BlockSlots):
    """Keys and values of blocks, per KV head, on the layer's device.

    Args:
        capacity: blocks per KV head.
        shape: KV heads, tokens of a block, and the sizes of a key and a value.
    """

    def __init__(
        self,
        capacity: int,
        policy: CachePolicy,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        kv_heads, size, key_dim, value_dim = shape
        keys = torch.empty(kv_heads, capacity, size, key_dim, dtype=dtype, device=device)
        values = torch.empty(kv_heads, capacity, size, value_dim, dtype=dtype, device=device)
        super().__init__(kv_heads, capacity, policy, keys, values)

    def fetch(self, blocks: Tensor, load: Load) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, n * B, d] of blocks [H_kv, n], on the device.

        Args:
            load: keys and values [H_kv, m * B, d] of blocks [H_kv, m], from host memory.
        """
        places = [slots.want(row) for slots, row in zip(self.slots, blocks.tolist(), strict=True)]
        most = max(len(missing) for _, missing in places)
        if most:
            self._load(blocks.tolist(), places, most, load)
        at = torch.tensor([found for found, _ in places], device=self.keys.device)
        heads = torch.arange(len(places), device=self.keys.device)[:, None]
        return self.keys[heads, at].flatten(1, 2), self.values[heads, at].flatten(1, 2)

    def _load(
        self,
        blocks: list[list[int]],
        places: list[tuple[list[int], list[int]]],
        most: int,
        load: Load,
    ) -> None:
        # A head that misses less loads one of its blocks again: `load` takes a rectangle.
        wanted = [
            [*missing, *[row[0]] * (most - len(missing))]
            for row, (_, missing) in zip(blocks, places, strict=True)
        ]
        keys, values = load(torch.tensor(wanted))
        keys, values = (
            x.unflatten(1, (most, -1)).to(self.keys.device, non_blocking=True)
            for x in (keys, values)
        )
        for head, (row, (found, missing)) in enumerate(zip(blocks, places, strict=True)):
            slots = [found[row.index(block)] for block in missing]
            self.keys[head, slots] = keys[head, : len(missing)]
            self.values[head, slots] = values[head, : len(missing)]
