"""The methods of quantization_config, and the tensors of their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import formats
from ..models.integers.affine import Rows
from ..models.integers.compressed import compressed_rows
from ..models.integers.gptq import awq_rows, gptq_rows
from ..models.integers.hqq import hqq_rows
from ..models.integers.torchao import torchao_rows
from .mxfp4 import put_experts
from .source import Source

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


@dataclass(frozen=True)
class Stacks:
    """How a checkpoint stores the experts it quantizes, and nothing else."""

    # (model, source, device) -> the names of the parameters that the model has then
    put: Callable[[Any, Source, torch.device | str], set[str]]
    leaves: tuple[str, ...] = ()


def method_of(quantization: Mapping[str, Any]) -> Method | Stacks:
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
    layouts = {key: quantization.get(key) for key in ("checkpoint_format", "format")}
    stated = {key: layout for key, layout in layouts.items() if layout}
    for key, layout in stated.items():
        _check(key, layout, "gptq", "gptq_v2")
    if len(set(stated.values())) > 1:
        raise ValueError(f"checkpoint_format and format disagree: {stated}")
    layout = next(iter(stated.values()), "gptq")
    _check("pack_dtype", quantization.get("pack_dtype") or "int32", "int32")
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
    stated = [_scheme(group.get("weights")) for group in groups.values()]
    return Method(tuple(f"weight_{leaf}" for leaf in leaves), _as_one_of(stated))


class _Scheme(NamedTuple):
    """The entry `weights` of a group of config_groups; None: not stated."""

    bits: int | None
    strategy: str | None
    group_size: int | None

    def fits(self, t: Mapping[str, Tensor], n: int, k: int) -> bool:
        """Whether a layer's tensors, which fit each other, have these sizes."""
        scales = t["weight_scale"]
        count = 1 if scales.numel() == 1 else scales.shape[1]
        sizes = {"group": self.group_size, "channel": k, "tensor": k}
        size = None if self.strategy is None else sizes[self.strategy]
        one = self.strategy != "tensor" or scales.numel() == 1
        bits = t["weight_packed"].shape[1] * 32 // k
        return self.bits in (None, bits) and size in (None, k // count) and one

    def pads(self, packed: Tensor, n: int, k: int) -> bool:
        """Whether no code straddles words, so that some bits of each are not used."""
        if self.bits is None or 32 % self.bits == 0:
            return False
        return tuple(packed.shape) == (n, -(-k // (32 // self.bits)))

    def __str__(self) -> str:
        size = f" of {self.group_size}" if self.strategy == "group" else ""
        return f"num_bits {self.bits}, strategy {self.strategy}{size}"


def _scheme(weights: Any) -> _Scheme:
    if not isinstance(weights, Mapping):
        raise ValueError(f"the weights of config_groups must be an object, got {weights!r}")
    _check("the type of weights", weights.get("type") or "int", "int")
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if bits is not None and (type(bits) is not int or not 1 <= bits <= 8):
        raise ValueError(f"num_bits must be an integer from 1 to 8, got {bits!r}")
    strategy = weights.get("strategy")
    if strategy is None and size is not None:  # as compressed-tensors completes it
        strategy = "channel" if size == -1 else "group"
    if strategy is not None:
        _check("strategy", strategy, "group", "channel", "tensor")
    if strategy == "group" and (type(size) is not int or size < 1):
        raise ValueError(f"strategy 'group' takes a positive integer group_size, got {size!r}")
    return _Scheme(bits, strategy, size)


def _as_one_of(stated: Sequence[_Scheme]) -> Pack:
    """compressed_rows of layers that have the sizes of one of the groups.

    Which group is a layer's, targets say by classes and patterns; the tensors suffice here.
    """

    def packed(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
        words = t["weight_packed"]
        if any(scheme.pads(words, n, k) for scheme in stated):
            raise ValueError(
                f"weight_packed {list(words.shape)} has padded words, as older releases of "
                "compressed-tensors wrote them; read here: codes without gaps"
            )
        rows = compressed_rows(t, n, k)
        if stated and not any(scheme.fits(t, n, k) for scheme in stated):
            bits, scales = words.shape[1] * 32 // k, list(t["weight_scale"].shape)
            said = " or ".join(map(str, stated))
            raise ValueError(
                f"the config says {said}; its tensors have {bits} bits, scales {scales}"
            )
        return rows

    return packed


def _pack_hqq(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    for key in ("quant_scale", "quant_zero"):
        if key in t and bool(t[key].any()):
            raise ValueError(f"{key} is set: scales and zeros that are codes are not read here")
    axis, packing = t.get("axis"), t.get("packing")
    if axis is None or axis.numel() != 1 or int(axis) != 1:
        given = None if axis is None else axis.flatten()[:4].tolist()
        raise ValueError(
            f"axis must be 1, got {given}: groups of other axes run across rows, affine ones do not"
        )
    if packing is None or packing.dtype != torch.uint8:
        dtype = None if packing is None else packing.dtype
        raise ValueError(f"packing must be a name as uint8 characters, got {dtype}")
    if "shape" in t and t["shape"].tolist() != [n, k]:
        raise ValueError(f"shape is {t['shape'].tolist()}, the layer is [{n}, {k}]")
    name = "".join(map(chr, packing.flatten().tolist()))
    return hqq_rows(t, n, k, name)


def _torchao(quantization: Mapping[str, Any]) -> Method:
    if "Activation" in str(quantization.get("quant_type")):
        raise ValueError(
            f"quant_type is {quantization['quant_type']!r}, which quantizes activations too; "
            "read here: types that quantize weights alone"
        )
    leaves = ("qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale")
    return Method(tuple(f"_weight_{leaf}" for leaf in leaves), _pack_torchao)


def _pack_torchao(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    return torchao_rows({name.removeprefix("_weight_"): v for name, v in t.items()}, n, k)


METHODS: dict[str, Callable[[Mapping[str, Any]], Method | Stacks]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "hqq": lambda _: Method(_HQQ_LEAVES, _pack_hqq),
    "torchao": _torchao,
    "mxfp4": lambda _: Stacks(put_experts),
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
