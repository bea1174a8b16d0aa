"""fuse_ on layers of several streams, those of Gemma 3n: what they are read as, and liars."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_models import are_fused, dense, layers, logits, near
from torch import Tensor
from transformers.models.gemma3n import modeling_gemma3n as theirs

from bench.models.families import family
from torch_metalmm import fuse_, unfuse_
from torch_metalmm.models.fuse.confirm import agrees
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.observe import observed
from torch_metalmm.nn.layer import FusedLayer
from torch_metalmm.nn.step import Step


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    """The first layer cuts its gates."""
    return family("gemma3n_text", activation_sparsity_pattern=[0.9, 0.0]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    """The fused model rounds less often; its error from f32 is at most half more, by chance."""
    model = model_of(dtype)
    fused = fuse_(copy.deepcopy(model), "swiglu")
    assert all(are_fused(fused))
    want = logits(torch.nn.Module.float(dense(model)))
    got, own = logits(fused), logits(model)
    assert got.dtype == own.dtype
    assert (got.float() - want).norm() <= 1.5 * (own.float() - want).norm()


def test_a_trace() -> None:
    """The model calls such layers with arguments by their places."""
    torch._dynamo.reset()
    model = fuse_(model_of(), "swiglu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, want = (logits(m, use_cache=False) for m in (compiled, model))
    assert near(got, want)


class Predicting(theirs.Gemma3nTextAltUp):
    def predict(self, hidden_states: Tensor) -> Tensor:
        return super().predict(hidden_states) + 1e-3


class Correcting(theirs.Gemma3nTextAltUp):
    """The second stream is left alone."""

    def correct(self, predictions: Tensor, activated: Tensor) -> Tensor:
        y = super().correct(predictions, activated)
        return torch.cat((y[:1], predictions[1:2], y[2:]))


class Laurel(theirs.Gemma3nTextLaurelBlock):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1e-3


@pytest.mark.parametrize("kind", [Predicting, Correcting, Laurel])
def test_layers_that_do_more_stay(kind: Any) -> None:
    model = model_of()
    layer = layers(model)[0]
    part = next(m for m in layer.children() if type(m) is kind.__base__)
    part.__class__ = kind
    want = logits(model)
    fuse_(model, "swiglu")
    assert are_fused(model) == [False, True]
    assert near(logits(model), want)


def of_streams(**changes: Any) -> Any:
    """A change of a recipe: of fields of its streams."""
    return lambda r: replace(r, streams=replace(r.streams, **changes))


def of_first(**changes: Any) -> Any:
    """A change of a recipe: of what lies side by side in its first branch."""

    def changed(recipe: Any) -> Any:
        first, *others = recipe.branches
        first = replace(first, core=replace(first.core, **changes))
        return replace(recipe, branches=(first, *others))

    return changed


WRONG: dict[str, Any] = {
    "vector": of_streams(vector=None),
    "eps": lambda r: of_streams(norm=replace(r.streams.norm, eps=1e-3))(r),
    "router": lambda r: of_streams(factors=r.streams.factors * torch.tensor([2.0] * 4 + [1.0] * 4))(
        r
    ),
    "bias": lambda r: of_streams(factors=r.streams.factors * torch.tensor([1.0] * 4 + [1.1] * 4))(
        r
    ),
    "divisor": of_first(divisor=1.4),
    "x": of_first(adds_x=False),
    "parts": lambda r: of_first(parts=r.branches[0].core.parts[1:], projection=None)(r),
}


@functools.cache
def observed_layer() -> tuple[FusedLayer, Any]:
    """A fused layer, and what its class was seen to do."""
    model = fuse_(model_of(), "swiglu")
    runs = observed(unfuse_(model))
    layer = layers(fuse_(model, "swiglu"))[1]
    fused = fused_layer(layer)
    assert fused is not None and agrees(fused, runs[layer])
    return fused, runs[layer]


@pytest.mark.parametrize("what", WRONG)
def test_wrong_recipes_are_not_confirmed(what: str) -> None:
    fused, runs = observed_layer()
    recipe = WRONG[what](fused.recipe)
    assert not agrees(FusedLayer(fused.module, recipe, Step(recipe.heads), "swiglu"), runs)
