"""Decoder layers of transformers models in a handful of ops, where both forms agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ...nn.awaiting import Awaiting
from ...nn.fused import MergedLinear, owner_of
from ...nn.layer import FusedLayer
from ...nn.mixture import Mixture, join
from ...nn.norm import FusedNorm
from ...nn.recipe import Beside, Growth, Heads, Mixer, Product, Recipe
from ...nn.rotation import FusedRotation
from ...nn.router import FusedRouter
from ...nn.sharded import everywhere, is_sharded
from ...nn.step import Held, Step
from ..mtp import MtpHead
from ..routers import fuse_routers
from .alike import kind_of
from .confirm import agrees
from .ends import fuse_ends
from .heads import growths
from .merge import merge_all, merge_projections
from .norms import as_norm
from .observe import Seen, is_transformers_model, observed
from .rotations import fuse_rotations, tell_forms
from .runs import Unknown, evaluating
from .understand import attentions_of, recipe_of, recipe_of_attention

_ROW = 64  # values of a norm without a weight, which takes any number
_Reading = tuple[Recipe, list[Seen]]  # the recipe of a module, and its calls


def fuse_layers(model: nn.Module, form: str, once: dict[int, str | None]) -> None:
    """Give each decoder layer that is understood and confirmed a forward of our ops.

    form: of its MLP, for one row. once: as merge_projections takes it. RMS norms outside of such
    layers get one, too.
    """
    for top in transformers_models(model):
        _detach_parts(top)
        with evaluating(top):
            fuse_routers(top)
            fuse_rotations(top)
        steps: dict[object, Step] = {}
        known: set[object] = set()
        seen = observed(top)
        for module in top.modules():
            earlier = fused_layer(module)
            if earlier is not None and earlier.step is not None:
                earlier.step.held = Held()  # has what stood in for the attention function
        for layer, runs in seen.items():
            readings = _readings(layer, runs)
            if any(_fuse(layer, read, steps, form, once, known) for read in readings):
                continue
            for attention in dict.fromkeys(attentions_of(runs)):
                read = partial(_attention, attention, runs)
                _fuse(attention, read, steps, form, once, known)
        tell_forms(top, {step.angles for step in steps.values()})
        _fuse_norms(top)
        fuse_ends(top)
    for head in (module for module in model.modules() if isinstance(module, MtpHead)):
        for norm in (head.enorm, head.hnorm):
            _detach_parts(norm)
            _fuse_norms(norm)


def _readings(layer: nn.Module, runs: list[Seen]) -> Iterator[Callable[[], _Reading]]:
    """Ways to read the layer, in the order of their trials."""
    yield partial(_layer, layer, runs, True)
    for growth in growths(layer, runs):
        yield partial(_layer, layer, runs, True, growth)
    yield partial(_layer, layer, runs, False)


def _layer(
    layer: nn.Module, runs: list[Seen], heads: bool, growth: Growth | None = None
) -> _Reading:
    recipe = recipe_of(layer, runs, heads)
    if growth is not None:
        if recipe.heads is None:
            raise Unknown("no heads of ours")
        recipe.heads.growth = growth
    return recipe, runs


def _attention(attention: nn.Module, runs: list[Seen]) -> _Reading:
    return recipe_of_attention(attention, runs), [seen.of(attention) for seen in runs]


def _fuse(
    module: nn.Module,
    read: Callable[[], _Reading],
    steps: dict[object, Step],
    form: str,
    once: dict[int, str | None],
    known: set[object],
) -> bool:
    """Give the module a forward of our ops where it is understood and confirmed; whether it is.

    known: kinds of modules that agreed in all cases. Of 30 layers of a kind one takes all.
    """
    fused = None
    try:
        recipe, runs = read()
        heads = recipe.heads
        step = None if heads is None else steps.setdefault(Step.key(heads), Step(heads))
        fused = FusedLayer(module, recipe, step, form)
        understood = fused.watch.plain()
    except Exception:  # Unknown, or a layer unlike any that was thought of
        understood = False
    # Confirming runs the layer: where it is sharded, on all ranks, or on none.
    if not everywhere(module, understood):
        return False
    assert fused is not None
    try:
        kind = None if is_sharded(module) else kind_of(module, recipe)  # ranks run alike
        agreed = agrees(fused, runs, kind in known)
    except Exception:
        return False
    if agreed:
        if kind is not None:
            known.add(kind)
        for branch in recipe.each():
            core = branch.core
            if isinstance(core, Heads | Mixer):
                core.projections = merge_projections(core.attention, core.projections, once)
            if isinstance(core, Mixture) and all(id(m) in once for m in core.linears()):
                join(core)
        for branch in recipe.branches:
            if isinstance(branch.core, Beside):
                _merge_parts(module, branch.core, once)
        fused = FusedLayer(module, recipe, step, form)
        fused.confirm(runs[0].x)
        fused.attach()
    return agreed


def _merge_parts(layer: nn.Module, beside: Beside, once: dict[int, str | None]) -> None:
    """Let the projections of all parts be one, where all are alike."""
    cores: list[Any] = [part.core for part in beside.parts]
    if not all(isinstance(core, Heads | Mixer | Product) for core in cores):
        return
    linears = [linear for core in cores for linear in core.projections]
    merged = merge_all(layer, tuple(linears), once)
    if merged is None:
        return
    parts = [layer.get_submodule(name) for name in merged.names]
    sizes, factors = [], []
    for core in cores:
        counts = [len(p.names) if isinstance(p, MergedLinear) else 1 for p in core.projections]
        core.projections, parts = tuple(parts[: sum(counts)]), parts[sum(counts) :]
        sizes.append(sum(part.out_features for part in core.projections))
        own = getattr(core, "factors", None)
        factors.append(torch.ones(sizes[-1]) if own is None else own)
    beside.projection, beside.sizes = merged, tuple(sizes)
    if any(getattr(core, "factors", None) is not None for core in cores):
        beside.factors = torch.cat([f.cpu() for f in factors])


def unfuse_layers(model: nn.Module) -> None:
    for module in model.modules():
        fused = fused_layer(module)
        if fused is not None:
            fused.detach()
    _detach_parts(model)


def fused_layer(layer: nn.Module) -> FusedLayer | None:
    """The FusedLayer that computes the layer in place of its class, None if its class does."""
    owner = owner_of(layer)
    return owner if isinstance(owner, FusedLayer) else None


def _fuse_norms(module: nn.Module) -> None:
    """The norms in `module` that no fused layer computes, those of x less its mean, too."""
    if (fused := fused_layer(module)) is not None:
        for called in fused.recipe.called():
            _fuse_norms(called)
        return
    for child in module.children():
        _fuse_norms(child)
    if module._modules or module._buffers:
        return
    row = next((p for p in module.parameters(recurse=False) if p.dim() == 1), torch.ones(_ROW))
    norm, centred = as_norm(module, row.shape[0]), False
    if norm is None and not isinstance(module, nn.LayerNorm):
        norm = as_norm(module, row.shape[0], centred=True)
        centred = norm is not None and norm.offset == 0
        norm = norm if centred else None
    if norm is not None and row.device.type != "meta":
        row = row.to(row.dtype if norm.name else torch.half)
        with torch.no_grad(), suppress(Exception):  # the module may refuse halves
            if module(row[None]).dtype == row.dtype:
                FusedNorm(norm, centred).attach()


def _detach_parts(model: nn.Module) -> None:
    for module in model.modules():
        owner = owner_of(module)
        if isinstance(owner, FusedNorm | FusedRotation | FusedRouter | Awaiting):
            owner.detach()


def transformers_models(module: nn.Module) -> list[nn.Module]:
    """The models of transformers in the module that are in no other one."""
    if is_transformers_model(module):
        return [module]
    return [model for child in module.children() for model in transformers_models(child)]
