"""What the layers of a model on a GPU share: streams, budgets of device memory, the choice of scan.

The device path computes what `LayerMemory` computes, with the tiers read where they lie. It is
taken on a GPU, and on a CPU where a test wants it; there the same calls run the torch twins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from infllm_cli.memory.config import PREDICTED_BLOCKS, MemoryConfig
from infllm_cli.memory.device_keys import Budget
from infllm_cli.memory.knobs import Positions
from infllm_cli.memory.scan_cost import Place
from infllm_cli.memory.transfers import Moved, Transfers

if TYPE_CHECKING:
    from infllm_cli.kernels.native.choice import NativeKernels
    from infllm_cli.kernels.native.library import Native
    from infllm_cli.memory.layer import LayerGeometry


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """What layers may use of the machine beyond torch on its processor.

    Attributes:
        limit_bytes: of stored keys that may be copied to each device; None: half of what is free
            there when it is first needed.
        predicted_blocks: blocks per KV head that are fetched before they are asked for.
        on_cpu: take the path on a CPU, too.
        scan: where stored keys are scanned, whatever it costs; None: where it is cheapest.
        native: functions in C for layers on the processor, and to gather what goes to a device;
            None: torch does everything.
    """

    limit_bytes: int | None = None
    predicted_blocks: int = PREDICTED_BLOCKS
    on_cpu: bool = False
    scan: Place | None = None
    native: NativeKernels | None = None


@dataclass(slots=True)
class DevicePath:
    """Shared by the layers of one memory."""

    options: DeviceOptions
    _transfers: dict[torch.device, Transfers] = field(default_factory=dict)
    _budgets: dict[torch.device, Budget] = field(default_factory=dict)

    def suits(self, geometry: LayerGeometry, config: MemoryConfig) -> bool:
        """Whether a layer's memory can go this way; others are computed as on a CPU."""
        here = geometry.device.type == "cuda" or self.options.on_cpu
        return here and config.positions is Positions.CONSECUTIVE

    def link(self, layers: Sequence[object]) -> None:
        """Tell each layer which one computes next."""
        from infllm_cli.memory.device_layer import DeviceLayer

        ours = [layer for layer in layers if isinstance(layer, DeviceLayer)]
        for layer, following in zip(ours, [*ours[1:], *ours[:1]], strict=True):
            layer.following = following

    def transfers(self, device: torch.device) -> Transfers:
        """The copies of a device."""
        if device not in self._transfers:
            self._transfers[device] = Transfers(device)
        return self._transfers[device]

    def budget(self, device: torch.device) -> Budget:
        """What stored keys may take of a device."""
        if device not in self._budgets:
            limit = self.options.limit_bytes
            if limit is None:
                limit = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**62
            self._budgets[device] = Budget(limit)
        return self._budgets[device]

    @property
    def native(self) -> Native | None:
        """Functions in C that gather blocks for the bus; None: there are none here."""
        native = self.options.native
        return None if native is None else native.get()

    @property
    def moved(self) -> Moved:
        """What has crossed the bus, of all devices."""
        total = Moved()
        for transfers in self._transfers.values():
            total.add(transfers.moved)
        return total
