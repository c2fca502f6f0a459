"""Do RAM and disk hold the keys and values of a document, and stored in how many bits?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infllm_cli import budget
from infllm_cli.budget import LayerShape
from infllm_cli.errors import CapacityError
from infllm_cli.memory.codecs import Codec
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import Policy
from infllm_cli.wording import size

DENSER = Codec.INT4  # what is stored where the usual codec does not fit
ANY = 2**62  # bytes of disk, where what they do not hold may be dropped


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that keys and values may take.

    Attributes:
        host: of RAM.
        disk: of files.
        denser: whether a document that does not fit may be stored in fewer bits. Disk comes first,
            since it loses nothing; and fewer bits are chosen for the whole document before it is
            read, so that a memory does not depend on when a limit was reached.
        may_drop: whether what does not fit is given up while reading instead of being refused.
    """

    host: int
    disk: int = 0
    denser: bool = False
    may_drop: bool = False

    def times(self, factor: int) -> Room:
        """So many times as much."""
        return replace(self, host=factor * self.host, disk=factor * self.disk)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the layers of a model take, against the room that there is.

    Attributes:
        value_bytes: of a number as the model makes it.
        on_host: whether the model's device is the host itself.
    """

    layers: Sequence[LayerShape]
    value_bytes: int
    room: Room
    on_host: bool = True

    def fits(self, config: MemoryConfig, context: int) -> bool:
        """Whether a context of so many tokens fits."""
        return self._fits(config, context, self.room)

    def choose(self, config: MemoryConfig, context: int) -> MemoryConfig:
        """The configuration as it is, or, where that does not fit, a denser one that is better."""
        if not self.room.denser or not config.policy.has_blocks or self.fits(config, context):
            return config
        denser = replace(config, codec=DENSER)
        return denser if self.room.may_drop or self.fits(denser, context) else config

    def check(
        self, name: str, config: MemoryConfig, prefix: int, tokens: int, *, estimated: bool = False
    ) -> None:
        """Refuse a document of so many tokens, behind so many of the prompt, that does not fit.

        Args:
            estimated: the count is an estimate; what takes twice the room passes.

        Raises:
            CapacityError: it tells what the document takes, and what may be done.
        """
        room, context = self.room, prefix + tokens
        given = room.times(2) if estimated else room
        if self._fits(config, context, replace(given, disk=ANY) if room.may_drop else given):
            return
        needed, disk = self._needed(config, context, room)
        least = budget.least_host_bytes(self.layers, self.value_bytes, config)
        stored = f" as {config.codec.value}" if config.policy.has_blocks else ""
        raise CapacityError(
            f"{name}: the keys and values of its {'about ' if estimated else ''}{tokens:,} tokens "
            f"take {size(needed)}{stored}; the limits are {size(room.host)} of host memory "
            f"(--host-limit; at least {size(min(needed, least))}) and {size(disk)} of disk "
            "(--disk-limit). Ask a part of it, choose a smaller --model, or raise the limits; "
            "`infllm plan` tells more."
        )

    def _needed(self, config: MemoryConfig, context: int, room: Room) -> tuple[int, int]:
        """Bytes that it takes, and what of it may lie on disk."""
        need = budget.of_policy(self.layers, self.value_bytes, config, context)
        if config.policy is Policy.DENSE and self.on_host:
            return need.device_bytes, 0  # one and the same memory, and nothing moves away
        return need.host_peak_bytes, room.disk

    def _fits(self, config: MemoryConfig, context: int, room: Room) -> bool:
        needed, disk = self._needed(config, context, room)
        least = budget.least_host_bytes(self.layers, self.value_bytes, config)
        return budget.fits_host_and_disk(needed, least, room.host, disk)
