"""adopt_: layers of diffusers and of ComfyUI-GGUF."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from adopt_cases import Type, X, adopted, computes, packed
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from inputs import activations
from oracle import check, spec
from torch import Tensor, nn

pytestmark = [pytest.mark.filterwarnings("error")]


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


# ---- ComfyUI-GGUF, which is on no package index: stand-ins for what its classes store and show
#
# Read in its repository (city96/ComfyUI-GGUF, 2025): ops.py has GGMLTensor, made of the file's
# tensor with tensor_type (gguf's enum), tensor_shape and patches, a list of (patches, key); its
# shape is tensor_shape, its detach and clone give itself; the layer is a subclass of nn.Linear
# made without parameters, whose weight and bias are nn.Parameter(tensor, requires_grad=False).
# loader.py takes tensors as gguf's reader has them: bytes [rows, row bytes] for blocks and BF16,
# the numbers themselves, in tensor_shape, for F32 and F16. tools/convert.py stores weights of SD1
# and SDXL whose K 256 does not divide as rows of 256 values and notes their shape in the file.


class ComfyTensor(torch.Tensor):
    tensor_type: Type
    tensor_shape: torch.Size
    patches: list[Any]

    def __new__(cls, data: Tensor, **shown: Any) -> ComfyTensor:
        return super().__new__(cls, data)

    def __init__(self, data: Tensor, **shown: Any) -> None:
        super().__init__()
        self.__dict__ |= shown

    @property
    def shape(self) -> torch.Size:
        return self.tensor_shape

    def detach(self) -> ComfyTensor:
        return self

    def clone(self) -> ComfyTensor:
        return self


def comfy_tensor(data: Tensor, kind: Type, *shape: int) -> ComfyTensor:
    return ComfyTensor(data, tensor_type=kind, tensor_shape=torch.Size(shape), patches=[])


class ComfyLinear(nn.Linear):
    comfy_cast_weights = True

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight = self.bias = None
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)


@pytest.mark.parametrize(
    "kind", [Type.Q4_0, Type.Q3_K, Type.IQ4_NL, Type.F16, Type.F32, Type.BF16], ids=str
)
def test_comfy_linear(kind: Type) -> None:
    data, name = packed(kind), kind.name.lower()
    w = spec(name, data, 256)
    stored = data.view(dict(f16=torch.float16, f32=torch.float32).get(name, torch.uint8))
    bias = activations(24, seed="bias").half()
    theirs = ComfyLinear(comfy_tensor(stored, kind, 24, 256), comfy_tensor(bias, Type.F16, 24))
    assert type(theirs.weight) is ComfyTensor and theirs.weight.shape == (24, 256)
    layer = adopted(theirs)
    assert layer.format == name and layer.weight.data_ptr() == data.data_ptr()
    assert type(layer.weight) is nn.Parameter and type(layer.bias) is nn.Parameter
    assert layer.bias.data_ptr() == bias.data_ptr()
    computes(layer, w, bias)


def test_comfy_rows_of_256_values() -> None:
    """K = 320: the same bytes are 24 rows of q4_0; of q4_k no row begins with a block."""
    data = packed(Type.Q4_0, 30, 256)
    theirs = ComfyLinear(comfy_tensor(data, Type.Q4_0, 24, 320))
    layer = adopted(theirs)
    assert layer.weight.data_ptr() == data.data_ptr() and layer.in_features == 320
    w = spec("q4_0", data, 256).reshape(24, 320)
    x = activations(3, 320)
    check(layer(x), oracle.linear(x, w), "q4_0")
    theirs = ComfyLinear(comfy_tensor(packed(Type.Q4_K, 30, 256), Type.Q4_K, 24, 320))
    with pytest.warns(UserWarning, match="left as they are: a row ends inside a block of q4_k: 0"):
        assert adopted(theirs) is theirs


def test_comfy_patches_are_not_dropped() -> None:
    weight = comfy_tensor(packed(Type.Q8_0), Type.Q8_0, 24, 256)
    bias = comfy_tensor(activations(24), Type.F32, 24)
    theirs = ComfyLinear(weight, bias)
    for name, tensor in (("weight", weight), ("bias", bias)):
        tensor.patches = [("a LoRA", "key")]
        with pytest.raises(ValueError, match=f"^0: its {name} has patches that are not merged"):
            adopted(theirs)
        tensor.patches = []
    weight.tensor_shape = torch.Size([24, 128])
    with pytest.raises(
        ValueError, match=r"its tensor_shape is \[24, 128\], the layer is \[24, 256"
    ):
        adopted(theirs)
