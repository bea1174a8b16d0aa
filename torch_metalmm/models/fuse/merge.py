"""Packed layers of one input as one, for a fused forward; in the model's own each computes alone.

Rejected: to merge layers whose parent is not fused. To know that nothing writes the input between
their calls takes a reader of the parent's code, and hooks that hold one layer's result for the
others: a token of BERT or OPT took 4 to 7 % longer, 16 tokens 2 % (docs/design.md).
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from torch import nn

from ...nn.fused import MergedLinear


def merge_projections(
    parent: nn.Module, layers: tuple[Any, ...], once: dict[int, str | None]
) -> tuple[Any, ...]:
    """The modules of `parent`, those alike that are next to each other as one.

    once: {id: activations} of packed layers that may be merged, where these are equal.
    """
    inside, found = set(parent.modules()), list[Any]()
    for _, alike in groupby(layers, lambda layer: _key(layer, once)):
        run = list(alike)
        movable = len(run) > 1 and inside >= set(run)
        found += [_merged(parent, run)] if movable else run
    return tuple(found)


def merge_all(
    parent: nn.Module, layers: tuple[Any, ...], once: dict[int, str | None]
) -> MergedLinear | None:
    """The modules as one; None, and nothing is done, where they are not alike."""
    if len({_key(layer, once) for layer in layers}) > 1:
        return None
    merged = merge_projections(parent, layers, once)[0]
    return None if merged is layers[0] else merged


def _merged(parent: nn.Module, layers: list[Any]) -> MergedLinear:
    paths = {module: name for name, module in parent.named_modules()}
    own = [layer.originals if isinstance(layer, MergedLinear) else [layer] for layer in layers]
    for layer in layers:
        if isinstance(layer, MergedLinear):
            layer.detach(parent.get_submodule(paths[layer].rpartition(".")[0]))
    names = {module: name for name, module in parent.named_modules()}
    merged = MergedLinear({names[layer]: layer for of in own for layer in of})
    merged.attach(parent)
    return merged


def _key(layer: Any, once: dict[int, str | None]) -> object:
    """Equal for layers that may be merged; that of another is its own."""
    of = layer.originals if isinstance(layer, MergedLinear) else [layer]
    if any(id(m) not in once for m in of):
        return layer
    bias, kind = None if layer.bias is None else layer.bias.dtype, type(of[0])
    return kind, layer.format, layer.in_features, layer.weight.device, bias, once[id(of[0])]
