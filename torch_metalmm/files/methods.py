"""The methods of quantization_config whose weights are integers with scales, and their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import formats
from ..models.integers.affine import Rows
from ..models.integers.compressed import compressed_rows
from ..models.integers.gptq import awq_rows, gptq_rows
from ..models.integers.hqq import hqq_rows
from ..models.integers.torchao import torchao_rows

# (tensors of a layer by their last names, N, K) -> packed rows. ValueError: they do not fit.
Pack = Callable[[Mapping[str, Tensor], int, int], Rows]

_GPTQ_LEAVES = ("qweight", "qzeros", "scales", "g_idx")
# Besides the first three, state_dict() of HQQLinear has its arguments, each as a tensor.
_HQQ_LEAVES = (
    *("W_q", "scale", "zero", "packing", "axis", "nbits", "group_size", "shape", "channel_wise"),
    *("unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype"),
    *("offload_meta", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero"),
)


@dataclass(frozen=True)
class Method:
    """How a checkpoint stores the layers it quantizes: tensors <layer>.<leaf>."""

    leaves: tuple[str, ...]  # the first is that of each quantized layer
    pack: Pack


def method_of(quantization: Mapping[str, Any]) -> Method:
    """The method of a quantization_config. ValueError: there is no such one here."""
    name = quantization.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            f"it is quantized by {name!r}, which has no format here; load_quantized reads "
            f"{', '.join(METHODS)}. Load the model with transformers, dequantize it, and pack it "
            "with quantize_"
        )
    return METHODS[name](quantization)


def _gptq(quantization: Mapping[str, Any]) -> Method:
    layout = quantization.get("checkpoint_format") or "gptq"
    _check("checkpoint_format", layout, "gptq", "gptq_v2")
    _check("is_marlin_format", quantization.get("is_marlin_format") or False, False)
    pack = partial(gptq_rows, stored_minus_one=layout == "gptq")
    return Method(_GPTQ_LEAVES, _as_stated(quantization, pack))


def _awq(quantization: Mapping[str, Any]) -> Method:
    for key in ("version", "format", "checkpoint_format"):
        _check(key, str(quantization.get(key) or "gemm").lower(), "gemm")
    if quantization.get("backend") == "llm-awq":
        raise ValueError("backend is 'llm-awq', whose layout is not known here")
    return Method(_GPTQ_LEAVES[:3], _as_stated(quantization, awq_rows))


def _compressed(quantization: Mapping[str, Any]) -> Method:
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(g, Mapping) for g in groups.values()):
        raise ValueError(f"config_groups must be an object of objects, got {groups!r}")
    stated = quantization.get("format")
    for layout in [group.get("format") or stated for group in groups.values()] or [stated]:
        _check("format", layout, "pack-quantized")
    for group in groups.values():
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise ValueError(f"{key} are quantized too, which is not done here")
    if (quantization.get("transform_config") or {}).get("config_groups"):
        raise ValueError("transform_config rotates activations, which is not done here")
    sparse = (quantization.get("sparsity_config") or {}).get("format", "dense")
    _check("the format of sparsity_config", sparse, "dense")
    leaves = ("packed", "scale", "zero_point", "shape", "g_idx")
    return Method(tuple(f"weight_{leaf}" for leaf in leaves), compressed_rows)


def _hqq(quantization: Mapping[str, Any]) -> Method:
    return Method(_HQQ_LEAVES, _pack_hqq)


def _pack_hqq(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    for key in ("quant_scale", "quant_zero"):
        if key in t and bool(t[key].any()):
            raise ValueError(f"{key} is set: scales and zeros that are codes are not read here")
    if "axis" not in t or t["axis"].numel() != 1 or int(t["axis"]) != 1:
        raise ValueError("axis must be 1: groups of other axes run across rows, affine ones do not")
    if "packing" not in t or t["packing"].dtype != torch.uint8:
        raise ValueError("packing must be a name as uint8 characters")
    if "shape" in t and t["shape"].tolist() != [n, k]:
        raise ValueError(f"shape is {t['shape'].tolist()}, the layer is [{n}, {k}]")
    name = "".join(map(chr, t["packing"].flatten().tolist()))
    return hqq_rows(t, n, k, name)


def _torchao(quantization: Mapping[str, Any]) -> Method:
    if "Activation" in str(quantization.get("quant_type")):
        raise ValueError("quant_type quantizes activations too, which is not done here")
    leaves = ("qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale")
    return Method(tuple(f"_weight_{leaf}" for leaf in leaves), _pack_torchao)


def _pack_torchao(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    return torchao_rows({name.removeprefix("_weight_"): v for name, v in t.items()}, n, k)


METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "hqq": _hqq,
    "torchao": _torchao,
}


def _check(key: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"{key} is {value!r}; read here: {', '.join(map(repr, allowed))}")


def _as_stated(quantization: Mapping[str, Any], pack: Pack) -> Pack:
    """pack, after which bits and group_size of the config are compared with the tensors.

    GPTQModel's `dynamic` gives single layers other sizes; then the tensors alone count.
    """
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if quantization.get("dynamic"):
        return pack

    def packed(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
        rows = pack(t, n, k)
        spec = formats.get(rows.format)
        assert isinstance(spec, formats.Affine)
        shown = {"bits": spec.bits, "group_size": k // t["scales"].shape[0]}
        stated = {"bits": bits, "group_size": k if group == -1 else group}
        for key, value in stated.items():
            if value is not None and value != shown[key]:
                raise ValueError(f"the config says {key} {value!r}, its tensors have {shown[key]}")
        return rows

    return packed
