"""What other libraries do to packed layers: it works, or an error names layer and format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuse_cases import packed
from tiny_models import tiny_llama
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

from torch_metalmm import QuantEmbedding, QuantLinear, fuse_, quantize_


class Twice(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 2


def embedding() -> QuantEmbedding:
    return QuantEmbedding.from_embedding(nn.Embedding(7, 32), "q8_0")


def set_weight(layer: Any, weight: torch.Tensor) -> None:
    layer.weight = nn.Parameter(weight, requires_grad=False)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "parametrize": (
        lambda m: parametrize.register_parametrization(m, "weight", Twice()),
        "weight: the Quant.* is packed in q8_0; its weight cannot be parametrized",
    ),
    "parametrize unsafe": (
        lambda m: parametrize.register_parametrization(m, "weight", Twice(), unsafe=True),
        "weight: the Quant.* is packed in q8_0; its weight cannot be parametrized",
    ),
    "prune": (
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        "weight_orig: the Quant.* is packed in q8_0, from which weight_orig cannot be made",
    ),
    "del": (lambda m: delattr(m, "weight"), "weight: the Quant.* cannot be .*removed"),
    "float": (
        lambda m: set_weight(m, m.dequantize()),
        r"weight: the Quant.* is packed in q8_0, uint8 \[N, 34\]; got torch.float32",
    ),
    "row bytes": (
        lambda m: set_weight(m, m.weight[:, :33]),
        r"uint8 \[N, 34\]; got torch.uint8 \[7, 33\]",
    ),
    "subclass": (  # torchao's are such, too
        lambda m: set_weight(m, TwoTensor(m.weight.detach(), m.weight.detach())),
        r"uint8 \[N, 34\]; got TwoTensor \[7, 34\]",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [lambda: packed("q8_0", 7, 32, bias=True), embedding])
def test_a_packed_weight_is_made_of_nothing_else(make: Callable[[], Any], change: str) -> None:
    layer, (act, message) = make(), CHANGES[change]
    kind, state = type(layer), {n: t.clone() for n, t in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        act(layer)
    assert type(layer) is kind and list(layer.state_dict()) == list(state)
    assert all(torch.equal(t, state[n]) for n, t in layer.state_dict().items())


def test_a_packed_bias_stays_where_forward_looks_for_it() -> None:
    layer = packed("q8_0", 7, 32, bias=True)
    with pytest.raises(ValueError, match="bias: the QuantLinear is packed in q8_0; its bias"):
        parametrize.register_parametrization(layer, "bias", Twice())
    layer.bias = None
    assert layer(torch.ones(32)).shape == (7,)


def test_torchao_leaves_packed_layers_alone() -> None:
    """torchao's own filter does, which asks for this class."""
    assert isinstance(packed("q8_0", 7, 32), nn.modules.linear.NonDynamicallyQuantizableLinear)
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(packed("q8_0", 64, 64), nn.Linear(64, 64))
    weight = model[0].weight
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert model[0].weight is weight and type(model[1].weight) is not nn.Parameter


# ---- transformers


@pytest.mark.parametrize("tied", [False, True])
def test_num_parameters_are_those_of_the_dense_model(tied: bool) -> None:
    dense = tiny_llama(tie_word_embeddings=tied)
    model = quantize_(tiny_llama(tie_word_embeddings=tied), "q4_k", progress=False)
    by_hand = tiny_llama(tie_word_embeddings=tied)
    mlp = by_hand.model.layers[0].mlp
    mlp.up_proj = QuantLinear.from_linear(mlp.up_proj, "q4_k")
    fused = fuse_(quantize_(tiny_llama(tie_word_embeddings=tied), "q8_0", progress=False), "swiglu")
    for options in ({}, {"exclude_embeddings": True}):
        want = dense.num_parameters(**options)
        for m in (model, by_hand, fused):
            assert m.num_parameters(**options) == want, options
            assert m.model.num_parameters(**options) == dense.model.num_parameters(**options)
    norms = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert model.num_parameters(only_trainable=True) == norms > 0


@pytest.mark.parametrize("layer", ["*embed_tokens", "lm_head", "*"])
def test_packed_embeddings_are_not_resized(layer: str) -> None:
    model = quantize_(tiny_llama(tie_word_embeddings=False), {layer: "q4_k"}, progress=False)
    rows = model.config.vocab_size
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    for arguments in ((rows + 1,), (None, 7), (8,)):
        with pytest.raises(ValueError, match=f"{rows} rows packed in q4_k.*resize the dense"):
            model.resize_token_embeddings(*arguments)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_dense_embeddings_are_resized_beside_packed_layers() -> None:
    model = quantize_(tiny_llama(), {"*.mlp.*": "q4_k"}, progress=False)
    rows = model.config.vocab_size + 3
    assert model.resize_token_embeddings(rows).num_embeddings == rows
