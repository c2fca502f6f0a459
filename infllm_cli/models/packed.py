"""Matrices laid out for the processor's own products once, not anew at every token.

torch multiplies bfloat16 on x86 with oneDNN, which wants weights in a layout of its own. Given
plain weights, it brings them there at every call, which for a single token takes as long as the
product. Packed once, the same kernels give the same bits: measured on one core for all matrices of
the default model, 21 ms instead of 38 for one token, and a few per cent of a chunk.
"""

from __future__ import annotations

import platform

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TRIAL = (3, 40, 24)  # tokens, inputs, outputs of a product that is tried first
FOR_TOKENS = 1  # the layout that is best for so many; for a chunk it makes no difference


class PackedLinear(nn.Module):
    """What an `nn.Linear` computes, from packed weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.register_buffer("packed", pack(linear.weight.detach()), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Weights `[out, in]` as they were: a copy, for whoever looks at them."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """X `[..., in]` -> `[..., out]`."""
        return _product(x, self.packed, self.bias)


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` of a model by its packed form, where there is one; how many.

    The plain weights are given up one by one, so that no moment holds the model twice. A head that
    shares its weights with the embedding is packed, too; the embedding keeps its own.
    """
    if not can_pack(model):
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        # Not its subclasses: those of adapters and quantizers do more.
        if type(child) is nn.Linear and child.weight.dtype is torch.bfloat16
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)


def can_pack(model: nn.Module) -> bool:
    """Whether products of packed weights exist here, and equal plain ones in a trial.

    Their names are private to torch: where one is gone, weights stay as they are.
    """
    where = {parameter.device.type for parameter in model.parameters()}
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if where != {"cpu"} or not x86 or not torch.backends.mkldnn.is_available():
        return False
    tokens, inputs, outputs = TRIAL
    numbers = torch.arange(inputs * outputs, dtype=torch.float32).sin().bfloat16()
    weight = numbers.view(outputs, inputs)
    x = numbers[: tokens * inputs].view(tokens, inputs)
    try:
        with torch.no_grad():
            return torch.equal(_product(x, pack(weight), None), F.linear(x, weight))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model is made of, packed ones included, shared ones once."""
    plain = sum(parameter.numel() for parameter in model.parameters())
    tied = model.get_output_embeddings()
    shares = model.config.get_text_config().tie_word_embeddings
    packed = [
        m.packed.numel()
        for m in model.modules()
        if isinstance(m, PackedLinear) and not (shares and m is tied)
    ]
    return plain + sum(packed)


def pack(weight: Tensor) -> Tensor:
    """Weights `[out, in]` in the layout of the processor's products."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, FOR_TOKENS)


def _product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
