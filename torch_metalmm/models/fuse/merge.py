"""Packed layers of one input become parts of one MergedLinear, where a run agrees with the code.

The code says which layers have one input, for every value and path (read.py). Running the parent on
a small input confirms what the code says, also for the children between the calls, whose code is
not read. Running the parent again, merged, shows that nothing else in its forward depends on what
merging changes, such as the strides of a result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...nn import QuantLinear
from ...nn.fused import MergedLinear
from .read import groups_of_one_input
from .runs import evaluating, normal

_Outcome = tuple[str, list[Tensor]]  # an exception in words, or the tensors that came out


def merge_layers(parent: nn.Module, once: dict[int, str | None], dtype: torch.dtype) -> None:
    """Merge the layers of `parent` that have an input and a format in common, in place.

    once: {id: activations} of packed layers that may be merged, where these are equal; dtype: of
    the parent's input.
    """
    layers: dict[str, Any] = {n: c for n, c in parent._modules.items() if id(c) in once}
    if len(layers) < 2 or "forward" in parent.__dict__:
        return
    children = frozenset(name for name, child in parent._modules.items() if child is not None)
    for group in groups_of_one_input(type(parent), frozenset(layers), children):
        alike: dict[object, dict[str, QuantLinear]] = {}
        for name in group.layers:
            layer = layers[name]
            alike.setdefault(_key(layer, once[id(layer)], type(layer)), {})[name] = layer
        for found in alike.values():
            others = [name for name in group.layers if name not in found]
            if len(found) > 1:
                _merge(parent, found, (*others, *group.between), dtype)
                for name, layer in found.items():  # parts were made of layers that were evaluating
                    parent.get_submodule(name).train(layer.training)


def merge_projections(
    parent: nn.Module, layers: tuple[Any, ...], once: dict[int, str | None]
) -> MergedLinear | None:
    """Modules of `parent` as one for a fused forward; in the parent's own they compute alone.

    None, and nothing is done, where they are not alike.
    """
    paths = {module: name for name, module in parent.named_modules()}
    own = [m.originals if isinstance(m, MergedLinear) else [m] for m in layers]
    if (
        len(layers) < 2
        or not paths.keys() >= set(layers)
        or any(id(m) not in once for m in sum(own, []))
    ):
        return None
    keys = {
        _key(layer, once[id(of[0])], type(of[0])) for layer, of in zip(layers, own, strict=True)
    }
    if len(keys) > 1:
        return None
    for layer in layers:
        if isinstance(layer, MergedLinear):
            layer.detach(parent.get_submodule(paths[layer].rpartition(".")[0]))
    names = {module: name for name, module in parent.named_modules()}
    found = {names[layer]: layer for of in own for layer in of}
    merged = MergedLinear(found)
    merged.attach(parent, together=False)
    for name, layer in found.items():
        parent.get_submodule(name).train(layer.training)
    return merged


def _key(layer: Any, activations: str | None, kind: type) -> object:
    """Equal for layers that may be merged."""
    bias = None if layer.bias is None else layer.bias.dtype
    return kind, layer.format, layer.in_features, layer.weight.device, bias, activations


def _merge(
    parent: nn.Module, layers: dict[str, QuantLinear], between: tuple[str, ...], dtype: torch.dtype
) -> None:
    first = next(iter(layers.values()))
    # Tensors with versions and without gradients, also for a caller in inference mode.
    with evaluating(parent), torch.inference_mode(False), torch.no_grad():
        for rows in ((1, 2), (2,)):
            x = normal(*rows, first.in_features).to(first.weight.device, dtype)
            with _watched(layers) as seen:
                want = _outcome(parent, x)
            if seen != list(layers):
                continue
            merged = MergedLinear(layers, between)
            merged.attach(parent)
            merged.open(parent, ())
            got = _outcome(parent, x)
            merged.close()
            if not _agree(got, want):
                merged.detach(parent)
            return


@contextmanager
def _watched(layers: dict[str, QuantLinear]) -> Iterator[list[str]]:
    """The layers that are called; "changed" for a layer whose input is not the tensor that the
    first layer had, or was written since."""
    seen: list[str] = []
    first: list[Any] = []

    def see(name: str, args: tuple[Any, ...]) -> None:
        x = args[0]
        if not first:
            first.extend((x, x._version, x.clone()))
        same = x is first[0] and x._version == first[1] and torch.equal(x, first[2])
        seen.append(name if same else "changed")

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: see(name, args))
        for name, layer in layers.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _outcome(parent: nn.Module, x: Tensor) -> _Outcome:
    """What the parent gives for x in place of its first and every required argument.

    The parent's hooks are not called: nobody asked for this forward.
    """
    try:
        parameters = list(inspect.signature(parent.forward).parameters.values())
        required = [p for i, p in enumerate(parameters) if i == 0 or p.default is p.empty]
        positional = [
            x.clone() for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        named = {p.name: x.clone() for p in required if p.kind is p.KEYWORD_ONLY}
        out = parent.forward(*positional, **named)
    except Exception as error:  # most often for arguments that are not such tensors
        return f"{type(error).__name__}: {error}", []
    return "", [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


def _agree(got: _Outcome, want: _Outcome) -> bool:
    """Whether both outcomes are the same but for rounding."""
    if got[0] != want[0] or len(got[1]) != len(want[1]):
        return False
    return all(map(_close, got[1], want[1]))


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((a - b).float().norm() <= 0.01 * b.float().norm())
