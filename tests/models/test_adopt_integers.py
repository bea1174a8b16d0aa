"""adopt_ on the layers of GPTQ, AWQ, compressed-tensors, HQQ and torchao, which are not installed.

The layers here hold the tensors and attributes that those libraries' layers have, and decode them
as these do: from the codes that the tensors were made of.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adopt_cases import adopted, computes
from quantized_files import Layer, awq, compressed, gptq, hqq, random_layer, torchao
from torch import Tensor, nn

from torch_metalmm import QuantLinear, adopt_

pytestmark = [pytest.mark.filterwarnings("error")]

N, K = 24, 256
BIAS = torch.linspace(-1, 1, N).half()


class Theirs(nn.Module):
    """A layer with the tensors as buffers, computing in f16 as on a CPU."""

    def __init__(self, layer: Layer, tensors: dict[str, Tensor], **attributes: Any) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        self.bias = BIAS
        self.__dict__.update(attributes)
        self.of = layer

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.of.weight(x.dtype), self.bias.to(x.dtype))


SIZES = {"in_features": K, "out_features": N}


def gptq_1(layer: Layer) -> Theirs:
    """AutoGPTQ's QuantLinear."""
    return Theirs(layer, gptq(layer, 1), infeatures=K, outfeatures=N, bits=layer.bits)


def gptq_2(layer: Layer) -> Theirs:
    """GPTQModel's, after it made version 2 of the checkpoint's 1."""
    return Theirs(layer, gptq(layer, 2), qzero_format=lambda: 2, bits=layer.bits, **SIZES)


def awq_gemm(layer: Layer) -> Theirs:
    return Theirs(layer, awq(layer), w_bit=4, **SIZES)


def awq_of_gptqmodel(layer: Layer) -> Theirs:
    """GPTQModel's, whose attributes are those of its layers of GPTQ."""
    return Theirs(layer, awq(layer), qzero_format=lambda: 1, bits=4, **SIZES)


def compressed_linear(layer: Layer) -> Theirs:
    return Theirs(layer, compressed(layer), **SIZES)


def hqq_linear(layer: Layer) -> Theirs:
    t = hqq(layer)
    meta = {"shape": torch.Size([N, K]), "axis": 1, "scale": t["scale"], "zero": t["zero"]}
    meta |= {"packing": "".join(map(chr, t["packing"])), "quant_zero": False}
    return Theirs(layer, {}, W_q=nn.Parameter(t["W_q"], requires_grad=False), meta=meta)


KINDS: dict[str, Callable[[Layer], Theirs]] = {
    "GPTQ 1": gptq_1,
    "GPTQ 2": gptq_2,
    "AWQ": awq_gemm,
    "AWQ of GPTQModel": awq_of_gptqmodel,
    "compressed-tensors": compressed_linear,
    "HQQ": hqq_linear,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_integers(kind: str, dtype: torch.dtype) -> None:
    layer = random_layer(N, K, 4, 64, dtype=dtype)
    theirs = KINDS[kind](layer).eval()
    ours = adopted(theirs)
    assert torch.equal(ours.dequantize(), layer.weight()) and not ours.training
    computes(ours, layer.weight(), BIAS.float())


@pytest.mark.parametrize("kind", ["GPTQ 1", "GPTQ 2", "compressed-tensors"])
def test_act_order(kind: str) -> None:
    layer = random_layer(N, K, 4, 64, shuffled=True)
    ours = adopted(KINDS[kind](layer))
    assert ours.input_order is not None
    assert torch.equal(ours.dequantize(), layer.weight())
    computes(ours, layer.weight(), BIAS.float())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zeros_of_0_in_version_1(bits: int) -> None:
    """A zero of 0 borrows from the next code of its word."""
    layer = random_layer(32, K, bits, 64)
    layer.zeros[::5] = 0
    theirs = Theirs(layer, gptq(layer, 1), infeatures=K, outfeatures=32, bits=bits)
    theirs.bias = torch.zeros(32)
    assert torch.equal(adopted(theirs).dequantize(), layer.weight())


def test_subnormal_weights() -> None:
    """Scales of bf16 that are subnormal in f16, in which the layer computes: up to 3% is lost."""
    layer = random_layer(N, K, 4, 64, dtype=torch.bfloat16)
    layer.scales *= 2.0**-14
    theirs = gptq_1(layer)
    theirs.bias = torch.zeros(N)
    assert torch.equal(adopted(theirs).dequantize(), layer.weight())


class Int4(Tensor):
    """torchao's Int4Tensor is a Tensor that holds others."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor


def int4_linear(layer: Layer) -> nn.Linear:
    theirs = nn.Linear(K, N, bias=False)
    theirs.weight = nn.Parameter(torch.zeros(N, K), requires_grad=False)
    theirs.weight.__class__ = Int4
    for name, tensor in torchao(layer).items():
        setattr(theirs.weight, name.removeprefix("_weight_"), tensor)
    return theirs


def test_torchao() -> None:
    layer = random_layer(N, K, 4, 64, dtype=torch.bfloat16)
    want = (layer.codes - 8) * layer.scales.float()[:, layer.groups] + layer.zeros[:, layer.groups]
    assert torch.equal(adopted(int4_linear(layer)).dequantize(), want)


def test_layers_that_share_a_module_share_a_weight() -> None:
    shared = gptq_1(random_layer(N, K, 4, 64))
    model = nn.ModuleDict({"a": shared, "b": gptq_1(random_layer(N, K, 4, 64)), "c": shared})
    adopt_(model)
    assert model.a is model.c and model.a.weight is not model.b.weight


def shuffled_codes(layer: Layer) -> Theirs:
    """A kernel like ExLlama's has other nibbles in qweight, of the same shape."""
    theirs = gptq_1(layer)
    theirs.qweight = theirs.qweight.flip(0)
    return theirs


def on_a_gpu_alone(layer: Layer) -> Theirs:
    class Kernel(Theirs):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no kernel for this device")

    theirs = gptq_1(layer)
    theirs.__class__ = Kernel
    return theirs


def in_planes(layer: Layer) -> Theirs:
    theirs = gptq_2(layer)
    theirs.planar = True
    return theirs


def awq_gemv(layer: Layer) -> Theirs:
    """AutoAWQ's gemv: [N, K / 8], and scales [N, ...] of padded groups."""
    t = {"qweight": torch.zeros(N, K // 8, dtype=torch.int32)}
    t |= {"qzeros": torch.zeros(N, 1, dtype=torch.int32), "scales": torch.ones(N, 8).half()}
    return Theirs(layer, t, w_bit=4, **SIZES)


def awq_gemv_fast(layer: Layer) -> Theirs:
    theirs = awq_gemv(layer)
    theirs.qweight = torch.zeros(N // 4, K, dtype=torch.int16)
    return theirs


def padded_words(layer: Layer) -> Theirs:
    """Older releases of compressed-tensors: four codes of 7 bits a word, as of 8 bits."""
    theirs = compressed_linear(random_layer(N, K, 8, 64))
    theirs.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(num_bits=7))
    return theirs


def no_shape(layer: Layer) -> Theirs:
    theirs = hqq_linear(layer)
    del theirs.meta["shape"]
    return theirs


def other_axis(layer: Layer) -> Theirs:
    theirs = hqq_linear(layer)
    theirs.meta["axis"] = 0
    return theirs


def scaled_activations(layer: Layer) -> nn.Linear:
    theirs = int4_linear(layer)
    theirs.weight.act_pre_scale = torch.ones(K)
    return theirs


STAY: dict[str, tuple[Callable[[Layer], nn.Module], str]] = {
    "shuffled": (shuffled_codes, "computes with other weights than its tensors say.*: a"),
    "does not run": (on_a_gpu_alone, "does not run here, so that the layout.*: a"),
    "planes": (in_planes, "its codes are in planes.*: a"),
    "gemv": (awq_gemv, "qweight has the shape of neither GPTQ's nor AWQ's gemm: a"),
    "gemv_fast": (awq_gemv_fast, "qweight has the shape of neither GPTQ's nor AWQ's gemm: a"),
    "padded": (padded_words, r"weight_packed \[24, 64\] has not 7 bits a code without gaps: a"),
    "no shape": (no_shape, "meta of HQQ has the shape None, not that of a matrix: a"),
    "axis": (other_axis, "HQQ is read with axis 1.*: a"),
    "groups of 16": (
        lambda _: gptq_1(random_layer(N, K, 4, 16)),
        "groups of 16 values have no affine format.*: a",
    ),
    "factors": (scaled_activations, "act_pre_scale multiplies activations.*: a"),
}


@pytest.mark.parametrize("case", STAY)
def test_what_stays_with_a_warning(case: str) -> None:
    kind, message = STAY[case]
    layer = random_layer(N, K, 4, 64)
    model = nn.ModuleDict({"a": kind(layer), "b": gptq_1(layer)})
    before = model.a
    with pytest.warns(UserWarning, match=message):
        adopt_(model)
    assert model.a is before and type(model.b) is QuantLinear


def test_tensors_that_contradict_each_other() -> None:
    layer = random_layer(N, K, 4, 64)
    model = nn.ModuleDict({"a": gptq_1(layer), "b": gptq_1(layer)})
    model.b.scales = model.b.scales[1:]
    with pytest.raises(ValueError, match=r"b: qzeros must be torch.int32 \[3, 3\]"):
        adopt_(model)
    assert type(model.a) is Theirs
    model.b = gptq_1(layer).to("meta")
    with pytest.raises(ValueError, match="b: its weight is on the meta device"):
        adopt_(model)


class Int8(Tensor):
    """torchao's IntxUnpackedToInt8Tensor and Int8Tensor, too."""

    qdata: Tensor
    scale: Tensor
    zero_point: Tensor | None
    activation_quantization: str | None


def int8_linear(layer: Layer) -> nn.Linear:
    theirs = nn.Linear(K, N, bias=False)
    theirs.weight = nn.Parameter(torch.zeros(N, K), requires_grad=False)
    theirs.weight.__class__ = Int8
    theirs.weight.qdata = (layer.codes - 8).to(torch.int8)
    theirs.weight.scale, theirs.weight.zero_point = layer.scales, (layer.zeros - 8).to(torch.int8)
    return theirs


def test_torchao_with_a_byte_for_each_code() -> None:
    """The bits are those that the codes take; without zeros they are 0."""
    layer = random_layer(N, K, 4, 64, dtype=torch.bfloat16)
    ours = adopted(int8_linear(layer))
    assert ours.format == "affine4_g64_f32" and torch.equal(ours.dequantize(), layer.weight())
    theirs = int8_linear(layer)
    theirs.weight.zero_point = None
    ours = adopted(theirs)
    assert ours.format == "affine4_g64_bf16"
    want = (layer.codes - 8) * layer.scales.float()[:, layer.groups]
    assert torch.equal(ours.dequantize(), want)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation_quantization", "int8_asym_per_token", "activation_quantization is set.*: a"),
        ("zero_point", torch.full((N, 4), 0.5), "zero_point must be of integers.*: a"),
    ],
)
def test_torchao_that_stays(name: str, value: Any, message: str) -> None:
    theirs = int8_linear(random_layer(N, K, 4, 64))
    setattr(theirs.weight, name, value)
    model = nn.ModuleDict({"a": theirs})
    with pytest.warns(UserWarning, match=message):
        adopt_(model)
    assert model.a is theirs
