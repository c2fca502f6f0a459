"""One knob of a policy at several values, side by side like policies."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infllm_cli.errors import UsageError
from infllm_cli.memory.config import FLAGS, KINDS, KNOB_FLAGS
from infllm_cli.memory.knobs import Policy

# What can be varied, by its flag without the dashes: the field of `MemoryConfig`.
KNOBS = {
    flag.removeprefix("--"): name
    for name, flag in {**FLAGS, **KNOB_FLAGS}.items()
    if name != "policy"
}


@dataclass(frozen=True)
class Varied:
    """A policy with a knob set.

    Attributes:
        knob: its flag without the dashes.
    """

    policy: Policy
    knob: str
    setting: int | enum.Enum

    @property
    def value(self) -> str:
        """What it is called in results."""
        setting = self.setting.value if isinstance(self.setting, enum.Enum) else self.setting
        return f"{self.policy.value}, {self.knob} {setting}"

    @property
    def has_blocks(self) -> bool:
        """As of its policy."""
        return self.policy.has_blocks


System = Policy | Varied


def changes_of(system: System) -> dict[str, Any]:
    """What a system decides of a `MemoryConfig`, by the names of its fields."""
    if isinstance(system, Policy):
        return {"policy": system}
    return {"policy": system.policy, KNOBS[system.knob]: system.setting}


def vary(policies: Sequence[Policy], text: str | None) -> list[System]:
    """The policies, each at every value that a text like "block=32,64" names; None: as they are.

    Raises:
        UsageError: no such knob, or a value that it cannot have.
    """
    if text is None:
        return list(policies)
    knob, _, values = text.partition("=")
    knob = knob.strip().removeprefix("--")
    if knob not in KNOBS:
        raise UsageError(f"--vary: {knob!r} is unknown; choose from {', '.join(KNOBS)}.")
    settings = [_setting(knob, value.strip()) for value in values.split(",")]
    return [Varied(p, knob, setting) for p in policies for setting in dict.fromkeys(settings)]


def _setting(knob: str, value: str) -> int | enum.Enum:
    kind = KINDS.get(KNOBS[knob])
    try:
        return int(value) if kind is None else kind(value)
    except ValueError:
        known = "numbers" if kind is None else ", ".join(item.value for item in kind)
        raise UsageError(
            f"--vary: {knob} cannot be {value!r}; write --vary {knob}=A,B with {known}."
        ) from None
