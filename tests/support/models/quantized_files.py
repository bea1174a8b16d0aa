"""Folders of small random models in the layouts of other libraries, written as these publish them.

The packings are written out code by code, as the libraries' own packers do; nothing here uses the
package. Each layer also has the W that its codes mean, in f32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hf_models import change_config, random_model
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]


@dataclass
class Layer:
    """w[n, k] = scales[n, g] (codes[n, k] - zeros[n, g]), g being the group of column k."""

    codes: Tensor  # int64 [N, K], unsigned
    scales: Tensor  # [N, G]
    zeros: Tensor  # f32 [N, G]
    groups: Tensor  # int64 [K]
    bits: int

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W in arithmetic of that dtype, as the libraries decode it."""
        codes, zeros = self.codes.to(dtype), self.zeros.to(dtype)[:, self.groups]
        return (codes - zeros) * self.scales.to(dtype)[:, self.groups]


def random_layer(
    n: int,
    k: int,
    bits: int,
    group: int,
    *,
    dtype: torch.dtype = torch.float16,
    symmetric: bool = False,
    shuffled: bool = False,
    fractions: bool = False,
) -> Layer:
    """A layer of random codes, the same for the same arguments.

    symmetric: every zero is 2**(bits - 1); shuffled: columns of a group lie anywhere (act-order);
    fractions: zeros are no integers.
    """
    g = torch.Generator().manual_seed(n * k + bits)
    group = k if group == -1 else group
    count = k // group
    codes = torch.randint(0, 2**bits, (n, k), generator=g)
    scales = (torch.rand(n, count, generator=g) + 0.5).mul(2.0 ** (-2 - bits)).to(dtype)
    zeros = torch.randint(1, 2**bits, (n, count), generator=g).float()
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    if fractions:
        zeros = (zeros - torch.rand(n, count, generator=g)).to(dtype).float()
    groups = torch.arange(k) // group
    if shuffled:
        groups = groups[torch.randperm(k, generator=g)]
    return Layer(codes, scales, zeros, groups, bits)


def words(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes -> int32 words, code i at bit i * bits of the row, low bits first."""
    rows, count = codes.shape
    out = np.zeros((rows, -(-count * bits // 32)), dtype=np.uint64)
    values = codes.numpy().astype(np.uint64)
    for i in range(count):
        word, shift = divmod(i * bits, 32)
        out[:, word] |= (values[:, i] << np.uint64(shift)) & np.uint64(0xFFFFFFFF)
        if shift + bits > 32:
            out[:, word + 1] |= values[:, i] >> np.uint64(32 - shift)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def gptq(layer: Layer, version: int) -> Tensors:
    """As GPTQModel writes version 1: 1 for each code, subtracted from words of 2, 4 and 8 bits."""
    bits, zeros = layer.bits, layer.zeros.t().long()
    if version == 1 and bits == 3:
        zeros = (zeros - 1) % 8
    qzeros = words(zeros, bits)
    if version == 1 and bits != 3:
        ones = sum(1 << at for at in range(0, 32, bits))
        qzeros = torch.from_numpy((qzeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    return {
        "qweight": words(layer.codes, bits).t().contiguous(),
        "qzeros": qzeros,
        "scales": layer.scales.t().contiguous(),
        "g_idx": layer.groups.to(torch.int32),
    }


def awq(layer: Layer) -> Tensors:
    """AutoAWQ's gemm: nibble i of a word is column (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""

    def packed(values: Tensor) -> Tensor:
        eights = values.long().reshape(len(values), -1, 8)
        return words(eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(len(values), -1), 4)

    scales = layer.scales.t().contiguous()
    return {"qweight": packed(layer.codes.t()), "qzeros": packed(layer.zeros.t()), "scales": scales}


def compressed(layer: Layer) -> Tensors:
    n, k = layer.codes.shape
    made = {
        "weight_packed": words(layer.codes, layer.bits),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if not bool((layer.zeros == 2 ** (layer.bits - 1)).all()):
        made["weight_zero_point"] = words(layer.zeros.t().long(), layer.bits).t().contiguous()
    if not bool((layer.groups.diff() >= 0).all()):
        made["weight_g_idx"] = layer.groups.to(torch.int32)
    return made


_HQQ = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 3: ("3bit_32", 10), 2: ("2bit_u8", 4)}


def hqq(layer: Layer) -> Tensors:
    """state_dict() of HQQLinear: word r has the groups r, r + step, ..., the first highest."""
    n, k = layer.codes.shape
    name, count = _HQQ[layer.bits]
    groups = layer.codes.reshape(-1, k // layer.scales.shape[1])
    step = -(-len(groups) // count)
    rows = torch.zeros(step * count, groups.shape[1], dtype=torch.int64)
    rows[: len(groups)] = groups
    packed = torch.zeros(step, groups.shape[1], dtype=torch.int64)
    for i in range(count):
        packed |= rows[i * step : (i + 1) * step] << (layer.bits * (count - 1 - i))
    return {
        "W_q": packed.to(torch.int32 if layer.bits == 3 else torch.uint8),
        "scale": layer.scales.reshape(-1, 1),
        "zero": layer.zeros.to(layer.scales.dtype).reshape(-1, 1),
        "shape": torch.tensor([n, k]),
        "axis": torch.tensor(1, dtype=torch.int32),
        "nbits": torch.tensor(layer.bits, dtype=torch.int32),
        "packing": torch.tensor([ord(c) for c in name], dtype=torch.uint8),
        "quant_zero": torch.tensor(0, dtype=torch.uint8),
        "stores_quant_config": torch.tensor(1, dtype=torch.uint8),
    }


def torchao(layer: Layer) -> Tensors:
    """Int4Tensor: w = scale q + zero_point, q = code - 8 in nibbles, those of even columns low."""
    q = (layer.codes - 8) & 15
    return {
        "_weight_qdata": (q[:, ::2] | (q[:, 1::2] << 4)).to(torch.uint8),
        "_weight_scale": layer.scales.t().contiguous(),
        "_weight_zero_point": layer.zeros.to(layer.scales.dtype).t().contiguous(),
    }


@dataclass(frozen=True)
class Layout:
    """A layout as a folder has it: its config, and the tensors of a layer."""

    config: dict[str, Any]
    tensors: Callable[[Layer], Tensors]


def _group(weights: dict[str, Any]) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}


def layouts(bits: int, group: int) -> dict[str, Layout]:
    """Each method, as its library writes the config."""
    sizes = {"bits": bits, "group_size": group}
    v1 = {"quant_method": "gptq", "desc_act": True, "sym": False} | sizes
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group}
    return {
        "gptq": Layout(v1, lambda layer: gptq(layer, 1)),
        "gptq_v2": Layout(v1 | {"checkpoint_format": "gptq_v2"}, lambda layer: gptq(layer, 2)),
        "awq": Layout({"quant_method": "awq", "version": "gemm", "zero_point": True} | sizes, awq),
        "compressed-tensors": Layout(
            {"quant_method": "compressed-tensors", "format": "pack-quantized"}
            | {"config_groups": _group(weights), "ignore": ["lm_head"]},
            compressed,
        ),
        "hqq": Layout({"quant_method": "hqq", "quant_config": {}, "skip_modules": []}, hqq),
        "torchao": Layout(
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
            },
            torchao,
        ),
    }


def write(folder: Path, layout: Layout, bits: int, group: int, **options: Any) -> Any:
    """A llama's folder, all but embeddings and head quantized; its dense model, in f32.

    options as random_layer has them, and `weight`: what a Layer means, where it is not weight().
    """
    weight = options.pop("weight", Layer.weight)
    model = random_model("llama", num_hidden_layers=1)
    tensors = {name: t.clone() for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layer = random_layer(*module.weight.shape, bits, group, **options)
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{leaf}": t for leaf, t in layout.tensors(layer).items()}
            module.weight.data = weight(layer)
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    change_config(folder, quantization_config=layout.config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model
