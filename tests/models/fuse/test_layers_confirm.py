"""What fuse_ takes for a decoder layer: liars stay, other formats and norms are understood."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuse_cases import packed
from layer_models import are_fused, ids, layers, logits, near, padded, pair, small
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
)

from torch_metalmm import QuantLinear, fuse_, unfuse_
from torch_metalmm.models.cache_argument import cache_argument
from torch_metalmm.models.fuse.confirm import agrees
from torch_metalmm.models.fuse.layers import fused_layer
from torch_metalmm.models.fuse.observe import observed
from torch_metalmm.nn.layer import FusedLayer
from torch_metalmm.nn.step import Step

# {what a layer does beside Llama's: of Llama's forward, x, and the other arguments}
MORE: dict[str, Callable[..., Tensor]] = {
    "adds": lambda own, x, given: own(x, **given) + 1e-3,
    "clamps": lambda own, x, given: own(x, **given).clamp(-50, 50),
    "a second residual": lambda own, x, given: x + own(x, **given),
    "turns rows": lambda own, x, given: own(x, **given).flip(0),
    "another for single tokens": lambda own, x, given: own(x, **given) * (1 + (x.shape[1] == 1)),
    "a mask of its own": lambda own, x, given: own(x, **cloned(given)),
    "twice": lambda own, x, given: own(own(x, **given), **given | ALONE),
}
ALONE = {cache_argument(LlamaDecoderLayer.forward): None, "attention_mask": None}


def cloned(given: dict[str, Any]) -> dict[str, Any]:
    mask = given.get("attention_mask")
    return given if mask is None else given | {"attention_mask": mask.clone()}


def doing(what: str) -> type[nn.Module]:
    class Layer(LlamaDecoderLayer):
        def forward(self, x: Tensor, **given: Any) -> Tensor:
            return MORE[what](super().forward, x, given)

    return Layer


class NormingSums(LlamaRMSNorm):
    """Nearly the norm that it is derived from: its eps counts twice."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 2 * self.variance_epsilon)
        return self.weight * (wide * scale).to(x.dtype)


class Scaling(LlamaAttention):
    """The result grows with the position, as q does in Llama 4, beyond the first 16."""

    def forward(self, position_ids: Any = None, **kwargs: Any) -> Any:
        y, weights = super().forward(position_ids=position_ids, **kwargs)
        factor = 1 + 0.1 * torch.log1p(torch.floor(position_ids / 16)).to(y.dtype)
        return y * factor[..., None], weights


# What is called as it is in a layer that is fused around it.
CALLED = {NormingSums: "input_layernorm", Scaling: "self_attn"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*MORE, *CALLED])
def test_layers_that_do_more_stay(kind: Any, dtype: torch.dtype) -> None:
    model = copy.deepcopy(pair("llama", dtype)[0])
    layer = layers(model)[0]
    part = layer.get_submodule(CALLED.get(kind, ""))
    part.__class__ = kind if kind in CALLED else doing(kind)
    want = [logits(model), logits(model, **padded(3, 9))]
    fuse_(model, "swiglu")
    assert are_fused(model) == [kind in CALLED, True]
    if kind in CALLED:
        assert fused_layer(layer).recipe.called() == [part]  # type: ignore[union-attr]
    for got, own in zip((logits(model), logits(model, **padded(3, 9))), want, strict=True):
        assert (got - own).norm() <= (1e-5 if dtype == torch.float32 else 2**-5) * own.norm()


LONG = 2**13  # beyond the positions that the small models say to have


def test_a_scale_that_begins_behind_the_last_position() -> None:
    """Of a config that was shortened; transformers computes what is behind, too."""
    model = small("ministral3", rope_parameters=_long_rope())
    assert model.config.max_position_embeddings < LONG
    far = {"input_ids": ids(1, 9), "position_ids": torch.arange(9)[None] + 5 * LONG}
    want = logits(model, **far)
    fuse_(model, "swiglu")
    assert near(logits(model, **far), want)


def _long_rope() -> dict[str, Any]:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    return rope | {"original_max_position_embeddings": LONG}


def heads(**changes: Any) -> Any:
    """A change of a recipe: of what its attention is."""
    return lambda r: replace(r, branches=(_with(r.branches[0], **changes), r.branches[1]))


def _with(branch: Any, **changes: Any) -> Any:
    return replace(branch, core=replace(branch.core, **changes))


def of_branch(number: int, name: str, change: Any) -> Any:
    """A change of a recipe: of a field of a branch."""

    def changed(recipe: Any) -> Any:
        branches = list(recipe.branches)
        value = change(getattr(branches[number], name))
        branches[number] = replace(branches[number], **{name: value})
        return replace(recipe, branches=tuple(branches))

    return changed


def scaled(recipe: Any) -> Any:
    attend = recipe.heads.attend
    constants = attend.constants | {"scaling": attend.constants["scaling"] * 1.01}
    return heads(attend=replace(attend, constants=constants))(recipe)


WRONG: dict[str, Any] = {
    "eps": of_branch(0, "pre", lambda norm: replace(norm, eps=4 * norm.eps)),
    "offset": of_branch(1, "pre", lambda norm: replace(norm, offset=1e-3)),
    "norm": of_branch(1, "pre", lambda norm: None),
    "pairs": heads(interleaved=True),
    "angles": heads(angles="none"),
    "scale": of_branch(1, "output", lambda output: replace(output, scale=1.001)),
    "mask": heads(mask="other"),
    "scaling": scaled,
    "v": heads(v_is_k=True),
    "result": lambda recipe: replace(recipe, rest=()),
    "factor": lambda recipe: replace(recipe, factor="doubled"),
}


@functools.cache
def observed_layer(dtype: torch.dtype) -> tuple[FusedLayer, Any]:
    """A fused layer, and what its class was seen to do."""
    model = copy.deepcopy(pair("qwen2", dtype)[1])
    runs = observed(unfuse_(model))
    layer = layers(fuse_(model, "swiglu"))[1]
    layer.register_buffer("doubled", torch.tensor(2.0, dtype=dtype), persistent=False)
    fused = fused_layer(layer)
    assert fused is not None and agrees(fused, runs[layer])
    return fused, runs[layer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", WRONG)
def test_wrong_recipes_are_not_confirmed(what: str, dtype: torch.dtype) -> None:
    fused, runs = observed_layer(dtype)
    recipe = WRONG[what](fused.recipe)
    assert recipe.heads is not None
    assert not agrees(FusedLayer(fused.module, recipe, Step(recipe.heads), "swiglu"), runs)


@pytest.mark.parametrize(
    "formats",
    [("q4_0", "q4_0", "q8_0"), ("q4_0", "q8_0", "q4_0"), ("q8_0", "q4_0", "q5_0")]
    + [("q4_0", "q8_0", "q8_0")],
    ids="-".join,
)
@pytest.mark.parametrize("kind", ["qwen2", "olmo2"])
def test_q_k_and_v_of_several_formats(kind: str, formats: tuple[str, str, str]) -> None:
    """As in files of llama.cpp, whose v often has more bits."""
    model = small(kind, "f32")
    for layer in layers(model):
        attention = layer.self_attn
        for name, format in zip(("q_proj", "k_proj", "v_proj"), formats, strict=True):
            setattr(attention, name, QuantLinear.from_linear(getattr(attention, name), format))
    want = logits(model)
    fuse_(model)
    assert all(are_fused(model))
    assert near(logits(model), want)


# ---- whole models


def test_fusing_in_a_process_of_another_default_dtype() -> None:
    model = small("qwen3")
    torch.set_default_dtype(torch.bfloat16)
    try:
        fuse_(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(are_fused(model))


def test_packed_layers_outside_of_transformers_models() -> None:
    model = nn.Sequential(packed("q8_0", 64, 64), packed("q8_0", 64, 64))
    assert fuse_(model) is model


# {what makes a layer another: (its module, attribute, value)}
UNLIKE: dict[str, tuple[str, str, Any]] = {
    "scale": ("self_attn", "scaling", 1.0),
    "eps": ("input_layernorm", "variance_epsilon", 0.5),
    "class": ("", "__class__", doing("clamps")),
    "object": ("self_attn", "more", object()),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_layers_alike_are_confirmed_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other weights are no other layer; a number, a class or an object of its own is."""
    known: list[bool] = []
    whole = agrees
    monkeypatch.setattr(
        "torch_metalmm.models.fuse.layers.agrees",
        lambda fused, runs, is_known: (known.append(is_known), whole(fused, runs, is_known))[1],
    )
    fuse_(small("llama", num_hidden_layers=4))
    assert known == [False, True, True, True]
    known.clear()
    model = small("llama", num_hidden_layers=4)
    part, name, value = UNLIKE[what]
    setattr(layers(model)[2].get_submodule(part), name, value)
    fuse_(model)
    assert known[:2] == [False, True] and not known[2] and known[-1]
