"""Fit the gates of Infini-attention: one number per layer and head of an otherwise frozen model.

The paper trains the whole model with its gates. Here the model stays as it is, so all that can be
learned is how much each head gains from a memory that it was never trained to read. Each segment is
one step: the loss of its next tokens, with the memory of the segments before it as it is; gradients
do not run from one segment back into another. Sliding layers, which have no gates, see the segment
only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infllm_cli.attention import ARGUMENT
from infllm_cli.errors import InfllmError, UsageError
from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.knobs import InfiniUpdate
from infllm_cli.memory.layer import LayerGeometry
from infllm_cli.memory.rotary import Table
from infllm_cli.memory.sliding import windows_only
from infllm_cli.memory.softmax import attend
from infllm_cli.policies.compressive import Memory, mix, retrieve, written
from infllm_cli.policies.positions import additive

# Of all segments, those at the end of each document that are not trained on but reported.
HELD_OUT = 0.25
START = -3.0  # beta: a gate of 0.05. From 0.5 a frozen model does not recover.
# Logits of so many tokens of a segment are made, evenly spread: a whole vocabulary for each.
JUDGED = 512


@dataclass(frozen=True, slots=True)
class FitOptions:
    """How the gates are fitted.

    Raises:
        UsageError: a value out of range, naming the flag.
    """

    epochs: int = 1
    learning_rate: float = 0.2
    most_tokens: int = 32_768  # of all documents together

    def __post_init__(self) -> None:
        """Refuse what fits nothing."""
        if self.epochs < 1:
            raise UsageError(f"--epochs is {self.epochs}; it must be at least 1.")
        if not 0 < self.learning_rate <= 10:
            raise UsageError(f"--learning-rate is {self.learning_rate}; choose above 0, to 10.")
        if self.most_tokens < 1:
            raise UsageError(f"--most-tokens is {self.most_tokens}; it must be at least 1.")


@dataclass(frozen=True, slots=True)
class SegmentDone:
    """A segment has been gone through.

    Attributes:
        stage: what for.
        done, total: segments.
        loss: nats per token of this one; None: the first of a document, which tells nothing.
    """

    stage: str
    done: int
    total: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The outcome.

    Attributes:
        beta: [layers, H] float32.
        losses: nats per token by state of the gates ("off", "half", "fitted"), of segments that
            were not trained on.
        trained: the same, of those that were.
        segments: of the text: trained on, and held out.
    """

    beta: Tensor
    losses: dict[str, float]
    trained: dict[str, float]
    segments: tuple[int, int]


class _SegmentCall:
    """Infini-attention over one whole segment, so that gradients reach the gates.

    After the pass `added` holds what each layer's segment adds to its memory.
    """

    def __init__(
        self,
        layers: list[LayerGeometry],
        memories: list[Memory],
        gates: Tensor | None,
        update: InfiniUpdate,
    ) -> None:
        self.layers = layers
        self.memories = memories
        self.gates = gates
        self.update = update
        self.added: list[Memory | None] = [None] * len(layers)
        self._tables: dict[tuple[int, int], Table] = {}
        self._masks: dict[tuple[int, int | None], Tensor] = {}

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scaling: float, extra: dict
    ) -> Tensor:
        """q [H, L, d], k and v [H_kv, L, d], un-rotated -> out [H, L, d]."""
        g, memory = self.layers[module.layer_idx], self.memories[module.layer_idx]
        length = q.shape[1]
        key = (id(g.rotary), length)
        if key not in self._tables:
            self._tables[key] = g.rotary.table(0, length)
        table = self._tables[key]
        scale = g.rotary.query_scale(0, length)
        turned = _rotate(q, table, g)
        if scale is not None:
            turned = (turned * scale).to(turned.dtype)
        mask = self._mask(length, g.sliding_window, q)
        local = attend(turned, _rotate(k, table, g), v, mask, g.scaling, g.softcap)
        if g.sliding_window is not None:
            return local
        with torch.no_grad():
            self.added[module.layer_idx] = written(k, v, memory, self.update)
        if self.gates is None or memory.tokens == 0:
            return local
        return mix(local, retrieve(q, memory), self.gates[module.layer_idx])

    def _mask(self, length: int, sliding: int | None, like: Tensor) -> Tensor:
        key = (length, sliding)
        if key not in self._masks:
            at = torch.arange(length)
            distance = at[:, None] - at[None, :]
            visible = (distance >= 0) & (distance < (sliding or length))
            self._masks[key] = additive(visible, like)
        return self._masks[key]


def _rotate(x: Tensor, table: Table, g: LayerGeometry) -> Tensor:
    """As `Rotary.rotate`, which writes in place and so cannot be differentiated."""
    cos, sin = table
    half = cos.shape[-1]
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if g.rotary.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return torch.cat([out.to(x.dtype), rest], dim=-1)


class Fitting:
    """One fit; `steps` yields its events, the last of them the `Fitted`.

    Args:
        model: frozen, its attention ours.
        layers: geometry of each layer.
        texts: ids [n] of each document, the prompt's beginning included.

    Raises:
        UsageError: no document is long enough: a memory takes two segments, and two more tell what
            it is worth.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[LayerGeometry],
        config: MemoryConfig,
        texts: list[np.ndarray],
        options: FitOptions,
    ) -> None:
        self.model = model
        if windows_only(layers) is not None:  # as `ModelMemory` has it: there tiers replace them
            layers = [replace(g, sliding_window=None) for g in layers]
        self.layers = layers
        self.config = config
        self.options = options
        self.texts = _segments(texts, config.infini_segment_tokens, options.most_tokens)
        # Of each text the first segments are trained on, at least two, and at least one is not.
        self.trained = [
            len(text) - max(1, round(HELD_OUT * len(text))) if len(text) > 2 else 0
            for text in self.texts
        ]
        if not any(self.trained):
            least = 3 * config.infini_segment_tokens
            raise UsageError(
                f"fitting takes a document of at least {least:,} tokens (three segments of "
                f"{config.infini_segment_tokens:,}); give a longer one or a smaller "
                "--infini-segment."
            )

    def steps(self) -> Iterator[SegmentDone | Fitted]:
        """Train, then tell what it was worth."""
        shape = (len(self.layers), self.layers[0].heads)
        device = self.layers[0].device
        beta = torch.full(shape, START, device=device, requires_grad=True)
        optimizer = torch.optim.Adam([beta], lr=self.options.learning_rate)
        total = self.options.epochs * sum(self.trained)
        done = 0
        for _ in range(self.options.epochs):
            for text, count in zip(self.texts, self.trained, strict=True):
                memories = self._empty()
                for ids in text[:count]:
                    loss = self._train(ids, memories, beta, optimizer)
                    done += 1
                    yield SegmentDone("fitting the gates", done, total, loss)
        beta = beta.detach()
        gates = {
            "off": None,
            "half": torch.full(shape, 0.5, device=device),
            "fitted": torch.sigmoid(beta),
        }
        losses: dict[str, float] = {}
        trained: dict[str, float] = {}
        for name, weights in gates.items():
            seen, kept_back = [], []
            yield from self._measure(f"loss with gates {name}", weights, seen, kept_back)
            trained[name] = float(np.mean(seen)) if seen else math.nan
            losses[name] = float(np.mean(kept_back))
        held_out = sum(len(t) for t, n in zip(self.texts, self.trained, strict=True) if n)
        held_out -= sum(self.trained)
        yield Fitted(beta.cpu(), losses, trained, (sum(self.trained), held_out))

    # -- one segment --------------------------------------------------------------------------

    def _empty(self) -> list[Memory]:
        return [Memory.empty(g.kv_heads, g.head_dim, g.value_dim, g.device) for g in self.layers]

    def _train(
        self,
        ids: Tensor,
        memories: list[Memory],
        beta: Tensor,
        optimizer: torch.optim.Optimizer,
    ) -> float | None:
        """One step; None where the memory is still empty, and so nothing can be learned."""
        if memories[self._first_gated].tokens == 0:
            with torch.no_grad():
                self._forward(ids, memories, None)
            return None
        optimizer.zero_grad()
        loss = self._forward(ids, memories, torch.sigmoid(beta))
        loss.backward()
        if not bool(torch.isfinite(beta.grad).all()):
            raise InfllmError("the gates' gradients are not finite; try --dtype f32.")
        optimizer.step()
        return float(loss.detach())

    @property
    def _first_gated(self) -> int:
        """The first layer that has a memory."""
        return next(i for i, g in enumerate(self.layers) if g.sliding_window is None)

    @torch.no_grad()
    def _measure(
        self, stage: str, gates: Tensor | None, seen: list[float], kept_back: list[float]
    ) -> Iterator[SegmentDone]:
        """Losses of all segments but each text's first, whose memory is empty."""
        total = sum(len(t) for t, n in zip(self.texts, self.trained, strict=True) if n)
        done = 0
        for text, count in zip(self.texts, self.trained, strict=True):
            if not count:
                continue
            memories = self._empty()
            for index, ids in enumerate(text):
                loss = float(self._forward(ids, memories, gates))
                done += 1
                yield SegmentDone(stage, done, total, loss)
                if index:
                    (seen if index < count else kept_back).append(loss)

    def _forward(self, ids: Tensor, memories: list[Memory], gates: Tensor | None) -> Tensor:
        """Loss of a segment, in nats per token; `memories` are those after it."""
        device = self.layers[0].device
        ids = ids.to(device)
        call = _SegmentCall(self.layers, memories, gates, self.config.infini_update)
        judged = torch.linspace(0, len(ids) - 2, min(JUDGED, len(ids) - 1), device=device).long()
        logits = self.model(
            input_ids=ids[None],
            position_ids=torch.zeros(1, len(ids), dtype=torch.long, device=device),
            use_cache=False,
            logits_to_keep=judged,
            **{ARGUMENT: call},
        ).logits[0]
        loss = F.cross_entropy(logits.float(), ids[judged + 1])
        for index, added in enumerate(call.added):
            if added is not None:
                memories[index] = memories[index].plus(added)
        return loss


def _segments(texts: list[np.ndarray], size: int, most: int) -> list[list[Tensor]]:
    """Whole segments [size] of each text, of up to `most` tokens together, shared evenly."""
    share = max(most // len(texts), size)
    found = []
    for text in texts:
        ids = torch.from_numpy(text[:share].astype(np.int64))
        found.append([ids[start : start + size] for start in range(0, len(ids) - size + 1, size)])
    return found
