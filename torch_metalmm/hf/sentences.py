"""Packed layers in sentence-transformers' models.

These models cast modules to the dtype of their first parameter. With packed embeddings it would be
uint8, which nn.Module.to refuses, so float parameters come first.

The models save each module by itself. transformers' module keeps its packed layers (save.py);
another, as Dense, would be read as a dense one of another shape, so it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import sentence_transformers
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from ..nn import QuantEmbedding, QuantLinear

try:
    from sentence_transformers.sentence_transformer import modules as models
except ImportError:  # before version 6
    from sentence_transformers import models


def _floats_first(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    return iter(
        sorted(nn.Module.parameters(self, recurse), key=lambda p: not p.is_floating_point())
    )


def _checked(save: Callable[..., None]) -> Callable[..., None]:
    """The method of a model, with a check before anything is written."""

    @functools.wraps(save)
    def checked(self: nn.Module, *args: Any, **options: Any) -> None:
        kept = {
            layer
            for part in self.modules()
            if isinstance(part, PreTrainedModel)
            for layer in part.modules()
        }
        for name, layer in self.named_modules():
            if isinstance(layer, QuantLinear | QuantEmbedding) and layer not in kept:
                raise ValueError(
                    f"{name} could not be loaded again: it is packed in {layer.format}, and "
                    "sentence-transformers makes a dense layer there; pack the model of "
                    'transformers alone, as quantize_(model[0], "q8_0")'
                )
        save(self, *args, **options)

    return checked


for _owner, _name in (
    (sentence_transformers, "SentenceTransformer"),
    (sentence_transformers, "SparseEncoder"),
    (sentence_transformers, "CrossEncoder"),
    (models, "Transformer"),
):
    _kind: Any = getattr(_owner, _name, None)  # SparseEncoder is from version 5 on
    if isinstance(_kind, type) and issubclass(_kind, nn.Module):
        _kind.parameters = _floats_first  # type: ignore[method-assign]
        if _owner is sentence_transformers:
            _kind.save = _checked(_kind.save)  # type: ignore[attr-defined]
