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


def parametrized(model: Any) -> None:
    register_parametrization(layers(model)[0].input_layernorm, "weight", Half())


def parametrized_at_the_end(model: Any) -> None:
    register_parametrization(model.model.norm, "weight", Half())


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


def another_activation(model: Any) -> None:
    layers(model)[0].mlp.act_fn = nn.GELU()


def norms_of_f32(model: Any) -> None:
    for layer in layers(model):
        layer.input_layernorm.float()
        layer.post_attention_layernorm.float()


CHANGES = (
    parametrized,
    parametrized_at_the_end,
    a_plain_tensor,
    no_weight,
    another_activation,
    norms_of_f32,
)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_changes_after_a_forward_counts(
    change: Callable[[Any], None], dtype: torch.dtype
) -> None:
    plain = small("llama").to(dtype)
    model = fuse_(copy.deepcopy(plain), "swiglu")
    assert all(are_fused(model))
    with torch.no_grad():
        model(ids(2, 7))
        before = plain(ids(2, 7)).logits
        for each in (plain, model):
            change(each)
        want, got = plain(ids(2, 7)).logits, model(ids(2, 7)).logits
    assert got.dtype == want.dtype
    # What is left of a difference are roundings, of which a layer has a dozen in its dtype.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert float((got - want).float().norm() / want.float().norm()) < 24 * unit
    if change not in (norms_of_f32, no_weight) and dtype == torch.float32:  # the change is seen
        assert float((want - before).float().norm() / before.float().norm()) > 24 * unit
