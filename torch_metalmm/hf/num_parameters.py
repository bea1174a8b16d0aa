"""num_parameters of the libraries' models, in weights where theirs would count packed bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ..models.shard.apply import whole_shape
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.fused import MergedLinear


def of_weights(count: Callable[..., int]) -> Callable[..., int]:
    """num_parameters of a library's models, `count`, as a method that counts weights."""

    @functools.wraps(count)
    def num_parameters(
        self: Any, only_trainable: bool = False, exclude_embeddings: bool = False
    ) -> int:
        """The count of the dense model: weights, not bytes. Packed weights are frozen."""
        total = count(self, only_trainable, exclude_embeddings)
        values = {} if only_trainable else _values(self)
        left_out = {
            f"{name}.weight"
            for name, module in self.named_modules()
            if exclude_embeddings and isinstance(module, QuantEmbedding)
        }
        for name, parameter in self.named_parameters():
            if id(parameter) in values and name not in left_out:
                total += values[id(parameter)] - parameter.numel()
        return total

    return num_parameters


def _values(model: nn.Module) -> dict[int, int]:
    """{id of a packed parameter, or of its bias: the number of weights in that of the model}."""
    values = {}
    for module in model.modules():
        if isinstance(module, QuantExperts):
            for stack in module.formats:
                n, k = module.shape(stack)
                values[id(module._parameters[stack])] = module.num_experts * n * k
        weight = module._parameters.get("weight")
        if weight is None or not isinstance(module, MergedLinear | QuantLinear | QuantEmbedding):
            continue
        layers = module.originals if isinstance(module, MergedLinear) else [module]
        shapes = [whole_shape(layer) for layer in layers]
        values[id(weight)] = sum(n * k for n, k in shapes)
        if (bias := module._parameters.get("bias")) is not None:
            values[id(bias)] = sum(n for n, _ in shapes)  # a rank has those of its rows
    return values
