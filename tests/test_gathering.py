"""Blocks gathered at once are those that are picked one by one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from infllm_cli.kernels.host_gather import host_gather
from infllm_cli.kernels.store_codec import pick
from native_library import native
from torch import Tensor

from infllm_cli.memory import gathering
from infllm_cli.memory.blocks import BlockArena
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.device_arena import DeviceArena
from infllm_cli.memory.device_blocks import DeviceBlocks
from infllm_cli.memory.gathering import ALIGNMENT, BlockGatherer
from infllm_cli.memory.knobs import CachePolicy
from infllm_cli.memory.transfers import Transfers

CPU = torch.device("cpu")
FORMS = {"plain": lambda: None, "C": native}

# (KV heads, tokens per block, d, d_v, blocks per segment, blocks, dtype)
SIZES = [
    (1, 1, 64, 64, 2, 3, torch.float32),
    (3, 31, 96, 96, 4, 14, torch.bfloat16),
    (9, 33, 25, 14, 3, 9, torch.float32),
    (8, 16, 128, 128, 1, 5, torch.bfloat16),
    (3, 17, 256, 256, 5, 24, torch.bfloat16),
]
NAMES = ["h{}-b{}-d{}.{}-{}of{}".format(*size[:6]) for size in SIZES]


def fill(arena: BlockArena, blocks: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, _, size, d = arena._key_shape
    shape = (heads, blocks * size)
    keys, values = (
        torch.randn(*shape, dim, generator=generator).to(arena.dtype)
        for dim in (d, arena._value_shape[-1])
    )
    arena.append(keys, values)


def make(size, codec: Codec) -> BlockArena:
    heads, tokens, d, dv, per_segment, blocks, dtype = size
    arena = BlockArena(heads, tokens, d, dv, dtype, per_segment, codec)
    fill(arena, blocks)
    return arena


def draw(arena: BlockArena, each: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Heads [m] and blocks [m], no two the same."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [
        torch.randperm(arena.count, generator=generator)[:each] for _ in range(arena.kv_heads)
    ]
    return torch.arange(arena.kv_heads).repeat_interleave(len(chosen[0])), torch.cat(chosen)


def assert_same(arena: BlockArena, found, heads: Tensor, blocks: Tensor) -> None:
    """Each piece holds what `pick` gives for the blocks whose numbers it tells."""
    parts, seen = list(arena.parts()), []
    for piece, memory in found:
        assert memory.dtype == torch.uint8 and memory.numel() == piece.nbytes
        keys, values, numbers = piece.views(memory)
        where = [(*arena.locate(int(blocks[i]), parts), int(heads[i])) for i in numbers]
        for ours, name in ((keys, "keys"), (values, "values")):
            one_by_one = pick([(getattr(part, name), head, at) for part, at, head in where])
            assert (ours.kind, ours.dim) == (one_by_one.kind, one_by_one.dim)
            assert ours.tensors().keys() == one_by_one.tensors().keys()
            for column, tensor in ours.tensors().items():
                other = one_by_one.tensors()[column]
                assert tensor.dtype == other.dtype and tensor.shape == other.shape, column
                assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), column
                assert (tensor.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
        seen += numbers.tolist()
    assert sorted(seen) == list(range(len(blocks)))


def gather(gatherer: BlockGatherer, arena: BlockArena, heads: Tensor, blocks: Tensor):
    empty = lambda shape, dtype: torch.full(shape, 77, dtype=dtype)  # noqa: E731
    return gatherer.gather(heads, blocks, torch.arange(len(blocks)), arena, empty)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", SIZES, ids=NAMES)
def test_what_is_gathered_is_what_is_picked_one_by_one(size, codec: Codec, form: str) -> None:
    arena = make(size, codec)
    gatherer = BlockGatherer(FORMS[form]())
    for each in (1, arena.count):  # of segments alone or with the tail, in any order
        heads, blocks = draw(arena, each)
        found = gather(gatherer, arena, heads, blocks)
        assert_same(arena, found, heads, blocks)
    has_tail = arena.tail is not None
    assert len(found) == 1 + (has_tail and codec is not Codec.FULL)


def test_blocks_beside_dropped_ones_are_found_and_dropped_ones_are_not() -> None:
    arena = make(SIZES[1], Codec.INT8)
    arena.drop([0, 2, 5])
    gatherer = BlockGatherer()
    kept = torch.tensor([1, 3, 4, 6, 7, 13])
    heads, blocks = torch.arange(3).repeat_interleave(len(kept)), kept.repeat(3)
    assert_same(arena, gather(gatherer, arena, heads, blocks), heads, blocks)
    with pytest.raises(AssertionError, match="dropped"):
        gather(gatherer, arena, torch.tensor([0]), torch.tensor([2]))
    for none in (-1, arena.count):
        with pytest.raises(AssertionError, match="nothing"):
            gather(gatherer, arena, torch.tensor([0, 0]), torch.tensor([1, none]))


def test_the_table_follows_the_segments_and_looks_at_new_ones_only(monkeypatch) -> None:
    looked = []
    places = gathering._places
    monkeypatch.setattr(gathering, "_places", lambda x: (looked.append(x.kind), places(x))[1])
    arena, gatherer = make(SIZES[1], Codec.INT8), BlockGatherer()

    def check() -> list[str]:
        looked.clear()
        heads, blocks = draw(arena, arena.count)
        assert_same(arena, gather(gatherer, arena, heads, blocks), heads, blocks)
        return list(looked)

    assert check() == ["int8"] * 6 + ["full"] * 2
    assert check() == []
    fill(arena, 5, seed=2)
    assert check() == ["int8"] * 2 + ["full"] * 2
    arena.freeze()  # a short segment
    assert check() == ["int8"] * 2 and check() == []
    other = arena.segments[1]
    arena.place(1, other.without(torch.zeros(other.blocks, dtype=torch.bool)))
    assert len(check()) == 2 * 4  # that one, and what stands behind it
    arena.temporary = True
    fill(arena, 9, seed=3)
    check()
    arena.truncate(arena.count - 8)  # a question's blocks, of which some are others now
    fill(arena, 4, seed=4)
    check()
    held = zip(gatherer._parts, arena.segments, strict=False)
    assert all(a is b for a, b in held) and len(gatherer._parts) == len(list(arena.parts()))


def test_a_piece_is_never_written_past_its_end() -> None:
    source = torch.zeros(4, 8, dtype=torch.uint8)
    addresses = torch.tensor([[row.data_ptr() for row in source]])
    for form in FORMS.values():
        with pytest.raises(AssertionError):
            host_gather(addresses, [8], [1], torch.zeros(32, dtype=torch.uint8), form())
        into = torch.full((40,), 5, dtype=torch.uint8)
        host_gather(addresses, [8], [3], into, form())
        assert into.tolist() == [5] * 3 + [0] * 32 + [5] * 5


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(monkeypatch, threads: int) -> None:
    from infllm_cli.kernels import host_gather as module

    monkeypatch.setattr(module, "THREAD_BYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    arena = make(SIZES[3], Codec.INT4)
    heads, blocks = draw(arena, 5)
    assert_same(arena, gather(BlockGatherer(native()), arena, heads, blocks), heads, blocks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", list(Codec))
def test_slots_hold_the_blocks_that_were_placed_and_one_copy_brought_them(codec, form) -> None:
    heads, size, d, dv, per_segment, _, dtype = SIZES[1]
    transfers = Transfers(CPU)
    arena = DeviceArena(heads, size, d, dv, dtype, per_segment, codec, transfers)
    fill(arena, 16)
    policy, shape = CachePolicy.LRU_S, (heads, size, d, dv)
    cache = DeviceBlocks(6, policy, shape, dtype, transfers, FORMS[form]())
    copies = []
    up = transfers.up
    transfers.up = lambda tensor: (copies.append(tensor), up(tensor))[1]
    for seed in range(8):
        blocks = draw(arena, 4, seed)[1].view(heads, 4)
        before = cache.misses
        slots = cache.place(blocks, arena).long()
        cache.prefetch([[0, seed], [3], [4, 99]], arena)
        slots = cache.place(blocks, arena).long()
        expected = arena.gather(blocks)
        for held, wanted in zip((cache.keys, cache.values), expected, strict=True):
            assert torch.equal(held[slots].flatten(1, 2), wanted)
        assert cache.misses > before
    # No tail, so one kind: a copy for a step, and at most one for what is predicted.
    assert arena.tail is None and len(copies) <= 3 * 8
