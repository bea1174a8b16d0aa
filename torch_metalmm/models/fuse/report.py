"""The result of fuse_ for a model's decoder layers, in words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from .layers import fused_layer


def describe_layers(model: Any) -> list[str]:
    """A line for layers of each class that fuse_ treated alike; none of a model without a list."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return []
    found = Counter((type(layer).__name__, _treated(layer)) for layer in layers)
    return [f"{count} of {kind}: {treated}" for (kind, treated), count in found.items()]


def _treated(layer: nn.Module) -> str:
    fused = fused_layer(layer)
    if fused is None:
        inside = [name for name, module in layer.named_modules() if fused_layer(module) is not None]
        return f"{', '.join(inside)} alone in our ops" if inside else "as the class computes it"
    names = {module: name for name, module in layer.named_modules()}
    called = [f"{names.get(m, '?')} ({type(m).__name__})" for m in fused.recipe.called()]
    return f"in our ops but {', '.join(called)}" if called else "in our ops"
