"""The sealed blocks of one layer: which segment holds which, and how a tail becomes one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from infllm_cli.kernels.store_codec import Packed, pack_keys, pack_values, pick, unpack
from infllm_cli.memory import codecs
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.segment import Segment, own_pages

SEGMENT_BLOCKS = 64  # as in `MemoryConfig`


class BlockArena:
    """The sealed blocks of a layer: full segments, and a tail that is being filled.

    The tail is as the model made it; a segment, once full, is packed by the codec and never written
    again, so it may be replaced by the same numbers from a file (`place`) at any time between two
    steps.

    Attributes:
        temporary: what is appended now will be forgotten again: it is not worth packing, and what
            was a tail must be one again.
        dropped: how many blocks are given up.
        reuses_tail: whether the memory of a tail that was packed becomes that of the next one.
    """

    reuses_tail = False

    def __init__(
        self,
        kv_heads: int,
        block_tokens: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        segment_blocks: int = SEGMENT_BLOCKS,
        codec: Codec = Codec.FULL,
    ) -> None:
        self.count = 0
        self.codec = codec
        self.temporary = False
        self.dropped = 0
        self._uses = torch.zeros(0, dtype=torch.int64)
        self.block_tokens = block_tokens
        self.segment_blocks = segment_blocks
        self.segments: list[Segment] = []
        self._key_shape = (kv_heads, segment_blocks, block_tokens, head_dim)
        self._value_shape = (kv_heads, segment_blocks, block_tokens, value_dim)
        self._dtype = dtype
        self._starts: list[int] = []  # first block of each segment
        self._sizes: list[int] = []  # bytes of each segment: asked for at every chunk
        self._tail: Segment | None = None  # room for a whole segment; untouched pages cost nothing

    # -- what is held -----------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values when they are unpacked."""
        return self._dtype

    @property
    def kv_heads(self) -> int:
        """H_kv."""
        return self._key_shape[0]

    @property
    def sealed(self) -> int:
        """Blocks in segments; the others are in the tail."""
        return self._starts[-1] + self.segments[-1].blocks if self.segments else 0

    def _block_bytes(self, codec: Codec) -> int:
        dims = (self._key_shape[-1], self._value_shape[-1])
        size = self._dtype.itemsize
        return codecs.block_bytes(codec, self.kv_heads, self.block_tokens, *dims, size)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the tail."""
        return self._block_bytes(Codec.FULL)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        constants = codecs.segment_bytes(self.codec, self.kv_heads, self._key_shape[-1])
        return self.segment_blocks * self._block_bytes(self.codec) + constants

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in memory of our own."""
        tail = (self.count - self.sealed) * self.block_bytes
        return sum(self._sizes) - self.mapped_bytes + tail

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the blocks in files that are mapped in."""
        pairs = zip(self.segments, self._sizes, strict=True)
        return sum(size for segment, size in pairs if segment.mapped)

    @property
    def tail(self) -> Segment | None:
        """The blocks that no segment holds yet."""
        filled = self.count - self.sealed
        return self._tail.cut(slice(filled)) if self._tail is not None and filled else None

    def parts(self) -> Iterator[Segment]:
        """All blocks in document order, a segment at a time, the tail last."""
        yield from self.segments
        if (tail := self.tail) is not None:
            yield tail

    def stretch(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, last - first, d] of tokens, counted from the first block on.

        Copied, but where they lie in one part in memory as the model made them.
        """
        assert 0 <= first <= last <= self.count * self.block_tokens
        found = []
        index = max(0, bisect_right(self._starts, first // self.block_tokens) - 1)
        while first < last:
            full = index < len(self.segments)
            part = self.segments[index] if full else self.tail
            start = (self._starts[index] if full else self.sealed) * self.block_tokens
            size = part.blocks * self.block_tokens
            tokens = slice(first - start, min(last - start, size))
            index += 1
            if first - start >= size:  # behind the last segment
                continue
            held = slice(tokens.start // self.block_tokens, -(-tokens.stop // self.block_tokens))
            inside = slice(
                tokens.start - held.start * self.block_tokens,
                tokens.stop - held.start * self.block_tokens,
            )
            pair = [x.flatten(1, 2)[:, inside] for x in part.unpack(held, self._dtype)]
            if part.release is not None:
                pair = [x.clone() for x in pair]
                part.release()
            found.append(pair)
            first = start + tokens.stop
        if len(found) == 1:
            return found[0][0], found[0][1]
        if not found:
            shapes = (self._key_shape, self._value_shape)
            keys, values = (torch.empty(s[0], 0, s[-1], dtype=self._dtype) for s in shapes)
            return keys, values
        keys, values = (torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True))
        return keys, values

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [H_kv, n * B, d] of blocks [H_kv, n], chosen per KV head."""
        shape = (len(blocks), blocks.shape[1] * self.block_tokens, -1)
        keys, values = self.pick(*_pairs(blocks))
        return keys.view(shape), values.view(shape)

    def gather_keys(self, blocks: Tensor) -> Tensor:
        """The keys alone, [H_kv, n, B, d]."""
        found = self._find(*_pairs(blocks))
        keys = self._unpacked([(part.keys, head, at) for part, head, at in found])
        return keys.unflatten(0, blocks.shape)

    def pick(self, heads: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [m, B, d] of single blocks [m], each of one KV head [m]."""
        found = self._find(heads, blocks)
        keys = self._unpacked([(part.keys, head, at) for part, head, at in found])
        values = self._unpacked([(part.values, head, at) for part, head, at in found])
        return keys, values

    def _find(self, heads: Tensor, blocks: Tensor) -> list[tuple[Segment, int, int]]:
        """Where blocks [m] of heads [m] are stored: part, head, and place in the part."""
        parts = list(self.parts())
        found = []
        for head, block in zip(heads.tolist(), blocks.tolist(), strict=True):
            part, at = self.locate(block, parts)
            assert at >= 0, "what was dropped is not looked up"
            found.append((part, head, at))
        return found

    def locate(self, block: int, parts: list[Segment]) -> tuple[Segment, int]:
        """The one of all `parts` that a block lies in, and its place there; -1: it was dropped."""
        index = bisect_right(self._starts, block) - 1
        start, part = (self._starts[index], parts[index]) if index >= 0 else (0, parts[0])
        if block - start >= part.blocks:  # behind the last segment
            start, part = self.sealed, parts[-1]
        at = block - start
        return part, at if part.slots is None else int(part.slots[at])

    def _unpacked(self, found: list[tuple[Packed, int, int]]) -> Tensor:
        """Blocks (head, index) of different parts [m] -> [m, B, d]; all of a kind at once."""
        kinds = [packed.kind for packed, _, _ in found]
        together = []
        for kind in dict.fromkeys(kinds):
            same = [one for one in found if one[0].kind == kind]
            together.append(unpack(pick(same), self._dtype)[:, 0])
        if len(together) == 1:
            return together[0]
        order = sorted(range(len(found)), key=lambda i: list(dict.fromkeys(kinds)).index(kinds[i]))
        mixed = torch.cat(together)
        return torch.empty_like(mixed).index_copy_(0, torch.tensor(order), mixed)

    # -- use, and what is given up for want of room ------------------------------------------

    def note_use(self, blocks: Tensor) -> None:
        """Blocks [H_kv, n] have been loaded."""
        if self.temporary:
            return
        if len(self._uses) < self.count:
            grown = torch.zeros(max(self.count, 2 * len(self._uses)), dtype=torch.int64)
            grown[: len(self._uses)] = self._uses
            self._uses = grown
        self._uses.index_add_(0, blocks.flatten(), torch.ones(blocks.numel(), dtype=torch.int64))

    def uses(self, blocks: list[int]) -> Tensor:
        """[n] how often each of some blocks has been loaded."""
        known = [block if block < len(self._uses) else -1 for block in blocks]
        return torch.cat([self._uses, torch.zeros(1, dtype=torch.int64)])[known]

    def droppable(self) -> list[int]:
        """Blocks in memory of our own, but for those of the newest segment and the tail."""
        found = []
        for start, segment in zip(self._starts[:-1], self.segments[:-1], strict=True):
            if not segment.mapped:
                found += (segment.held().nonzero()[:, 0] + start).tolist()
        return found

    def drop(self, blocks: list[int]) -> None:
        """Give up blocks, of those that are `droppable`."""
        gone = torch.zeros(self.count, dtype=torch.bool)
        gone[blocks] = True
        for index, (start, segment) in enumerate(zip(self._starts, self.segments, strict=True)):
            here = gone[start : start + segment.blocks]
            if here.any():
                self.segments[index] = segment.without(here)
                self._sizes[index] = self.segments[index].nbytes
        self.dropped += len(blocks)

    def missing(self) -> Tensor | None:
        """[N] whether each block was dropped; None: none was."""
        if not self.dropped:
            return None
        return torch.cat([~part.held() for part in self.parts()])

    # -- filling ----------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Seal tokens keys, values [H_kv, n * B, d] as n blocks."""
        blocks = keys.shape[1] // self.block_tokens
        assert keys.shape[1] == blocks * self.block_tokens, "only whole blocks are sealed"
        shape = (keys.shape[0], blocks, self.block_tokens, -1)
        keys, values = keys.reshape(shape), values.reshape(shape)
        done = 0
        while done < blocks:
            if self._tail is None:
                self._tail = self._new_tail()
            filled = self.count - self.sealed
            taken = min(blocks - done, self.segment_blocks - filled)
            slots, new = slice(filled, filled + taken), slice(done, done + taken)
            self._store(self._tail.keys.codes[:, slots], keys[:, new])
            self._store(self._tail.values.codes[:, slots], values[:, new])
            self.count += taken
            done += taken
            if filled + taken == self.segment_blocks:
                self.freeze()

    def _new_tail(self) -> Segment:
        """Room for a whole segment."""
        shapes = (self._key_shape, self._value_shape)
        return Segment(*(Packed("full", s[-1], own_pages(s, self._dtype)) for s in shapes))

    def _store(self, target: Tensor, source: Tensor) -> None:
        """Copy blocks into the tail."""
        target.copy_(source)

    def freeze(self) -> None:
        """Make a segment of the tail, however short; what follows begins a new one."""
        tail = self.tail
        if tail is not None:
            self._starts.append(self.sealed)
            self.segments.append(tail if self.temporary else self._packed(tail))
            self._sizes.append(self.segments[-1].nbytes)
        self._tail = None

    def _packed(self, tail: Segment) -> Segment:
        if self.codec is Codec.FULL:
            return tail
        kind = self.codec.value
        # A head at a time: what is computed on the way is float32, and several times as large.
        keys = [pack_keys(head[None], kind) for head in tail.keys.codes]
        values = [pack_values(head[None], kind) for head in tail.values.codes]
        return Segment(_heads_in_own_pages(keys), _heads_in_own_pages(values))

    def place(self, index: int, segment: Segment) -> None:
        """Put the same blocks, or the next ones, in place of segment `index`."""
        if index == len(self.segments):
            assert self.tail is None, "a tail comes last"
            self._starts.append(self.sealed)
            self.segments.append(segment)
            self._sizes.append(segment.nbytes)
            self.count += segment.blocks
            return
        assert segment.blocks == self.segments[index].blocks
        self.segments[index] = segment
        self._sizes[index] = segment.nbytes

    def truncate(self, count: int) -> None:
        """Forget the blocks after the first `count`."""
        assert 0 <= count <= self.count
        while self.sealed > count:
            segment = self.segments.pop()
            self._sizes.pop()
            start = self._starts.pop()
            self._tail = None
            if count > start:  # a full one that was a tail when it held `count`
                assert not segment.mapped and segment.blocks == self.segment_blocks
                assert segment.keys.kind == "full", "what may be forgotten is not packed"
                self._tail = segment
                break
        self.count = count


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks [H_kv, n] one by one: heads [m] and blocks [m]."""
    kv_heads, chosen = blocks.shape
    return torch.arange(kv_heads).repeat_interleave(chosen), blocks.flatten()


def _heads_in_own_pages(heads: list[Packed]) -> Packed:
    """What was packed a KV head at a time, as one."""

    def join(name: str, first: Tensor) -> Tensor:
        joined = own_pages((len(heads), *first.shape[1:]), first.dtype)
        for index, head in enumerate(heads):
            joined[index] = getattr(head, name)[0]
        return joined

    joined = {name: join(name, tensor) for name, tensor in heads[0].tensors().items()}
    return replace(heads[0], **joined)
