"""adopt_: layers of diffusers and of ComfyUI-GGUF."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adopt_cases import Type, X, adopted, computes, packed
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from oracle import activations, spec
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("error")]


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
