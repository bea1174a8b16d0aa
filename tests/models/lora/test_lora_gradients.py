"""Gradients of LoRA on a whole packed Llama against those of the model with decoded weights.

A bound from adding up worst cases through a whole model says nothing: it exceeds the gradients.
Here roundings are taken as independent and of mean zero, which leaves their sizes as a bound:

A packed and a dense model do the same f32 operations except inside their linear layers. There,
each of K products errs by at most u |x w| and each of K - 1 additions by at most u |x| |W|T, in any
order of the sums: the mean square of an error of y is at most b^2, b = sqrt(K) u |x| |W|T, and that
of dx likewise with |g| |W|. To first order a gradient is off by the sum of J_i d_i over all these
places, in the mean square by at most the sum of (J_i b_i)^2: what a float64 model is off by in
which every y and dx is moved by the whole of b, up or down at random. Norms over a thousand values
and more keep close to the root of their mean square. What all other operations round is in the
error of the dense f32 model. Hence, in norms,

    |packed - exact| <= |moved - exact| + |dense f32 - exact|.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_models import dense
from lora_cases import QUIET, lora, randomize
from oracle import U
from peft import get_peft_model
from tiny_models import tiny_llama, token_ids
from torch import Tensor, nn

from torch_metalmm import quantize_

pytestmark = QUIET

TARGETS = ("q_proj", "v_proj", "down_proj")


class _Moved(torch.autograd.Function):
    """x WT and g W in float64, each value moved as far as f32 is off by, up or down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return _moved(x, w.T)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _moved(g, ctx.w), None


def _moved(a: Tensor, b: Tensor) -> Tensor:
    exact = a @ b
    up_or_down = 2.0 * torch.randint(0, 2, exact.shape) - 1
    return exact + up_or_down * U * len(b) ** 0.5 * (a.abs() @ b.abs())


class MovedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Moved.apply(x, self.weight)


def gradients(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    model = get_peft_model(model, lora(*TARGETS))
    randomize(model)  # in f32, so that all have the same adapters
    model.to(dtype)
    ids = token_ids(3, 20)
    model(input_ids=ids, labels=ids).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("format", ["q6_k", "affine4_g64"])
def test_gradients_of_a_llama_are_those_of_the_decoded_weights(format: str) -> None:
    packed = quantize_(tiny_llama(), format, progress=False)
    twin, moved = dense(packed), dense(packed, MovedLinear)
    halved = dense(packed)  # with one layer of fifteen wrong by what f16 rounds
    layer = halved.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.half().float()
    exact = gradients(dense(packed), torch.float64)
    torch.manual_seed(0)
    of_moved, of_halved = gradients(moved, torch.float64), gradients(halved, torch.float64)
    ours, theirs = gradients(packed, torch.float32), gradients(twin, torch.float32)
    assert len(exact) == 12
    for name, want in exact.items():
        error, allowed, other, half = (
            (g[name] - want).norm() for g in (ours, of_moved, theirs, of_halved)
        )
        print(
            f"{name}: {error / want.norm():.1e}, {error / (allowed + other):.3f} of the bound, "
            f"{error / other:.2f} of the dense model's error; halved {half / (allowed + other):.1f}"
        )
        assert error <= allowed + other
        assert half > allowed + other
