"""What of the GPU path can be seen without one: flags, estimates, figures, several devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_streams import make_geometry

from infllm_cli import budget, scan_plan
from infllm_cli.budget import LayerShape
from infllm_cli.errors import UsageError
from infllm_cli.limits import parse_limits
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import Lookup, MemoryConfig
from infllm_cli.memory.device_path import DeviceOptions, DevicePath
from infllm_cli.memory.model_memory import ModelMemory
from infllm_cli.memory.rotary import Rotary
from infllm_cli.memory.scan_cost import Place, estimate
from infllm_cli.models.loading import choose_device, device_map
from infllm_cli.models.probe import _share_rotaries

GB = 10**9


def scan(key_bytes: int, rows: int = 4, **kinds):
    kinds = {"has_device": True, "device_room": 10 * GB, "cores": 4, **kinds}
    return estimate(key_bytes, key_bytes, rows, **kinds)


def test_keys_that_fit_the_device_are_scanned_there() -> None:
    found = scan(GB)
    assert found.place is Place.DEVICE and set(found.seconds) == {"device", "host", "bus"}
    assert found.seconds["device"] < found.seconds["bus"] < found.seconds["host"]


def test_keys_that_do_not_fit_are_scanned_on_the_host_or_streamed() -> None:
    assert scan(GB, device_room=GB - 1).place is Place.BUS  # few cores
    assert scan(GB, device_room=GB - 1, cores=64).place is Place.HOST
    # A question of many tokens is work for the device.
    assert scan(GB, rows=400, device_room=0, cores=64).place is Place.BUS
    assert "device" not in scan(GB, device_room=0).seconds


def test_without_a_gpu_the_host_scans() -> None:
    found = scan(GB, has_device=False)
    assert found.place is Place.HOST and set(found.seconds) == {"host"}


def test_a_plan_counts_the_keys_as_they_are_stored() -> None:
    layers = [LayerShape(8, 128, 128)] * 32
    room = {"group": 4, "has_device": True, "device_room": 10 * GB, "cores": 8}
    config = MemoryConfig()
    found = budget.scan(layers, 2, config, 128_000, **room)
    blocks = budget.blocks_of(config, 128_000)
    assert found.bytes == 32 * blocks * 128 * 8 * 128 and found.place is Place.DEVICE
    full = budget.scan(layers, 2, replace(config, codec=Codec.FULL), 128_000, **room)
    assert full.bytes == 2 * found.bytes
    small = budget.scan(layers, 2, replace(config, codec=Codec.INT4), 128_000, **room)
    assert 0.5 < small.bytes / found.bytes < 0.52
    paper = replace(config, answer_lookup=Lookup.REPRESENTATIVES)
    assert budget.scan(layers, 2, paper, 128_000, **room) is None
    assert budget.scan(layers, 2, config, 100, **room) is None


def test_the_plan_s_line_and_json_name_the_place() -> None:
    found = scan(GB, device_room=0)
    line = scan_plan.line(found)
    assert "1.0 GB of keys" in line and "on the device, streamed" in line and "estimate" in line
    assert "in host memory" in line
    told = scan_plan.as_json(found)
    assert told["place"] == "bus" and set(told["estimated_seconds"]) == {"bus", "host"}
    assert scan_plan.as_json(None) is None
    assert scan_plan.device_room(torch.device("cpu"), 5) == 0


def test_the_device_limit_is_a_size() -> None:
    assert parse_limits(None, None, "1GB", True, device_limit="2GiB").device == 2 * 2**30
    assert parse_limits(None, None, "1GB", True).device is None
    with pytest.raises(UsageError, match="--device-limit"):
        parse_limits(None, None, "1GB", True, device_limit="much")


def test_all_gpus_are_divided_by_the_library_and_one_is_taken_whole(monkeypatch) -> None:
    gpu = torch.device("cuda", 1)
    assert device_map("gpus", torch.device("cuda")) == "auto"
    assert device_map("cuda:1", gpu) == {"": gpu}
    assert device_map("auto", torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device gpus"):
        choose_device("gpus")


def test_each_device_has_its_own_rotation_copies_and_budget() -> None:
    there = torch.device("meta")
    ours = make_geometry()
    theirs = replace(ours, rotary=Rotary(ours.rotary.inv_freq.to(there)), device=there)
    a, b, c = _share_rotaries([ours, theirs, replace(ours, index=2)])
    assert a.rotary is c.rotary and b.rotary.inv_freq.device == there
    path = DevicePath(DeviceOptions(limit_bytes=7))
    assert path.transfers(ours.device) is path.transfers(ours.device)
    assert path.transfers(ours.device) is not path.transfers(there)
    path.budget(there).used = 7
    assert path.budget(there).room() == 0 and path.budget(ours.device).room() == 7


def test_what_was_moved_is_told() -> None:
    layers = [make_geometry()]
    memory = ModelMemory(
        layers, MemoryConfig(), trained_length=10_000, device=DeviceOptions(on_cpu=True)
    )
    assert memory.device_cache is None  # nothing was looked up yet
    assert ModelMemory(layers, MemoryConfig(), trained_length=10_000).device_cache is None


def test_a_gpu_has_slots_for_a_step_and_for_what_is_predicted() -> None:
    assert MemoryConfig().gpu_slots == 32
    assert MemoryConfig(answer_blocks=20).gpu_slots == 60
    assert MemoryConfig(answer_blocks=8, device_cache_blocks=8).gpu_slots == 12
    assert MemoryConfig(device_cache_blocks=100).gpu_slots == 100
