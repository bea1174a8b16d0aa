"""adopt_: layers of transformers, diffusers and ComfyUI-GGUF become packed ones, bytes and all."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from gguf import GGMLQuantizationType as Type
from oracle import activations, check, random_weight, spec
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

from torch_metalmm import QuantEmbedding, QuantLinear, adopt_, formats, quantize_

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("error")]

GGML = tuple(t for t in Type if t.name.lower() in formats.names())
BLOCKS = tuple(t for t in GGML if t not in (Type.F32, Type.F16, Type.BF16))
X = activations(3, 256)


def adopted(layer: nn.Module) -> Any:
    """What `layer` becomes in a model."""
    return adopt_(nn.Sequential(layer))[0]


def computes(layer: QuantLinear, w: Tensor, bias: Tensor | None = None) -> None:
    assert type(layer) is QuantLinear
    fixed = None if bias is None else bias.detach()
    check(layer(X), oracle.linear(X, w, fixed), layer.format)


def packed(kind: Type, n: int = 24, k: int = 256) -> Tensor:
    return random_weight(kind.name.lower(), n, k)


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
    model.b.ggml_type = int(Type.IQ2_XS)
    model["experts"] = GgufExperts(2, 256, 256, int(Type.Q8_0), int(Type.Q8_0), nn.SiLU())
    with pytest.warns(UserWarning, match="no format iq2_xs: b; experts stacked.*: experts"):
        adopt_(model)
    assert type(model.a) is QuantLinear
    assert type(model.b) is GgufLinear and type(model.experts) is GgufExperts


# ---- transformers' MetalLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (4, 128), (8, 32)])
def test_metal_linear(bits: int, group: int, dtype: torch.dtype) -> None:
    """Their three tensors in one, and back, without a changed bit."""
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


# ---- diffusers


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q5_1, Type.Q4_K, Type.Q6_K, Type.BF16], ids=str)
def test_diffusers_linear(kind: Type) -> None:
    theirs = GGUFLinear(256, 24, bias=True, compute_dtype=torch.float32)
    data = packed(kind)
    theirs.weight = GGUFParameter(data, quant_type=kind)
    layer = adopted(theirs)
    assert layer.weight.data_ptr() == data.data_ptr() and type(layer.weight) is nn.Parameter
    w = spec(kind.name.lower(), data, 256)
    computes(layer, w, theirs.bias.detach())
    # Theirs multiplies scales in f16: a second opinion on what the bytes mean, not on rounding.
    assert (theirs(X) - layer(X)).norm() < 0.01 * layer(X).norm()


def test_diffusers_linear_with_a_bias_in_blocks() -> None:
    theirs = GGUFLinear(256, 24, bias=True, compute_dtype=torch.float32)
    data, bias = packed(Type.Q8_0), activations(24, seed="bias").bfloat16()
    theirs.weight = GGUFParameter(data, quant_type=Type.Q8_0)
    theirs.bias = GGUFParameter(bias.view(torch.uint8), quant_type=Type.BF16)
    layer = adopted(theirs)
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, bias.float())
    computes(layer, spec("q8_0", data, 256), bias.float())


# ---- ComfyUI-GGUF: no package to install, so a tensor and a layer with what its own ones show


class ComfyTensor(torch.Tensor):
    """Bytes whose .shape is the weight's, and whose methods do as little as possible."""

    tensor_type: Type
    tensor_shape: torch.Size
    patches: list[Any]

    @property
    def shape(self) -> torch.Size:
        return self.tensor_shape

    def detach(self) -> ComfyTensor:
        return self


def comfy_tensor(data: Tensor, kind: Type, *shape: int) -> ComfyTensor:
    t = data.as_subclass(ComfyTensor)
    t.tensor_type, t.tensor_shape, t.patches = kind, torch.Size(shape), []
    return t


class ComfyLinear(nn.Linear):
    comfy_cast_weights = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = 256, 24
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q3_K, Type.IQ4_NL, Type.F16, Type.F32], ids=str)
def test_comfy_linear(kind: Type) -> None:
    data, name = packed(kind), kind.name.lower()
    w = spec(name, data, 256)
    stored = data.view(dict(f16=torch.float16, f32=torch.float32).get(name, torch.uint8))
    bias = activations(24, seed="bias").half()
    theirs = ComfyLinear(comfy_tensor(stored, kind, 24, 256), comfy_tensor(bias, Type.F16, 24))
    layer = adopted(theirs)
    assert layer.format == name and layer.weight.data_ptr() == data.data_ptr()
    assert type(layer.weight) is nn.Parameter and type(layer.bias) is nn.Parameter
    assert layer.bias.data_ptr() == bias.data_ptr()
    computes(layer, w, bias)


def test_comfy_patches_are_not_dropped() -> None:
    weight = comfy_tensor(packed(Type.Q8_0), Type.Q8_0, 24, 256)
    weight.patches = [("a LoRA", "key")]
    with pytest.raises(ValueError, match="^0: its weight has patches that are not merged"):
        adopted(ComfyLinear(weight))
    weight.patches, weight.tensor_shape = [], torch.Size([24, 128])
    with pytest.raises(
        ValueError, match=r"its tensor_shape is \[24, 128\], the layer is \[24, 256"
    ):
        adopted(ComfyLinear(weight))


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
    """Those that train, those that compute something else, and nn.Linear itself."""
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


def test_a_layer_under_two_names_stays_one() -> None:
    theirs = gguf_linear(Type.Q8_0)
    model = adopt_(nn.ModuleDict({"a": theirs, "b": theirs}))
    assert model.a is model.b and type(model.a) is QuantLinear


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
