"""importance: sums of squares of what each linear layer is given, whatever the layer is; quantize_
with them: which layer gets which, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from inputs import activations
from test_quantize import LAYERS, Net, formats_of
from torch import Tensor, nn

from torch_metalmm import QuantLinear, formats, quantize_
from torch_metalmm.models.importance import Sums, importance

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


# ---- quantize_

LINEAR = [name for name in LAYERS if name != "embed"]


def columns(k: int, seed: int) -> Tensor:
    return torch.exp(torch.randn(k, generator=torch.Generator().manual_seed(seed)))


def given(model: Net) -> dict[str, Tensor]:
    return {n: columns(model.get_submodule(n).in_features, i) for i, n in enumerate(LINEAR)}


def test_each_layer_gets_its_own() -> None:
    reference = Net()
    model = quantize_(Net(), "q4_0", progress=False, importance=given(reference))
    for name in LAYERS:
        w, own = reference.get_submodule(name).weight, given(reference).get(name)
        assert torch.equal(model.get_submodule(name).weight, formats.get("q4_0").quantize(w, own))


def test_sums_of_a_run() -> None:
    """What importance() collected, divided by the rows; a layer that never ran has none."""
    model, reference = Net(), Net()
    with importance(model) as sums:
        model(torch.arange(20).view(2, 10))
    sums["head"] = Sums(sums["head"].squares, 0)
    with pytest.warns(UserWarning, match="packed without an importance: head$"):
        quantize_(model, "q3_k", progress=False, importance=sums)
    for name in LAYERS:
        found = sums.get(name)
        own = (found.squares / found.rows).float() if found and found.rows else None
        want = formats.get("q3_k").quantize(reference.get_submodule(name).weight, own)
        assert torch.equal(model.get_submodule(name).weight, want), name


def test_a_shared_weight_takes_that_of_any_layer() -> None:
    own = columns(256, 5)
    wanted = formats.get("q4_k").quantize(Net(tied=True).embed.weight, own)
    model = Net(tied=True)
    quantize_(model, {"embed": "q4_k"}, progress=False, importance={"head": own})
    assert model.head.weight is model.embed.weight and torch.equal(model.head.weight, wanted)


def test_layers_without_are_named_once_and_embeddings_never() -> None:
    """Nor are layers of a format that does not read it."""
    names = given(Net())
    del names["blocks.0.down"], names["blocks.1.down"], names["head"]
    spec = {"head": "q8_0", "*": "q4_0"}
    message = r"packed without an importance: blocks.\*.down \(2\)$"
    with pytest.warns(UserWarning, match=message) as caught:
        quantize_(Net(), spec, progress=False, importance=names)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_(Net(), spec, progress=False)


BAD: dict[str, tuple[Any, str]] = {
    "name": ({"blocks.0": torch.ones(256)}, "importance: the model has no linear layer 'blocks.0'"),
    "K": ({"head": torch.ones(255)}, r"importance: head must be float32 \[256\], .* \[255\]"),
    "rank": ({"head": torch.ones(1, 256)}, r"head must be float32 \[256\]"),
    "dtype": ({"head": torch.ones(256).double()}, "got torch.float64"),
    "negative": ({"head": -torch.ones(256)}, "head has an element that is negative"),
    "NaN": ({"head": torch.full((256,), torch.nan)}, "head has an element that is .* NaN"),
    "sums": ({"head": Sums(torch.ones(4).double(), 1)}, r"head must be float32 \[256\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_anything_is_changed(case: str) -> None:
    importance, message = BAD[case]
    model = Net()
    with pytest.raises(ValueError, match=message):
        quantize_(model, "q4_0", progress=False, importance=importance)
    assert formats_of(model) == {}


def test_columns_are_those_of_x() -> None:
    """A layer that orders its columns is decoded in the order of x and loses the order."""
    layer = QuantLinear.from_linear(Net().head, "f32")
    layer.input_order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    model, own = nn.Sequential(layer), columns(256, 7)
    wanted = formats.get("q5_1").quantize(layer.dequantize(), own)
    quantize_(model, "q5_1", progress=False, importance={"0": own})
    assert model[0].input_order is None and torch.equal(model[0].weight, wanted)
