"""Where are a layer's stored keys scanned for the least time? Arithmetic, no tensors.

Three places: a copy of the packed keys on the device, if there is room; the host, where they lie;
or the device again, over the bus every time. The speeds are round figures of ordinary machines, so
the seconds are estimates: what they decide are factors of ten.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Place(enum.Enum):
    """Where the keys are when they are scored."""

    DEVICE = "device"  # a copy stays there
    HOST = "host"  # the processor scores them
    BUS = "bus"  # streamed to the device at every scan


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes and multiply-adds per second.

    Attributes:
        device: memory of a GPU (an H200 has 4.8e12, a consumer's card 0.5e12 to 1.8e12).
        bus: PCIe 4.0 with 16 lanes, as pinned memory reaches it.
        host: of a core of the host that scans codes (2.4e9 and 3.7e9 measured on one of AVX-512,
            int8 and bf16, head_dim 64).
        host_products: of such a core, with many queries at once.
    """

    device: float = 1.0e12
    bus: float = 2.2e10
    host: float = 3.0e9
    host_products: float = 2.0e10


# Before anything is scanned: launches on a device, the way of the queries to the host and back.
DEVICE_START, HOST_START, BUS_START = 2e-5, 1e-4, 1e-4


@dataclass(frozen=True, slots=True)
class Scan:
    """An estimate.

    Attributes:
        bytes: of the keys.
        place: the cheapest.
        seconds: of every place, by its value; a place that cannot be used is not there.
    """

    bytes: int
    place: Place
    seconds: dict[str, float] = field(default_factory=dict)


def estimate(
    key_bytes: int,
    numbers: int,
    rows: int,
    *,
    has_device: bool,
    device_room: int,
    layers: int = 1,
    cores: int = 1,
    speeds: Speeds = Speeds(),
) -> Scan:
    """The cheapest place for a scan.

    Args:
        key_bytes: as they are stored.
        numbers: of the keys, heads times tokens times head_dim.
        rows: queries that each of them meets: tokens times query heads of a KV head.
        has_device: whether there is a GPU.
        device_room: bytes of it that the keys may take.
        cores: of the host.
        layers: that `key_bytes` and `numbers` are the sum of; each is started for itself.
    """
    slowest = max(key_bytes / speeds.host, rows * numbers / speeds.host_products)
    seconds = {Place.HOST.value: slowest / cores}
    if has_device:
        seconds[Place.HOST.value] += layers * HOST_START
        seconds[Place.BUS.value] = key_bytes / speeds.bus + layers * BUS_START
        if key_bytes <= device_room:
            seconds[Place.DEVICE.value] = key_bytes / speeds.device + layers * DEVICE_START
    place = Place(min(seconds, key=seconds.__getitem__))
    return Scan(key_bytes, place, seconds)
