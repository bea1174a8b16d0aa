"""importance: sums of squares of what each linear layer is given, whatever the layer is."""

from __future__ import annotations

import pytest
import torch
from inputs import activations
from torch import Tensor, nn

from torch_metalmm import QuantLinear, quantize_
from torch_metalmm.models.importance import importance

pytestmark = [pytest.mark.filterwarnings("error")]

# Squares of these are multiples of 2**-12 below 2**8, so that f32 adds them exactly.
X = (activations(24, 64) * 16).round().clamp(-255, 255) / 64


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums(packed: bool, dtype: torch.dtype) -> None:
    layers = quantize_(model(), "q8_0", progress=False) if packed else model()
    layers, x = layers.to(dtype), X.to(dtype)
    inner: list[Tensor] = []
    layers[1].register_forward_hook(lambda _, x, y: inner.append(y.detach()))
    with importance(layers) as sums:
        layers(x[:16].reshape(2, 8, 64))
        layers(x[16:])
    assert sums.keys() == {"0", "2"} and sums["0"].rows == sums["2"].rows == 24
    assert torch.equal(sums["0"].squares, x.double().square().sum(0))
    hidden = torch.cat([t.reshape(-1, 32) for t in inner]).double().square().sum(0)
    assert ((sums["2"].squares - hidden).abs() <= 26 * 2.0**-24 * hidden).all()
    before = sums["0"].squares.clone()
    layers(x)
    assert torch.equal(sums["0"].squares, before)  # the hooks are gone


def test_columns_are_in_the_order_of_x() -> None:
    layer = QuantLinear.from_linear(nn.Linear(64, 32), "q8_0")
    layer.input_order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    with importance(nn.Sequential(layer)) as sums:
        layer(X)
    assert torch.equal(sums["0"].squares, X.double().square().sum(0))


def test_inputs_by_keyword_and_layers_that_never_run() -> None:
    layers = nn.ModuleDict({"a": nn.Linear(64, 32), "b": nn.Linear(64, 32)})
    with importance(layers) as sums:
        layers["a"](input=X)
    assert (sums["a"].rows, sums["b"].rows) == (24, 0) and not sums["b"].squares.any()


def test_infinite_inputs() -> None:
    layers = model()
    message = "0 was given an input that is NaN or infinite"
    with pytest.raises(ValueError, match=message), importance(layers):
        layers(X / 0)
    assert not layers[0]._forward_pre_hooks
