"""How the packed layers of a model read their input."""

from __future__ import annotations

from typing import cast

from torch import nn

from ..nn import QuantExperts, QuantLinear
from ..nn.activations import Activations, check_kind, set_activations, takes_rounded
from .attach import attach, quantized_by_another
from .replace import check_model


def activations_(model: nn.Module, kind: str | None) -> nn.Module:
    """Round the input of packed linear layers and experts on the CPU, or read it exactly.

    kind: "int8", "int16" or None. Each block of 32 values of x is rounded to 8 or 16 bits with a
    scale of its own before it is multiplied. With "int8", as llama.cpp does, a value errs by 0.4 %
    of the largest of its block at most (half of a 127th), with "int16" by 0.0015 % (half of a
    32512th). Layers of formats without integer codes (docs/guide/fuse.md lists them), embeddings,
    and all layers on other devices read x exactly. The setting travels with save_pretrained and
    save_packed.
    Returns `model`. ValueError: model is no module, another kind, or a kind for a model without a
    packed linear layer that can take it.
    """
    check_model(model)
    check_kind(kind)
    able = [m for m in model.modules() if _takes_rounded(m)]
    if kind is not None and not able:
        raise ValueError(f"activations: {kind!r}; the model has no packed linear layer for it")
    for layer in able:
        set_activations(layer, kind)
    if not quantized_by_another(model):
        attach(model)
    return model


def _takes_rounded(layer: nn.Module) -> bool:
    """Whether a product of the packed layer can round its input."""
    if isinstance(layer, QuantExperts):
        return any(map(takes_rounded, layer.formats.values()))
    return isinstance(layer, QuantLinear) and takes_rounded(layer.format)


def stored_activations(model: nn.Module) -> str | dict[str, str | None] | None:
    """The setting as a config has it: of all layers, or by name; None where all read exactly."""
    kinds = {
        name: cast(Activations, layer).activations
        for name, layer in model.named_modules(remove_duplicate=False)
        if _takes_rounded(layer)
    }
    if len(set(kinds.values())) < 2:
        return next(iter(kinds.values()), None)
    return kinds
