"""Decoder layers of transformers models in a handful of ops, where both forms agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...nn.layer import FusedLayer
from ...nn.norm import FusedNorm
from ...nn.recipe import Held, Step
from ...nn.sharded import everywhere
from .confirm import agrees
from .norms import as_norm
from .observe import is_transformers_model, observed
from .understand import recipe_of


def fuse_layers(model: nn.Module, form: str) -> None:
    """Give each decoder layer that is understood and confirmed a forward of our ops.

    form: of its MLP, for one row. RMS norms outside of such layers get one, too.
    """
    for top in transformers_models(model):
        _detach_norms(top)
        steps: dict[object, Step] = {}
        seen = observed(top)
        for module in top.modules():
            if (earlier := fused_layer(module)) is not None:
                earlier.step.held = Held()  # has what stood in for the attention function
        for layer, runs in seen.items():
            fused = None
            try:
                recipe = recipe_of(layer, runs)
                step = steps.setdefault(Step.key(recipe), Step(recipe))
                fused = FusedLayer(layer, recipe, step, form)
                understood = fused.watch.plain()
            except Exception:  # Unknown, or a layer unlike any that was thought of
                understood = False
            # To confirm runs the layer: where it is sharded, all ranks do, or none.
            if not everywhere(layer, understood):
                continue
            assert fused is not None
            try:
                agreed = agrees(fused, runs)
            except Exception:
                continue
            if agreed:
                fused.confirm(runs[0].args[0])
                fused.attach()
        _fuse_norms(top)


def unfuse_layers(model: nn.Module) -> None:
    for module in model.modules():
        fused = fused_layer(module)
        if fused is not None:
            fused.detach()
    _detach_norms(model)


def fused_layer(layer: nn.Module) -> FusedLayer | None:
    """What computes the layer in place of its class, None if its class does."""
    owner = _owner(layer)
    return owner if isinstance(owner, FusedLayer) else None


def _owner(module: nn.Module) -> Any:
    return getattr(module.__dict__.get("forward"), "__self__", None)


def _fuse_norms(module: nn.Module) -> None:
    """The norms in `module` that no fused layer computes."""
    if fused_layer(module) is not None:
        return
    for child in module.children():
        _fuse_norms(child)
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 1]
    norm = as_norm(module, weights[0].shape[0]) if len(weights) == 1 else None
    if norm is not None and weights[0].device.type != "meta":
        with torch.no_grad():
            same = module(weights[0][None]).dtype == weights[0].dtype
        if same:
            FusedNorm(norm).attach()


def _detach_norms(model: nn.Module) -> None:
    for module in model.modules():
        owner = _owner(module)
        if isinstance(owner, FusedNorm):
            owner.detach()


def transformers_models(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in the module that are in no other one."""
    if is_transformers_model(module):
        return [module]
    return [model for child in module.children() for model in transformers_models(child)]
