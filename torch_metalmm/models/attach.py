"""Letting a transformers model know of its packed layers, as hf/ does once it is plugged in.

A model of transformers exists only after transformers was imported, and hf/ is imported with
transformers: so this module imports neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class _Plug(NamedTuple):
    quantizer: type
    attach: Callable[[Any], None]


_plugs: list[_Plug] = []


def plug_in(quantizer: type, attach: Callable[[Any], None]) -> None:
    """Let attach(model) call `attach`; quantizer: the class of hf/ that packs with transformers."""
    _plugs.append(_Plug(quantizer, attach))


def attach(model: Any) -> None:
    """Let a transformers model know of its packed layers, as if from_pretrained had packed them.

    Nothing is done for a model without packed layers.
    """
    for plug in _plugs:
        plug.attach(model)


def is_transformers_model(model: Any) -> bool:
    """Whether the model is transformers', whoever quantized it."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def quantized_by_another(model: Any) -> bool:
    """Whether a quantizer of transformers that is not ours made layers of the model."""
    other = getattr(model, "hf_quantizer", None)
    return other is not None and not isinstance(other, tuple(plug.quantizer for plug in _plugs))
