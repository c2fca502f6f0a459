"""How much of the exact attention does each lookup capture? For tuning without generating.

Every stored key is scored against the queries of a question, and of its known answer, which is
given token by token: nothing is generated. A softmax over all stored keys tells each block's share
of the attention; what a lookup captures is the sum over the blocks that it loads. All lookups
compared see the same queries. Of a KV head and a number of blocks, no choice captures more than
`exact`, which takes the blocks of the highest mass.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infllm_cli.errors import UsageError
from infllm_cli.evaluate.grid import GridRunner
from infllm_cli.evaluate.results import Row
from infllm_cli.evaluate.tasks.base import Probe, Task
from infllm_cli.evaluate.varied import System
from infllm_cli.memory import lookup
from infllm_cli.memory.knobs import Policy, Relevance, Sharing
from infllm_cli.memory.layer import Layer
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.step import Phase, Step
from infllm_cli.reader import Memory, Reader
from infllm_cli.voices import Voice, follow

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of blocks, as far as there are so many


class Way(str, enum.Enum):
    """How blocks are chosen."""

    EXACT = "exact"  # by mass, each KV head its own
    SHARED = "exact, shared"  # by mass, the same for all KV heads of a layer
    REPRESENTATIVES = "representatives"  # by those that the reading has chosen, as configured
    LATEST = "latest"  # the last ones: what a longer window would see


@dataclass(frozen=True)
class Captured:
    """What one way captured in one phase with a number of blocks.

    Attributes:
        shares: of each layer's mass on stored blocks, by layer index.
        found: by layer index, the share of the answer's own blocks that were loaded; empty where
            the answer stands in none.
    """

    phase: str
    way: str
    blocks: int
    shares: dict[int, float]
    found: dict[int, float]

    def as_dict(self) -> Row:
        """Plain values, rounded."""

        def rounded(values: dict[int, float]) -> dict[str, float]:
            return {str(index): round(value, 4) for index, value in sorted(values.items())}

        return {
            "phase": self.phase,
            "way": self.way,
            "blocks": self.blocks,
            "shares": rounded(self.shares),
            "found": rounded(self.found),
        }


class Observer:
    """Watches the queries of a memory's steps; see `ModelMemory.observer`.

    Args:
        answer_blocks: indices of the blocks that hold the answer.
    """

    def __init__(self, answer_blocks: Sequence[int]) -> None:
        self._answer = torch.tensor(sorted(answer_blocks), dtype=torch.int64)
        self._seen: dict[tuple[str, str, int], dict[int, list[tuple[float, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )

    def __call__(self, layer: Layer, q: Tensor, step: Step) -> None:
        """A layer is about to answer queries q [H, L, d], un-rotated."""
        if not isinstance(layer, LayerMemory) or layer.arena.count == 0:
            return
        g = layer.geometry
        queries = g.rotary.rotate(q, step.table(g.rotary, layer.config.window_tokens, 1))
        mass = lookup.exact(queries, layer.arena, g.scaling, 1)[1].cpu()
        shared = lookup.shared(mass, Sharing.PER_LAYER)
        count = layer.arena.count
        latest = torch.arange(count - 1, -1, -1).expand(len(mass), -1)
        orders = {
            Way.EXACT: mass.argsort(dim=1, descending=True),
            Way.SHARED: shared.argsort(dim=1, descending=True),
            Way.LATEST: latest,
        }
        for blocks in COUNTS:
            if blocks > count:
                break
            chosen = {way: order[:, :blocks] for way, order in orders.items()}
            chosen[Way.REPRESENTATIVES] = _by_representatives(layer, queries, blocks)
            for way in Way:
                self._note(step.phase, way, blocks, g.index, mass, chosen[way])

    def _note(
        self, phase: Phase, way: Way, blocks: int, layer: int, mass: Tensor, chosen: Tensor
    ) -> None:
        share = mass.gather(1, chosen).sum(dim=1) / mass.sum(dim=1)
        found = torch.isin(chosen, self._answer).sum(dim=1) / max(len(self._answer), 1)
        values = (float(share.mean()), float(found.float().mean()))
        self._seen[phase.value, way.value, blocks][layer].append(values)

    def captured(self) -> list[Captured]:
        """Means over the steps of each phase."""
        told = []
        for (phase, way, blocks), layers in self._seen.items():
            means = {index: np.mean(values, axis=0) for index, values in layers.items()}
            told.append(
                Captured(
                    phase,
                    way,
                    blocks,
                    {index: float(mean[0]) for index, mean in means.items()},
                    {i: float(mean[1]) for i, mean in means.items()} if len(self._answer) else {},
                )
            )
        return told


def _by_representatives(layer: LayerMemory, queries: Tensor, blocks: int) -> Tensor:
    """What the layer would load for rotated queries [H, L, d]: [H_kv, blocks]."""
    config, arena = layer.config, layer.arena
    relevance = config.representatives_relevance
    if relevance is not Relevance.SUM:
        return lookup.by_each_representative(
            queries,
            layer.representatives,
            blocks,
            relevance,
            layer.geometry.scaling,
            arena.missing(),
            config.sharing,
        ).cpu()
    summed = queries.float().sum(dim=1).unflatten(0, (layer.geometry.kv_heads, -1)).sum(dim=1)
    return lookup.by_representatives(
        summed, layer.representatives, blocks, arena.missing(), config.sharing
    ).cpu()


def blocks_of(memory: Memory, probe: Probe) -> set[int]:
    """The stored blocks that hold a probe's answer."""
    config, found = memory.state.config, set()
    for start, end in probe.spans:
        first = int(np.searchsorted(memory.tokens.spans[:, 1], start, side="right"))
        last = int(np.searchsorted(memory.tokens.spans[:, 0], end, side="left"))
        for position in range(memory.first_position + first, memory.first_position + last):
            if position >= config.sink_tokens:
                found.add((position - config.sink_tokens) // config.block_tokens)
    return found


class OracleRunner(GridRunner):
    """Measures what lookups capture in place of what the model answers.

    Raises:
        UsageError: a policy that looks nothing up.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for policy in self.grid.policies:
            if not policy.has_blocks:
                known = ", ".join(p.value for p in Policy if p.has_blocks)
                raise UsageError(
                    f"--policies {policy.value}: it looks nothing up; the oracle knows {known}."
                )

    def _settings(self, task: Task, policy: System) -> Row:
        return {**super()._settings(task, policy), "measure": "oracle"}

    def _answer(self, reader: Reader, memory: Memory, task: Task, probe: Probe) -> Row:
        """Let the question and the known answer pass, and watch."""
        prompt, state = reader.prompt, memory.state
        with state.question():
            held = {block for block in blocks_of(memory, probe) if block < state.blocks}
            observer = Observer(sorted(held))
            voice = Voice(reader, state)
            voice.read(prompt.turn)
            voice.skim(prompt.task_ids())
            question = prompt.question_ids(self._question(probe))
            answer = prompt.plain_ids(" " + " ".join(probe.answers))
            state.observer = observer
            try:
                voice.ask(
                    np.concatenate([question, prompt.closing, prompt.prefill_ids(probe.prefill)])
                )
                for token in answer:
                    self.deadline.check()
                    follow([voice], int(token))
            finally:
                state.observer = None
        return {
            "answer_blocks": sorted(held),
            "captured": [captured.as_dict() for captured in observer.captured()],
        }

    def _told(self, measured: Row) -> str:
        loaded = [
            row for row in measured["captured"] if row["blocks"] == 8 and row["phase"] == "ask"
        ]
        shares = [f"{row['way']} {_mean(row['shares']):.0%}" for row in loaded]
        return f"captured by 8 blocks: {'; '.join(shares)}" if shares else "nothing is stored"


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values) if values else 0.0
