"""QuantLinear and QuantEmbedding: what they compute, store, load and refuse."""

from __future__ import annotations

import copy
import io
import pickle

import oracle
import pytest
import torch
from torch import nn

from torch_metalmm import QuantEmbedding, QuantLinear, formats

FORMATS = ("q4_0", "q4_k", "q8_0", "iq4_nl", "mxfp4", "affine4_g64", "f16", "bf16", "f32")


def packed_linear(
    format: str = "q4_0", n: int = 24, k: int = 256, bias: bool = True, seed: int = 0
) -> QuantLinear:
    torch.manual_seed(seed)
    return QuantLinear.from_linear(nn.Linear(k, n, bias=bias), format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_linear_computes_with_the_decoded_weight(format: str, dtype: torch.dtype) -> None:
    layer = packed_linear(format)
    x = torch.randn(2, 3, 256).to(dtype)
    y = layer(x)
    assert y.dtype == dtype and y.shape == (2, 3, 24)
    oracle.check(y, oracle.linear(x, layer.dequantize(), layer.bias))


def test_linear_weight_is_the_specifications_bytes() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(256, 8)
    layer = QuantLinear.from_linear(dense, "Q4_K")
    assert layer.format == "q4_k"
    assert torch.equal(layer.weight, formats.get("q4_k").quantize(dense.weight))
    assert torch.equal(layer.dequantize(), formats.get("q4_k").dequantize(layer.weight, 256))
    assert layer.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_parameters_are_frozen_and_the_layer_is_a_linear() -> None:
    layer = packed_linear()
    assert isinstance(layer, nn.Linear)
    assert {n: p.dtype for n, p in layer.named_parameters()} == {
        "weight": torch.uint8,
        "bias": torch.float32,
    }
    assert not any(p.requires_grad for p in layer.parameters())
    assert repr(layer) == "QuantLinear(in_features=256, out_features=24, bias=True, format=q4_0)"


@pytest.mark.quick
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip_through_a_file(assign: bool) -> None:
    layer = packed_linear("q4_k")
    assert list(layer.state_dict()) == ["weight", "bias"]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = QuantLinear(256, 24, True, "q4_k")
    other.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    x = torch.randn(2, 256)
    assert torch.equal(other(x), layer(x))
    assert not other.weight.requires_grad


def test_load_into_another_format_of_the_same_size_is_an_error() -> None:
    state = packed_linear("q4_0").state_dict()
    with pytest.raises(RuntimeError, match="weight is stored as q4_0, this layer holds iq4_nl"):
        QuantLinear(256, 24, True, "iq4_nl").load_state_dict(state)


def test_load_of_wrong_row_bytes_names_what_is_needed() -> None:
    state = dict(packed_linear("q4_1").state_dict())  # a plain dict has no format
    model = nn.Sequential(QuantLinear(256, 24, True, "q4_0"))
    with pytest.raises(
        RuntimeError, match=r"0\.weight must be uint8 \[24, 144\] \(q4_0, K = 256\)"
    ):
        model.load_state_dict({f"0.{name}": value for name, value in state.items()})


def test_load_of_dense_weights_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"must be uint8 .* got torch.float32 \[24, 256\]"):
        QuantLinear(256, 24, True, "q4_0").load_state_dict(nn.Linear(256, 24).state_dict())


def test_copies_and_pickles_are_equal_and_independent() -> None:
    layer = packed_linear()
    x = torch.randn(2, 256)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x)) and other.format == layer.format
        assert other.weight.data_ptr() != layer.weight.data_ptr()
    assert layer.to("meta").weight.is_meta


def test_from_packed_shares_the_bytes_and_takes_dense_tensors() -> None:
    packed = formats.get("q8_0").quantize(torch.randn(4, 64))
    layer = QuantLinear.from_packed(packed, 64, "q8_0")
    assert layer.weight.data_ptr() == packed.data_ptr() and layer.bias is None
    dense = torch.randn(4, 64).half()
    layer = QuantLinear.from_packed(dense, 64, "f16")
    assert layer.weight.data_ptr() == dense.data_ptr()
    assert torch.equal(layer.dequantize(torch.float16), dense)
    column = torch.randn(1, 4).t()  # contiguous, with a last stride of 4
    assert torch.equal(QuantLinear.from_packed(column, 1, "f32").dequantize(), column)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(4, 10, dtype=torch.uint8), 64, "q8_0"), r"uint8 \[N, 68\] \(q8_0, K = 64\)"),
        ((torch.zeros(4, 64), 64, "q8_0"), "got torch.float32"),
        ((torch.zeros(4, 64), 64, "f16"), "got torch.float32"),
        ((torch.zeros(68, dtype=torch.uint8), 64, "q8_0"), r"got torch.uint8 \[68\]"),
        ((torch.zeros(4, 68, dtype=torch.uint8), 65, "q8_0"), "not a multiple of the block of 32"),
        ((torch.zeros(4, 68, dtype=torch.uint8), 64, "q9_0"), "unknown 'q9_0'; allowed: f32, f16"),
        ((torch.zeros(4, 68, dtype=torch.uint8), 64, "q8_0", torch.zeros(5)), r"float \[4\]"),
        ((torch.zeros(4, 68, dtype=torch.uint8), 64, "q8_0", torch.zeros(4).int()), "int32"),
    ],
)
def test_from_packed_refuses_what_does_not_fit(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantLinear.from_packed(*arguments)


def test_from_linear_refuses_what_it_cannot_pack() -> None:
    with pytest.raises(ValueError, match="K = 96 is not a multiple of the block"):
        QuantLinear.from_linear(nn.Linear(96, 4), "q4_k")
    bad = nn.Linear(64, 4)
    bad.weight.data[2, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        QuantLinear.from_linear(bad, "q4_0")
    with pytest.raises(ValueError, match="meta device"):
        QuantLinear.from_linear(nn.Linear(64, 4, device="meta"), "q4_0")


def test_from_linear_of_a_packed_layer_packs_again_only_for_another_format() -> None:
    layer = packed_linear("q8_0")
    assert QuantLinear.from_linear(layer, "q8_0").weight is layer.weight
    again = QuantLinear.from_linear(layer, "q4_0")
    assert torch.equal(again.weight, formats.get("q4_0").quantize(layer.dequantize()))


def test_input_order_is_a_reorder_of_the_columns() -> None:
    dense, order = torch.randn(8, 64), torch.randperm(64)
    layer = QuantLinear.from_packed(dense[:, order].contiguous(), 64, "f32")
    layer.input_order = order
    x = torch.randn(3, 64)
    assert torch.equal(layer.dequantize(), dense)
    oracle.check(layer(x), oracle.linear(x, dense))
    other = QuantLinear(64, 8, False, "f32")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


# Embeddings


def packed_embedding(format: str = "q8_0", **options: object) -> QuantEmbedding:
    torch.manual_seed(0)
    return QuantEmbedding.from_embedding(nn.Embedding(40, 256, **options), format)


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_the_decoded_rows(format: str) -> None:
    layer = packed_embedding(format)
    ids = torch.tensor([[0, 39, 7], [7, 7, 1]])
    assert torch.equal(layer(ids), layer.dequantize()[ids])
    assert torch.equal(layer(ids.int()), layer(ids))


def test_embedding_dtype_follows_module_moves() -> None:
    layer = packed_embedding()
    ids = torch.tensor([3])
    assert layer(ids).dtype == torch.float32
    assert layer.half()(ids).dtype == torch.float16
    assert layer.to(torch.bfloat16)(ids).dtype == torch.bfloat16
    assert layer.to("cpu")(ids).dtype == torch.bfloat16
    assert layer.weight.dtype == torch.uint8
    given = QuantEmbedding(40, 256, "q8_0", dtype=torch.float16)
    assert given.dtype == torch.float16


def test_embedding_keeps_what_it_replaces() -> None:
    layer = packed_embedding(padding_idx=2)
    assert isinstance(layer, nn.Embedding) and layer.padding_idx == 2
    assert repr(layer) == (
        "QuantEmbedding(40, 256, padding_idx=2, format=q8_0, dtype=torch.float32)"
    )
    plain = "QuantEmbedding(40, 256, format=q8_0, dtype=torch.float32)"
    assert repr(packed_embedding()) == plain
    with pytest.raises(ValueError, match="max_norm"):
        packed_embedding(max_norm=1.0)


def test_tied_head_shares_the_tensor_also_after_copies_and_loading() -> None:
    embedding = packed_embedding()
    model = nn.ModuleDict({"embed": embedding, "head": embedding.as_linear()})
    assert model["head"].weight is embedding.weight
    copied = copy.deepcopy(model)
    assert copied["head"].weight is copied["embed"].weight
    assert copied["embed"].weight is not embedding.weight
    other = packed_embedding("q8_0")
    loaded = nn.ModuleDict({"embed": other, "head": other.as_linear()})
    loaded.load_state_dict(model.state_dict())
    assert loaded["head"].weight is loaded["embed"].weight
    x = torch.randn(2, 256)
    assert torch.equal(loaded["head"](x), model["head"](x))
