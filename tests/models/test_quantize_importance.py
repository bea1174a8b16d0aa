"""quantize_ with the importance of columns: which layer gets which, and what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_quantize import LAYERS, Net, formats_of
from torch import Tensor

from torch_metalmm import QuantLinear, formats, quantize_
from torch_metalmm.models.importance import Sums, importance

pytestmark = pytest.mark.filterwarnings("error")

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
    model, own = torch.nn.Sequential(layer), columns(256, 7)
    wanted = formats.get("q5_1").quantize(layer.dequantize(), own)
    quantize_(model, "q5_1", progress=False, importance={"0": own})
    assert model[0].input_order is None and torch.equal(model[0].weight, wanted)
