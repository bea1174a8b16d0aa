"""Queries that grow with the position, which no run of a short text shows."""

from __future__ import annotations

import copy
from typing import Any

import layer_models
import pytest
import torch
from layer_models import are_fused, layers, near, small
from replay_pair import Pair
from torch import Tensor

from torch_metalmm import fuse_
from torch_metalmm.models.fuse.layers import fused_layer

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.3,
    "attention_factor": 0.9,  # other numbers between 0 and 1, and other sizes
    "max_position_embeddings": 256,
}


def model_of(**rope: Any) -> Any:
    return small("ministral3", head_dim=32, rope_parameters={**ROPE, **rope})


def logits(model: Any, first: int = 0) -> Tensor:
    return layer_models.logits(model, position_ids=torch.arange(first, first + 9).expand(3, -1))


@pytest.mark.parametrize("first", [0, 60, 1000])
def test_positions_near_and_far(first: int) -> None:
    own = model_of()
    model = fuse_(copy.deepcopy(own), "swiglu")
    assert all(are_fused(model))
    growth = fused_layer(layers(model)[0]).recipe.heads.growth  # type: ignore[union-attr]
    assert (growth.rate, growth.size) == (
        "llama_4_scaling_beta",
        "original_max_position_embeddings",
    )
    want = logits(own, first)
    assert near(logits(model, first), want)
    plain = logits(model_of(llama_4_scaling_beta=0.0), first)
    assert (first == 0) == torch.equal(want, plain)  # there is growth to see, or none


def test_the_config_is_read_at_each_step() -> None:
    own, model = model_of(), fuse_(model_of(), "swiglu")
    for each in (own, model):
        each.config.rope_parameters["llama_4_scaling_beta"] = 0.7
    assert near(logits(model, 500), logits(own, 500))


def test_a_text_that_grows_is_replayed() -> None:
    pair = Pair(fuse_(model_of(), "swiglu", cache="q8_0/q8_0"), "q8_0/q8_0")
    pair.step(2)
    assert pair.go_on(12) == 10, pair.steps.why


def test_another_growth_stays_the_layers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.models.ministral3.modeling_ministral3 as code

    def square_root(positions: Tensor, beta: float, size: int) -> Tensor:
        return (1 + beta * torch.sqrt(torch.floor(positions / size)))[:, None, :, None]

    monkeypatch.setattr(code, "get_llama_4_attn_scale", square_root)
    own = model_of()
    model = fuse_(copy.deepcopy(own), "swiglu")
    heads = [fused_layer(layer).recipe.heads for layer in layers(model)]  # type: ignore[union-attr]
    assert heads == [None, None]
    assert near(logits(model, 500), logits(own, 500))
