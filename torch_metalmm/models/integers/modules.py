"""The layers in memory that hold integers with scales, known by their tensors and not by class."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import formats
from .affine import NoFormat, Rows
from .compressed import compressed_rows
from .gptq import awq_rows, gptq_rows
from .hqq import hqq_rows
from .torchao import torchao_rows

_PROBES = 8
# A library rounds q - zero and w, to bf16 at worst, and a result once more.
_ROUNDINGS = 3 * 2.0**-8


class Packable(NamedTuple):
    """A layer of K inputs, and what packs it (ValueError as the functions of its layout)."""

    k: int
    pack: Callable[[], Rows]


def integer_rows(module: Any) -> Packable | None:
    """The packing of a layer of integers; None: it is none. NoFormat: its layout is unknown."""
    t = {**module._parameters, **module._buffers}
    t = {name: tensor for name, tensor in t.items() if tensor is not None}
    meta = getattr(module, "meta", None)
    if isinstance(meta, dict) and isinstance(getattr(module, "W_q", None), Tensor):
        return _hqq(module.W_q, meta)
    weight = t.get("weight")
    if weight is not None and (parts := _torchao(weight)) is not None:
        return _of_size(module, partial(torchao_rows, parts))
    if "weight_packed" in t:
        return _of_size(module, partial(_compressed, module, t))
    if {"qweight", "qzeros", "scales"} <= t.keys():
        return _of_size(module, partial(_words, module, t))
    return None


def check_computes(module: Any, rows: Rows, k: int) -> None:
    """NoFormat: the layer computes with other weights, or does not run here.

    Some kernels shuffle the codes in place, which no shape tells. Columns are read by x of one 1.
    """
    columns = torch.linspace(0, k - 1, _PROBES, device=rows.weight.device).long()
    w: Tensor = torch.ops.metalmm.dequantize(rows.weight, rows.format, k)
    order = torch.arange(k, device=w.device) if rows.input_order is None else rows.input_order
    spec = formats.get(rows.format)
    assert isinstance(spec, formats.Affine)
    bias = getattr(module, "bias", None)
    offset = torch.zeros(w.shape[0], device=w.device) if bias is None else bias.detach().float()
    want = w[:, order.argsort()[columns]].t() + offset
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.zeros(_PROBES, k, dtype=dtype, device=w.device)
        x[torch.arange(_PROBES), columns] = 1
        try:
            with torch.no_grad():
                y = module(x).float()
        except Exception:  # other code, on a device or dtype that it may not have
            continue
        # Subnormal numbers are rounded by half the smallest one: the scale, |q - zero| times, w, y.
        least = max(_smallest(dtype), _smallest(module.scales.dtype))
        slack = _ROUNDINGS * (want.abs() + 2 * offset.abs()) + (2**spec.bits + 2) * least / 2
        if bool(((y - want).abs() <= slack).all()):
            return
        raise NoFormat("it computes with other weights than its tensors say in their layout")
    raise NoFormat("it does not run here, so that the layout of its codes cannot be confirmed")


def _smallest(dtype: torch.dtype) -> float:
    """The smallest subnormal number."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def _compressed(module: Any, t: dict[str, Tensor], n: int, k: int) -> Rows:
    weights = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    bits, packed = getattr(weights, "num_bits", None), t["weight_packed"]
    if isinstance(bits, int) and tuple(packed.shape) != (n, k * bits // 32):
        raise NoFormat(
            f"weight_packed {list(packed.shape)} has not {bits} bits a code without gaps"
        )
    return compressed_rows(t, n, k)


def _words(module: Any, t: dict[str, Tensor], n: int, k: int) -> Rows:
    """GPTQ's or AWQ's words, told apart by their shapes: libraries share names and attributes."""
    qweight, scales = t["qweight"], t["scales"]
    if getattr(module, "planar", False):
        raise NoFormat("its codes are in planes, GPTQModel's gptq_p, which is not read here")
    if qweight.dtype == torch.int32 and scales.dim() == 2 and scales.shape[1] == n:
        if tuple(qweight.shape) == (k, n // 8):
            return awq_rows(t, n, k)
        if qweight.dim() == 2 and qweight.shape[1] == n:
            version = getattr(module, "qzero_format", lambda: 1)()  # GPTQModel makes 2 of 1
            return gptq_rows(t, n, k, stored_minus_one=version == 1)
    raise NoFormat("its qweight has the shape of neither GPTQ's nor AWQ's gemm")


def _torchao(weight: Tensor) -> dict[str, Tensor] | None:
    """The tensors that a weight of torchao holds; None: it is none, or one of floats."""
    names = ("qdata", "scale", "zero_point", "act_pre_scale")
    parts = {name: getattr(weight, name, None) for name in names}
    held = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    if not {"qdata", "scale"} <= held.keys():
        return None
    qdata = held["qdata"]
    a_byte_each = qdata.dtype == torch.int8 and qdata.shape == weight.shape
    if qdata.dtype not in (torch.uint8, torch.int8) or not ("zero_point" in held or a_byte_each):
        return None
    for name in ("activation_quantization", "act_quant_kwargs"):
        if getattr(weight, name, None) is not None:
            raise NoFormat(f"{name} is set: activations are quantized too, which is not done here")
    return held


def _of_size(module: Any, pack: Callable[[int, int], Rows]) -> Packable | None:
    for names in (("out_features", "in_features"), ("outfeatures", "infeatures")):
        n, k = (getattr(module, name, None) for name in names)
        if isinstance(n, int) and isinstance(k, int):
            return Packable(k, partial(pack, n, k))
    return None


def _hqq(codes: Tensor, meta: dict[str, Any]) -> Packable:
    shape = meta.get("shape")
    if not isinstance(shape, tuple | list) or len(shape) != 2:
        raise NoFormat(f"meta of HQQ has the shape {shape!r}, not that of a matrix")
    n, k = shape

    def pack() -> Rows:
        if meta.get("axis") != 1 or meta.get("quant_scale") or meta.get("quant_zero"):
            raise NoFormat("HQQ is read with axis 1, and with scales and zeros that are floats")
        tensors = {name: meta[name] for name in ("scale", "zero") if name in meta}
        return hqq_rows(tensors | {"W_q": codes.detach()}, n, k, str(meta.get("packing")))

    return Packable(k, pack)
