"""Layers with a packed weight: the weight, its format, and what may be set as weight."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import formats
from .. import ops as ops  # registers torch.ops.metalmm
from ..formats._bits import as_bytes


class PackedState(nn.Module):
    """The base of layers whose packed parameters state_dict holds as they are.

    The names of their formats travel in the state_dict's metadata, so torch.save keeps them and
    loading into another format is an error.
    """

    def packed(self) -> dict[str, tuple[str, int]]:
        """{name of a packed parameter: (its format, K)}."""
        raise NotImplementedError

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            named = {leaf: format for leaf, (format, _) in self.packed().items()}
            metadata.setdefault(prefix[:-1], {})["formats"] = named

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *rest: Any,
    ) -> None:
        stored = local_metadata.get("formats", {})
        for leaf, (format, k) in self.packed().items():
            given, wrong = state_dict.get(prefix + leaf), ""
            if given is None:
                continue
            want = self.get_parameter(leaf).shape
            if stored.get(leaf, format) != format:
                wrong = f"is stored as {stored[leaf]}, this layer holds {format}"
            elif given.dtype != torch.uint8 or given.shape != want:
                wrong = (
                    f"must be uint8 {list(want)} ({format}, K = {k}), "
                    f"got {given.dtype} {list(given.shape)}"
                )
            if wrong:
                rest[-1].append(f"{prefix}{leaf} {wrong}")  # error_msgs
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Packed(PackedState):
    """The base of QuantLinear and QuantEmbedding."""

    format: str
    weight: Tensor  # a frozen uint8 Parameter

    def _init_packed(self, n: int, k: int, format: str, device: torch.device | str | None) -> None:
        spec = formats.get(format)
        self.format = spec.name
        packed = torch.empty(n, spec.row_bytes(k), dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def _columns(self) -> int:
        raise NotImplementedError

    def packed(self) -> dict[str, tuple[str, int]]:
        return {"weight": (self.format, self._columns())}

    def reset_parameters(self) -> None:
        """Does nothing: packed bytes are loaded, never drawn at random."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """ValueError: weight is not of this layer's packed bytes, or is to be made of others.

        torch's pruning and weight norms make it of weight_orig, weight_g and the like.
        """
        if name.startswith(("weight_", "bias_")):
            raise ValueError(f"{name}: {self._is_packed()}, from which {name} cannot be made")
        if name == "weight" and param is not None:
            row = formats.get(self.format).row_bytes(self._columns())
            wrapped = is_traceable_wrapper_subclass(param) and not hasattr(param, "device_mesh")
            if wrapped or param.dtype != torch.uint8 or param.shape[1:] != (row,):
                kind = type(param).__name__ if wrapped else param.dtype
                raise ValueError(
                    f"weight: {self._is_packed()}, uint8 [N, {row}]; got {kind} "
                    f"{list(param.shape)}. Replace the layer by a dense one with dequantize()"
                )
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in ("weight", "bias"):
            raise ValueError(
                f"{name}: {self._is_packed()}; its {name} cannot be parametrized or removed. "
                "Replace the layer by a dense one with dequantize()"
            )
        super().__delattr__(name)

    def _is_packed(self) -> str:
        return f"the {type(self).__name__} is packed in {self.format}"

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """W [N, K] as a new dense tensor of `dtype` (default float32)."""
        return torch.ops.metalmm.dequantize(self.weight, self.format, self._columns(), dtype=dtype)


def check_packed(weight: Tensor, k: int, format: str) -> tuple[formats.Format, nn.Parameter]:
    """The format and the weight as a frozen uint8 parameter; a uint8 Parameter is kept itself."""
    spec = formats.get(format)
    dense = getattr(spec, "dtype", None)
    if dense is not None and weight.dtype == dense and weight.dim() == 2 and weight.shape[1] == k:
        weight = as_bytes(weight.detach())
    row_bytes = spec.row_bytes(k)
    if weight.dtype != torch.uint8 or weight.dim() != 2 or weight.shape[1] != row_bytes:
        raise ValueError(
            f"weight must be uint8 [N, {row_bytes}] ({spec.name}, K = {k}), "
            f"got {weight.dtype} {list(weight.shape)}"
        )
    if isinstance(weight, nn.Parameter):
        return spec, weight
    return spec, nn.Parameter(weight, requires_grad=False)


def packed_as(layer: Any, format: str) -> Tensor:
    """The weight of a layer, dense or packed, in the format: the packed one itself if it has it."""
    if isinstance(layer, Packed) and layer.format == format:
        return layer.weight
    dense = layer.dequantize() if isinstance(layer, Packed) else layer.weight
    return quantize_weight(dense, format)


def quantize_weight(
    weight: Tensor, format: str, importance: Tensor | None = None, name: str = "w"
) -> Tensor:
    """weight [N, K] -> uint8 [N, row_bytes] on the weight's device. The quantizers run on the CPU.

    importance: f32 [K] on the CPU, as torch.ops.metalmm.quantize takes it.
    ValueError, which calls it `name`: the weight has no data (meta), is not 2-D, has NaN or Inf, or
    a value too large for the format.
    """
    if weight.is_meta:
        raise ValueError("the weight is on the meta device and has no data to quantize")
    source = weight.detach().to("cpu")
    if source.dtype == torch.float64:
        source = source.float()
    try:
        packed: Tensor = torch.ops.metalmm.quantize(source, format, importance)
    except ValueError as error:
        raise ValueError(re.sub("^w:", f"{name}:", str(error))) from None
    _check_range(source, packed, format, name)
    return packed.to(weight.device)


def _check_range(weight: Tensor, packed: Tensor, format: str, name: str) -> None:
    """ValueError: a row is not what its bytes hold. The op stores such rows as ggml does.

    A value beyond the scales of the format, f16 in most, becomes infinite, from 1e18 on perhaps
    small. No format fails up to the largest f16, so that other weights cost one look at them.
    """
    most = torch.finfo(torch.float16).max
    if weight.numel() == 0 or max(abs(float(v)) for v in torch.aminmax(weight)) <= most:
        return
    for row, values in enumerate(weight):
        largest = float(values[values.abs().argmax()])
        if abs(largest) <= most:
            continue
        held = float(torch.ops.metalmm.dequantize(packed[row : row + 1], format).abs().max())
        if not (isfinite(held) and held >= abs(largest) / 2):
            raise ValueError(f"{name}: row {row} has {largest:g}, too large for {format}")
