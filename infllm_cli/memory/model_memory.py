"""The memories of all layers of a model, as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from infllm_cli.memory.config import MemoryConfig
from infllm_cli.memory.device_layer import DeviceLayer
from infllm_cli.memory.device_path import DeviceOptions, DevicePath
from infllm_cli.memory.layer import Layer, LayerGeometry
from infllm_cli.memory.layer_memory import LayerMemory
from infllm_cli.memory.native_layer import NativeLayer
from infllm_cli.memory.native_layer import suits as suits_native
from infllm_cli.memory.rotary import Table
from infllm_cli.memory.sliding import SlidingLayer, windows_only
from infllm_cli.memory.step import Phase, Step
from infllm_cli.policies.choose import build_layer


class ModelMemory:
    """One `Layer` per layer of the model, and the position that all of them have reached.

    Args:
        layers: geometry of each layer, in the model's order.
        config: sizes; ignored by sliding layers but for the chunk.
        trained_length: positions the model was trained on.
        whole_tokens: attend a context of up to this many tokens whole (0: as the policy has it,
            from the start). Until it outgrows them no policy has a say.
        gates: [layers, H] weights of the memory, of Infini-attention; None: it is not read.
        device: how layers on a GPU are to use it.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        config: MemoryConfig,
        *,
        trained_length: int,
        whole_tokens: int = 0,
        gates: torch.Tensor | None = None,
        device: DeviceOptions | None = None,
    ) -> None:
        self.config = config
        self.device_path = DevicePath(device or DeviceOptions())
        self.tokens = 0
        self.watch_layers = False  # whether steps tell the attention of each layer apart
        # Is shown every layer with the queries [H, L, d], un-rotated, that it is about to answer.
        self.observer: Callable[[Layer, Tensor, Step], None] | None = None
        self._tables: dict[tuple[int, int, int], Table] = {}  # of the last step
        self._asked = 0  # questions that are open, one within the other
        # A model that slides in every layer would forget everything: there the tiers replace the
        # sliding window, within the distances it was trained on.
        all_slide = windows_only(list(layers)) is not None
        native = self.device_path.options.native
        self.layers: list[Layer] = []
        for geometry in layers:
            if geometry.sliding_window is not None and not all_slide:
                self.layers.append(SlidingLayer(geometry, config.chunk_tokens))
            elif whole_tokens or config.policy.has_blocks:
                lengths = {"whole_tokens": whole_tokens, "trained_length": trained_length}
                if self.device_path.suits(geometry, config):
                    self.layers.append(DeviceLayer(geometry, config, self.device_path, **lengths))
                elif native is not None and suits_native(geometry, config):
                    self.layers.append(NativeLayer(geometry, config, native, **lengths))
                else:
                    self.layers.append(LayerMemory(geometry, config, **lengths))
            else:
                own = None if gates is None else gates[geometry.index]
                self.layers.append(build_layer(geometry, config, trained_length, own))
        self.device_path.link(self.layers)

    def step(self, phase: Phase, length: int, keep_from: int | None = None) -> Step:
        """Begin a step over the next `length` tokens."""
        step = Step(phase, self.tokens, length, keep_from, earlier_tables=self._tables)
        if phase is not Phase.READ:
            step.mass = torch.zeros(step.end)
            step.by_layer = {} if self.watch_layers else None
        return step

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """What layer `index` answers, shapes as of `Layer.attend`; an observer sees it coming."""
        layer = self.layers[index]
        if self.observer is not None:
            self.observer(layer, q, step)
        return layer.attend(q, k, v, step)

    def finish(self, step: Step) -> None:
        """Count the tokens of a step that every layer has taken part in."""
        assert step.start == self.tokens
        for look in step.deferred:
            look()
        step.deferred.clear()
        self._tables = step.tables
        self.tokens = step.end

    def reserve(self, tokens: int) -> None:
        """Expect a context of `tokens` tokens."""
        for layer in self.layers:
            layer.reserve(tokens)

    @contextmanager
    def question(self) -> Iterator[None]:
        """Whatever passes through the memory inside leaves no trace in it.

        Inside, the window is sealed: the document's end has no privilege over its other parts, and
        is found by lookup like them. A question within another one (a conversation) leaves what
        stands before it in the window.
        """
        tokens = self.tokens
        for layer in self.layers:
            layer.mark()
        if not self._asked:
            for layer in self.tiered:
                layer.seal()
        self._asked += 1
        try:
            yield
        finally:
            self._asked -= 1
            for layer in self.layers:
                layer.rollback()
            self.tokens = tokens

    def freeze(self) -> None:
        """The document has been read: its last blocks become a segment of their own.

        What a question adds goes into another, so that a memory is built of the same segments
        whether it was read now or comes from disk.
        """
        for layer in self.tiered:
            layer.arena.freeze()

    @property
    def tiered(self) -> list[LayerMemory]:
        """The layers that keep blocks."""
        return [layer for layer in self.layers if isinstance(layer, LayerMemory)]

    @property
    def blocks(self) -> int:
        """Sealed blocks per layer."""
        return max((layer.arena.count for layer in self.tiered), default=0)

    @property
    def dropped(self) -> int:
        """Blocks per layer that were given up."""
        return max((layer.arena.dropped for layer in self.tiered), default=0)

    @property
    def device_cache(self) -> dict[str, int | str | None] | None:
        """Blocks that were on the device when they were wanted, or were not; None: no cache.

        On a GPU also what crossed the bus, and where stored keys were scanned last.
        """
        caches = [layer.cache for layer in self.tiered if layer.cache is not None]
        if not caches:
            return None
        found: dict[str, int | str | None] = {
            "hits": sum(c.hits for c in caches),
            "misses": sum(c.misses for c in caches),
        }
        ours = [layer for layer in self.tiered if isinstance(layer, DeviceLayer)]
        if ours:
            found |= self.device_path.moved.as_dict()
            places = sorted({layer.scanned.value for layer in ours if layer.scanned is not None})
            found["keys_scanned_on"] = "+".join(places) or None
        return found

    @property
    def device_bytes(self) -> int:
        """Bytes held on the model's device."""
        return sum(layer.device_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes held in host memory."""
        return sum(layer.host_bytes for layer in self.layers)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment of all layers."""
        return sum(layer.arena.segment_bytes for layer in self.tiered)

    @property
    def mapped_bytes(self) -> int:
        """Bytes held in files that are mapped in."""
        return sum(layer.mapped_bytes for layer in self.layers)
