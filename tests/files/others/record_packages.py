"""Makes decoded_by_packages.safetensors: random layers, and W as the libraries decode them.

    PYTHONPATH=<hqq's source> python tests/files/others/record_packages.py <folder of the packages>

By hand, on a CPU, with the unpacked wheels of auto-gptq 0.7.1, autoawq 0.2.7.post3,
compressed-tensors 0.20.0 and torchao 0.18.0, the source of hqq 0.2.8, and what they import (loguru,
termcolor). Where only their decoding is run, qweight and the like are random words. The zeros of
GPTQ leave out the field of all ones, which the kernels of AutoGPTQ read differently.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

N, K, GROUP = 32, 64, 32
OUT = Path(__file__).with_name("decoded_by_packages.safetensors")
_random = torch.Generator().manual_seed(0)


def load(file: Path) -> Any:
    """One file of a package; the packages themselves import what is not needed here."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(*shape: int) -> Tensor:
    bits = torch.randint(-(2**31), 2**31, shape, generator=_random, dtype=torch.int64)
    return bits.to(torch.int32)


def scales(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.rand(*shape, generator=_random).mul(0.01).to(dtype)


def zeros_below_all_ones(bits: int) -> Tensor:
    """int32 words [K / GROUP, N * bits / 32] of codes below 2**bits - 1."""
    codes = torch.randint(0, 2**bits - 1, (K // GROUP, N), generator=_random)
    out = torch.zeros(K // GROUP, N * bits, dtype=torch.uint8)  # a bit each
    for bit in range(bits):
        out[:, bit::bits] = (codes >> bit) & 1
    weights = 2 ** torch.arange(8, dtype=torch.uint8)
    octets = (out.reshape(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return octets.view(torch.int32).reshape(K // GROUP, -1)


def gptq(root: Path, bits: int) -> dict[str, Tensor]:
    layer = load(root / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py").QuantLinear
    made = layer(bits, GROUP, K, N, False)
    groups = torch.arange(K) // GROUP
    made.qweight, made.qzeros = words(K * bits // 32, N), zeros_below_all_ones(bits)
    made.scales = scales(K // GROUP, N)
    made.g_idx = groups[torch.randperm(K, generator=_random)].to(torch.int32)
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {name: getattr(made, name).clone() for name in names}
    return tensors | {"W": made(torch.eye(K).half()).t()}


def awq(root: Path) -> dict[str, Tensor]:
    decode = load(root / "awq/utils/packing_utils.py").dequantize_gemm
    t = {
        "qweight": words(K, N // 8),
        "qzeros": words(K // GROUP, N // 8),
        "scales": scales(K // GROUP, N),
    }
    return t | {"W": decode(t["qweight"], t["qzeros"], t["scales"], 4, GROUP).t()}


def compressed(bits: int, symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=GROUP
    )
    t = {
        "weight_packed": words(N, K * bits // 32),
        "weight_scale": scales(N, K // GROUP, dtype=dtype),
        "weight_shape": torch.tensor([N, K]),
    }
    if not symmetric:
        t["weight_zero_point"] = words(N * bits // 32, K // GROUP)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return t | {"W": PackedQuantizationCompressor.decompress(dict(t), scheme)["weight"]}


def hqq(bits: int) -> dict[str, Tensor]:
    """Scales and zeros are f16 numbers, decoded in f32: HQQ rounds nothing else then."""
    from hqq.core.quantize import Quantizer

    w = torch.randn(N, K, generator=_random) / 50
    codes, meta = Quantizer.quantize(
        w, nbits=bits, group_size=GROUP, axis=1, optimize=False, device="cpu"
    )
    for name in ("scale", "zero"):
        meta[name] = meta[name].half()
    exact = {name: meta[name].float() for name in ("scale", "zero")}
    decoded = Quantizer.dequantize(codes, meta | exact | {"compute_dtype": torch.float32})
    packing = torch.tensor([ord(c) for c in meta["packing"]], dtype=torch.uint8)
    t = {name: meta[name] for name in ("scale", "zero")}
    return t | {"W_q": codes, "packing": packing, "axis": torch.tensor(1), "W": decoded}


def torchao(bits: int, symmetric: bool) -> dict[str, Tensor]:
    """A byte for each code; Int4Tensor is not decoded on a CPU."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    layer = torch.nn.Linear(K, N, bias=False, dtype=torch.bfloat16)
    layer.weight.data = (torch.rand(N, K, generator=_random) - 0.3).bfloat16()
    mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
    kind = getattr(torch, f"int{bits}")
    quantize_(layer, IntxWeightOnlyConfig(kind, PerGroup(GROUP), mapping))
    held = {name: getattr(layer.weight, name) for name in ("qdata", "scale", "zero_point")}
    t = {f"_weight_{name}": tensor for name, tensor in held.items()}
    return t | {"W": layer.weight.dequantize()}


def main() -> None:
    root = Path(sys.argv[1])
    sys.path.insert(0, str(root))
    layers = {f"gptq {bits}": gptq(root, bits) for bits in (2, 3, 4, 8)} | {"awq 4": awq(root)}
    for bits in (3, 4, 8):
        f16, bf16 = torch.float16, torch.bfloat16
        layers[f"compressed-tensors {bits} symmetric"] = compressed(bits, True, bf16)
        layers[f"compressed-tensors {bits}"] = compressed(bits, False, f16)
    layers |= {f"hqq {bits}": hqq(bits) for bits in (1, 2, 3, 4, 5, 8)}
    layers |= {f"torchao {bits}": torchao(bits, False) for bits in (3, 4, 8)}
    layers["torchao 4 symmetric"] = torchao(4, True)
    named = {f"{layer}/{name}": t for layer, ts in layers.items() for name, t in ts.items()}
    save_file({name: t.contiguous() for name, t in named.items()}, OUT)


if __name__ == "__main__":
    main()
