"""Layers that compute alike: one code and one recipe, with weights of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from ...nn.recipe import Recipe
from .runs import PLAIN

_OWN = frozenset(vars(nn.Module())) - {"training"}  # hooks, and tensors and children, seen apart


def kind_of(layer: nn.Module, recipe: Recipe) -> object:
    """Equal for two layers of a model if only their weights differ, and their number in it.

    Compared are the classes of all modules, what the modules have beside tensors (numbers by their
    values, other objects by identity), the shapes and dtypes of tensors, and the recipes.
    """
    return tuple(map(_of_module, *zip(*layer.named_modules(), strict=True))), _of(recipe)


def _of_module(name: str, module: nn.Module) -> object:
    ours = _is_ours(module)
    own = {k: v for k, v in vars(module).items() if k not in _OWN and not _tells(k, ours)}
    others = sorted((k, _of(v)) for k, v in own.items())
    tensors = [*module._parameters.items(), *module._buffers.items()]
    shapes = [(n, None if t is None else (t.shape, t.dtype)) for n, t in tensors]
    return name, type(module), tuple(others), tuple(shapes)


def _is_ours(value: object) -> bool:
    return type(value).__module__.startswith(__package__.partition(".")[0] + ".")


def _tells(name: str, ours: bool) -> bool:
    """Whether the attribute is a layer's number, or what a module of ours notes of others."""
    return name == "layer_idx" or (ours and name[0] == "_")


def _of(value: Any) -> object:
    """The key that compares a value: a module's class, a tensor's dtype, shape and values."""
    if isinstance(value, nn.Module):
        return type(value)
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), tuple(value.flatten().tolist())
    # A config is a dataclass, too, whose fields need not be readable.
    if is_dataclass(value) and not isinstance(value, type) and _is_ours(value):
        compared = (getattr(value, f.name) for f in fields(value) if f.compare)
        return type(value), tuple(map(_of, compared))
    if isinstance(value, Mapping):
        return type(value), tuple((_of(k), _of(v)) for k, v in value.items())
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_of, value))
    if isinstance(value, frozenset | set):
        return frozenset(map(_of, value))
    return value if isinstance(value, PLAIN) else id(value)
