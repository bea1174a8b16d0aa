"""Letting a model of transformers or diffusers know of its packed layers, as hf/ does.

A model of a library exists only after the library was imported, and its part of hf/ is imported
with it: so this module imports neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# The module and the name of a library's class of models.
TRANSFORMERS = ("transformers.modeling_utils", "PreTrainedModel")
DIFFUSERS = ("diffusers.models.modeling_utils", "ModelMixin")


class _Plug(NamedTuple):
    kind: tuple[str, str]
    quantizer: type
    attach: Callable[[Any], None]


_plugs: list[_Plug] = []
_caches: dict[str, Callable[..., None]] = {}  # check, set and drop of hf/generation.py


def plug_in(kind: tuple[str, str], quantizer: type, attach: Callable[[Any], None]) -> None:
    """Let attach(model) call `attach` for models of that kind, TRANSFORMERS or DIFFUSERS.

    quantizer: the class of hf/ that packs with the library.
    """
    _plugs.append(_Plug(kind, quantizer, attach))


def plug_in_caches(**functions: Callable[..., None]) -> None:
    """Let check_cache, set_cache and drop_cache call these: check, set and drop."""
    _caches.update(functions)


def check_cache(models: Iterable[Any], format: str) -> None:
    """ValueError: there is no such format, no model generates, or a model's heads do not fit it."""
    if not _caches:
        raise ValueError(f"cache: {format!r}; the model is none of transformers that generates")
    _caches["check"](models, format)


def set_cache(models: Iterable[Any], format: str) -> None:
    """generate() of models of transformers makes a PackedCache of this format."""
    if _caches:
        _caches["set"](models, format)


def drop_cache(models: Iterable[Any]) -> None:
    """generate() makes the cache that it made before set_cache."""
    if _caches:
        _caches["drop"](models)


def attach(model: Any) -> None:
    """Let a library's model know of its packed layers, as if its from_pretrained had packed them.

    Nothing is done for a model without packed layers, and for one of no library.
    """
    for plug in _plugs:
        if _is_of(plug.kind, model):
            plug.attach(model)


def is_transformers_model(model: Any) -> bool:
    """Whether the model is transformers', whoever quantized it."""
    return _is_of(TRANSFORMERS, model)


def _is_of(kind: tuple[str, str], model: Any) -> bool:
    found = getattr(sys.modules.get(kind[0]), kind[1], None)
    return found is not None and isinstance(model, found)


def quantized_by_another(model: Any) -> bool:
    """Whether a quantizer of a library that is not ours made layers of the model."""
    other = getattr(model, "hf_quantizer", None)
    return other is not None and not isinstance(other, tuple(plug.quantizer for plug in _plugs))
