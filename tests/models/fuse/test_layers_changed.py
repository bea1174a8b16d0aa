"""Modules of a fused model that are changed later: what they are then decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_models import are_fused, ids, layers, small
from lora_cases import QUIET
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from torch_metalmm import fuse_

pytestmark = QUIET


class Half(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / 2


def a_plain_tensor(model: Any) -> None:
    norm = layers(model)[1].post_attention_layernorm
    weight = norm.weight.detach() * 3
    del norm.weight
    norm.weight = weight


def no_weight(model: Any) -> None:
    """A norm without its factor, in code that allows for one."""
    norm = layers(model)[0].input_layernorm
    norm.weight = None
    norm.forward = lambda x: nn.functional.rms_norm(x, x.shape[-1:], None, norm.variance_epsilon)


def norms_of_f32(model: Any) -> None:
    for layer in layers(model):
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()


def halved(norm: nn.Module) -> None:
    register_parametrization(norm, "weight", Half())


CHANGES: dict[str, Callable[[Any], None]] = {
    "parametrized": lambda model: halved(layers(model)[0].input_layernorm),
    "parametrized at the end": lambda model: halved(model.model.norm),
    "a plain tensor": a_plain_tensor,
    "no weight": no_weight,
    "another activation": lambda model: setattr(layers(model)[0].mlp, "act_fn", nn.GELU()),
    "norms of f32": norms_of_f32,
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_changes_after_a_forward_counts(what: str, dtype: torch.dtype) -> None:
    plain = small("llama").to(dtype)
    model = fuse_(copy.deepcopy(plain), "swiglu")
    assert all(are_fused(model))
    with torch.no_grad():
        model(ids(2, 7))
        before = plain(ids(2, 7)).logits
        for each in (plain, model):
            CHANGES[what](each)
        want, got = plain(ids(2, 7)).logits, model(ids(2, 7)).logits
    assert got.dtype == want.dtype
    # What is left of a difference are roundings, of which a layer has a dozen in its dtype.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert float((got - want).float().norm() / want.float().norm()) < 24 * unit
    if what not in ("norms of f32", "no weight") and dtype == torch.float32:  # the change is seen
        assert float((want - before).float().norm() / before.float().norm()) > 24 * unit
