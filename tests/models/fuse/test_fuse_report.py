"""What explain says of a model's layers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from bench.models.families import family
from torch_metalmm import fuse_, unfuse_
from torch_metalmm.hf.replay import explain
from torch_metalmm.models.fuse.report import describe_layers

pytestmark = pytest.mark.filterwarnings("ignore")


class Odd(nn.Module):
    """An MLP of no known kind."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).sin()


def test_layers_by_what_became_of_them() -> None:
    model = family("llama", num_hidden_layers=4)
    kind = "LlamaDecoderLayer"
    model.model.layers[1].mlp = Odd(model.model.layers[1].mlp)
    model.model.layers[2].forward = type(model.model.layers[2]).forward.__get__(
        model.model.layers[2]
    )  # which fuse_ leaves alone
    assert describe_layers(model) == [f"4 of {kind}: as the class computes it"]
    fuse_(model, "swiglu", cache="q8_0")
    said = describe_layers(model)
    assert sorted(said) == [
        f"1 of {kind}: as the class computes it",
        f"1 of {kind}: in our ops but mlp (Odd)",
        f"2 of {kind}: in our ops",
    ]
    assert explain(model).splitlines()[-3:] == said
    unfuse_(model)
    assert describe_layers(model) == [f"4 of {kind}: as the class computes it"]


def test_norms_that_are_called() -> None:
    model = fuse_(family("starcoder2"), "swiglu")
    assert describe_layers(model) == [
        "2 of Starcoder2DecoderLayer: in our ops but input_layernorm (LayerNorm), "
        "post_attention_layernorm (LayerNorm)"
    ]
