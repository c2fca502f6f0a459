"""How long does it take to bring a step's blocks to the device and attend them, beside the bus?"""

from __future__ import annotations

import time
from typing import Any

import torch

from infllm_cli.kernels.floors import MOVED_MS
from infllm_cli.kernels.native.library import Native
from infllm_cli.kernels.tiered_attention import Tiers, tiered_attention
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.device_arena import DeviceArena
from infllm_cli.memory.device_blocks import DeviceBlocks
from infllm_cli.memory.knobs import CachePolicy
from infllm_cli.memory.transfers import Transfers


@torch.inference_mode()
def measure(
    device: torch.device,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    d: int = 128,
    block: int = 128,
    blocks: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    runs: int = 40,
    native: Native | None = None,
) -> dict[str, Any]:
    """Two sets of blocks in turns, so that every block is fetched every time; figures by name."""
    transfers = Transfers(device)
    per_segment = max(1, blocks // 2)  # a step's blocks lie in several segments
    arena = DeviceArena(kv_heads, block, d, d, dtype, per_segment, Codec.INT8, transfers)
    shape = (kv_heads, 2 * blocks * block, d)
    arena.append(*(torch.randn(shape, device=device).to(dtype) for _ in range(2)))
    shape = (kv_heads, block, d, d)
    cache = DeviceBlocks(blocks, CachePolicy.LRU, shape, dtype, transfers, native)
    sets = torch.arange(2 * blocks).view(2, 1, blocks).expand(2, kv_heads, blocks)
    q, own, nothing = (
        torch.randn(n, m, d, device=device).to(dtype)
        for n, m in ((heads, 1), (kv_heads, 1), (kv_heads, 0))
    )
    cos = torch.ones(blocks * block, d // 2, device=device)

    def run(index: int) -> None:
        slots = cache.place(sets[index % 2], arena)
        tiers = Tiers(
            nothing, nothing, cache.keys, cache.values, slots, own, own, cos, torch.zeros_like(cos)
        )
        tiered_attention(q, tiers, d**-0.5)
        cache.used()

    run(0), run(1)  # compiles
    moved = transfers.moved.to_device
    seconds = _timed(device, lambda: [run(index) for index in range(runs)]) / runs
    moved = (transfers.moved.to_device - moved) // runs
    pinned = transfers.staging((moved,), torch.uint8)
    bus = min(_timed(device, lambda: transfers.up(pinned)) for _ in range(10))
    return {
        "blocks": kv_heads * blocks,
        "bytes": moved,
        "gathered_in_c": native is not None,
        "ms": round(1000 * seconds, 4),
        "bus_ms": round(1000 * bus, 4),
        "beside_the_bus_ms": round(1000 * (seconds - bus), 4),
        "floor_ms": MOVED_MS,
    }


def _timed(device: torch.device, run: Any) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
