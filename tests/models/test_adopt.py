"""adopt_: layers of other libraries become packed ones, bytes and all; transformers' layers, dense
subclasses, and whole models."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from adopt_cases import BLOCKS, Type, adopted, computes, packed
from inputs import activations
from oracle import check, spec
from tiny_models import tiny_llama, token_ids
from torch import Tensor, nn
from transformers.integrations.gguf.utils import (
    GgufEmbedding,
    GgufExperts,
    GgufLinear,
    replace_with_gguf_modules,
)
from transformers.integrations.metal_quantization import (
    MetalLinear,
    _affine_dequantize_tensor,
    _affine_quantize_tensor,
)

from torch_metalmm import QuantEmbedding, QuantExperts, QuantLinear, adopt_, formats, quantize_

pytestmark = [pytest.mark.filterwarnings("error")]


# ---- transformers' GGUF layers


def gguf_linear(kind: Type, bias: bool = False) -> GgufLinear:
    layer = GgufLinear(256, 24, int(kind), bias)
    layer.weight = nn.Parameter(packed(kind), requires_grad=False)
    if bias:
        layer.bias = nn.Parameter(activations(24, seed="bias"), requires_grad=False)
    return layer


@pytest.mark.parametrize(
    "kind", [t for t in BLOCKS if t.name in ("Q4_0", "Q4_K", "Q6_K", "IQ4_XS")]
)
def test_transformers_linear(kind: Type) -> None:
    theirs = gguf_linear(kind, bias=True).eval()
    layer = adopted(theirs)
    assert layer.weight.data_ptr() == theirs.weight.data_ptr() and not layer.training
    assert not any(p.requires_grad for p in layer.parameters())
    w = spec(kind.name.lower(), theirs.weight, 256)
    computes(layer, w, theirs.bias)
    rows = activations(9, 256)  # more than their kernels take, so that theirs runs here
    check(theirs(rows), oracle.linear(rows, w, theirs.bias.detach()), "theirs, a second opinion")


def test_transformers_linear_with_permuted_input() -> None:
    theirs = gguf_linear(Type.Q8_0)
    theirs.input_permutation = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    w = torch.empty(24, 256)
    w[:, theirs.input_permutation] = spec("q8_0", theirs.weight, 256)
    computes(adopted(theirs), w)


def test_transformers_embedding() -> None:
    theirs = GgufEmbedding(24, 256, int(Type.Q6_K), torch.float16)
    theirs.weight = nn.Parameter(packed(Type.Q6_K), requires_grad=False)
    layer, ids = adopted(theirs), torch.tensor([[3, 23], [0, 3]])
    assert type(layer) is QuantEmbedding
    assert layer.weight.data_ptr() == theirs.weight.data_ptr()
    assert torch.equal(layer(ids), spec("q6_k", theirs.weight, 256)[ids].half())


def test_a_model_of_transformers_with_a_tied_head(tmp_path: Path) -> None:
    """transformers' own replacement, then ours: one table for embedding and head, same logits.

    Their quantizer, which could not save it, is gone with its layers.
    """

    class Kernel:
        def supports(self, kind: int) -> bool:
            return True

    model = tiny_llama(tie_word_embeddings=True)
    want = quantize_(tiny_llama(tie_word_embeddings=True), "q8_0", progress=False)
    names = [n for n in want.state_dict() if want.state_dict()[n].dtype == torch.uint8]
    plan = {n: int(Type.Q8_0) for n in names if n != "lm_head.weight"}
    replace_with_gguf_modules(model, plan, Kernel(), torch.float32)
    model.load_state_dict(want.state_dict(), assign=True)
    model.tie_weights()
    assert (
        type(model.lm_head) is GgufLinear
        and model.lm_head.weight is model.model.embed_tokens.weight
    )
    model.hf_quantizer = Kernel()
    adopt_(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {type(m).__name__ for m in model.modules() if isinstance(m, nn.Linear)} == {
        "QuantLinear"
    }
    ids = token_ids(2, 5)
    assert torch.equal(model(ids).logits, want(ids).logits)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids).logits, want(ids).logits)


def test_what_has_no_format_is_left_with_a_warning() -> None:
    model = nn.ModuleDict({"a": gguf_linear(Type.Q8_0), "b": gguf_linear(Type.Q8_0)})
    model.b.ggml_type = int(Type.Q8_K)
    kind = int(Type.Q8_0)
    model["experts"] = GgufExperts(2, 256, 256, kind, kind, nn.Tanh())
    with pytest.warns(UserWarning, match="no format q8_k: b; experts of an activation.*: experts"):
        adopt_(model)
    assert type(model.a) is QuantLinear
    assert type(model.b) is GgufLinear and type(model.experts) is GgufExperts


def test_experts_share_their_bytes() -> None:
    kinds = {"gate_up_proj": Type.Q4_K, "down_proj": Type.Q6_K}
    theirs = GgufExperts(3, 256, 512, *map(int, kinds.values()), nn.GELU(approximate="tanh"))
    g = torch.Generator().manual_seed(0)
    for name, kind in kinds.items():
        shape = theirs.get_parameter(name).shape
        values = torch.randn(shape[0] * shape[1], 512 if name == "down_proj" else 256, generator=g)
        packed = torch.ops.metalmm.quantize(values / 16, kind.name.lower())
        setattr(theirs, name, nn.Parameter(packed.view(shape), requires_grad=False))
    model = adopt_(nn.Sequential(theirs))
    experts = model[0]
    assert type(experts) is QuantExperts and experts.formats == {
        "gate_up_proj": "q4_k",
        "down_proj": "q6_k",
    }
    assert experts.gate.activation == "gelu_tanh"
    for name in kinds:
        assert experts.get_parameter(name).data_ptr() == theirs.get_parameter(name).data_ptr()


# ---- transformers' MetalLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (4, 128), (8, 32)])
def test_metal_linear(bits: int, group: int, dtype: torch.dtype) -> None:
    """MetalLinear's three tensors become one, and three again, without a changed bit."""
    theirs = MetalLinear(256, 24, bias=True, bits=bits, group_size=group)
    w, scales, biases = _affine_quantize_tensor(activations(24, 256).to(dtype), group, bits)
    for name, tensor in (
        ("weight", w),
        ("scales", scales.to(dtype)),
        ("qbiases", biases.to(dtype)),
    ):
        setattr(theirs, name, nn.Parameter(tensor, requires_grad=False))
    layer = adopted(theirs)
    assert layer.format == formats.affine(bits, group, dtype).name
    planes = formats.affine(bits, group, dtype).unpack(layer.weight, 256)
    for ours, name in zip(planes, ("weight", "scales", "qbiases"), strict=True):
        assert torch.equal(ours, getattr(theirs, name)), name
    decoded = _affine_dequantize_tensor(w, theirs.scales, theirs.qbiases, group, bits)
    assert torch.equal(layer.dequantize(), decoded)
    computes(layer, decoded, theirs.bias)


def test_metal_linear_whose_tensors_disagree() -> None:
    theirs = MetalLinear(256, 24, bits=4, group_size=64)
    theirs.scales = nn.Parameter(torch.zeros(24, 3), requires_grad=False)
    with pytest.raises(ValueError, match=r"^0: .*scales must be torch.float32 \[24, 4\]"):
        adopted(theirs)
    narrow = MetalLinear(256, 24, bits=4, group_size=64)
    narrow.in_features = 512
    with pytest.raises(ValueError, match=r"^0: its weight is \[24, 32\], the layer is \[24, 512\]"):
        adopted(narrow)
    odd = MetalLinear(256, 24, bits=4, group_size=16)
    with pytest.warns(UserWarning, match="left as they are: affine: 4 bits in groups of 16"):
        assert adopted(odd) is odd


# ---- dense subclasses of nn.Linear


class Subclass(nn.Linear):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dense_subclasses_share_their_bytes(dtype: torch.dtype) -> None:
    theirs = Subclass(256, 24, dtype=dtype).requires_grad_(False)
    layer = adopted(theirs)
    assert layer.weight.data_ptr() == theirs.weight.data_ptr()
    computes(layer, theirs.weight.float(), theirs.bias)


def test_dense_layers_that_stay() -> None:
    """Layers that train, layers that compute something else, and nn.Linear itself."""
    scaled = Subclass(256, 24).requires_grad_(False)
    scaled.factor = 2.0
    layers = [Subclass(256, 24), scaled, nn.Linear(256, 24).requires_grad_(False)]
    layers.append(nn.LazyLinear(24))
    for layer in layers:
        assert adopted(layer) is layer


def test_bitsandbytes_is_not_mistaken_for_ggml() -> None:
    """Its 4-bit weights are bytes with a quant_type, too."""
    theirs = nn.Linear(256, 24, bias=False)
    data = torch.zeros(3072, 1, dtype=torch.uint8)
    theirs.weight = nn.Parameter(data, requires_grad=False)
    theirs.weight.quant_type = "nf4"
    assert adopted(theirs) is theirs


# ---- in models


class Head(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype))


def test_layers_whose_weight_the_model_reads_stay() -> None:
    model = nn.Sequential(Head(gguf_linear(Type.Q8_0)))
    with pytest.warns(UserWarning, match="the model reads their weight itself: 0.layer"):
        adopt_(model)
    assert type(model[0].layer) is GgufLinear


def test_filter_and_errors_change_nothing() -> None:
    model = nn.ModuleDict({"a": gguf_linear(Type.Q8_0), "b": gguf_linear(Type.Q8_0)})
    adopt_(model, lambda name, module: name != "a")
    assert type(model.a) is GgufLinear and type(model.b) is QuantLinear
    model["c"] = gguf_linear(Type.Q8_0).to("meta")
    with pytest.raises(ValueError, match="^c: its weight is on the meta device"):
        adopt_(model)
    model["c"] = gguf_linear(Type.Q8_0)
    model.c.in_features = 512
    with pytest.raises(
        ValueError, match=r"^c: its weight is torch.uint8 \[24, 272\]; q8_0 \[24, 5"
    ):
        adopt_(model)
    assert type(model.a) is GgufLinear
    with pytest.raises(ValueError, match="^model is itself a GgufLinear"):
        adopt_(gguf_linear(Type.Q8_0))


def test_layers_are_freed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where bytes have to be copied, at most one layer exists twice."""
    model = nn.Sequential(*(MetalLinear(256, 24, bits=4, group_size=64) for _ in range(3)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen = []
    put = nn.Module.set_submodule

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        seen.append(sum(ref() is not None for ref in alive))
        put(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "set_submodule", counted)
    adopt_(model)
    assert seen == [3, 2, 1]
