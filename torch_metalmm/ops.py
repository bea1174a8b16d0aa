"""torch.ops.metalmm: importing this module registers the ops and their fake implementations.

The kernels, autograd and autocast are native. A fake returns what the op would: same shape, dtype
and strides, same errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor

from . import _C, formats  # noqa: F401  (importing _C registers the ops)

_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def _fake(op: str) -> Callable[[_Function], _Function]:
    """torch.library.register_fake for an op of ours, typed."""
    return cast(Callable[[_Function], _Function], torch.library.register_fake(f"metalmm::{op}"))


_ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)
_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def _check_weight(name: str, weight: Tensor, format: str, k: int) -> int:
    """N of a packed weight; ValueError if its dtype or row size does not fit format and k."""
    f = formats.get(format)
    dense = weight.dtype != torch.uint8 and _DENSE.get(f.name) == weight.dtype
    if weight.dim() != 2 or not (dense or weight.dtype == torch.uint8):
        raise ValueError(
            f"{name}: {weight.dtype} {list(weight.shape)}; must be uint8 [N, row_bytes]"
        )
    want = k if dense else f.row_bytes(k)
    if weight.shape[1] != want:
        raise ValueError(
            f"{name}: shape {list(weight.shape)}; a row of {k} values in {f.name} has {want} bytes"
        )
    return weight.shape[0]


def _check_activations(name: str, x: Tensor) -> None:
    if x.dtype not in _ACTIVATIONS:
        raise ValueError(f"{name}: dtype {x.dtype}; allowed: float32, float16, bfloat16")


def _in_features(weight: Tensor, format: str, in_features: int | None) -> int:
    if in_features is not None:
        return in_features
    f = formats.get(format)
    if weight.dtype != torch.uint8:
        return weight.shape[1]
    return weight.shape[1] // f.block_bytes * f.block_values


@_fake("linear")
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, strategy: str | None = None
) -> Tensor:
    _check_activations("x", x)
    n = _check_weight("weight", weight, format, x.shape[-1])
    return x.new_empty((*x.shape[:-1], n))


@_fake("linear_input_grad")
def _linear_input_grad(grad: Tensor, weight: Tensor, format: str, in_features: int) -> Tensor:
    _check_weight("weight", weight, format, in_features)
    return grad.new_empty((*grad.shape[:-1], in_features))


@_fake("swiglu")
def _swiglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, format_gate: str, format_up: str
) -> Tensor:
    _check_activations("x", x)
    n = _check_weight("gate_weight", gate_weight, format_gate, x.shape[-1])
    _check_weight("up_weight", up_weight, format_up, x.shape[-1])
    return x.new_empty((*x.shape[:-1], n))


@_fake("swiglu_linear")
def _swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, format: str
) -> Tensor:
    _check_activations("gate", gate)
    n = _check_weight("weight", weight, format, gate.shape[-1])
    return gate.new_empty((*gate.shape[:-1], n))


@_fake("gemv")
@_fake("gemm")
def _scaled(
    x: Tensor,
    weight: Tensor,
    format: str,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    strategy: str | None = None,
) -> Tensor:
    return _linear(x, weight, None, format)


@_fake("dequantize")
def _dequantize(
    weight: Tensor,
    format: str,
    in_features: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    k = _in_features(weight, format, in_features)
    n = _check_weight("weight", weight, format, k)
    return weight.new_empty((n, k), dtype=dtype or torch.float32)


@_fake("quantize")
def _quantize(w: Tensor, format: str) -> Tensor:
    _check_activations("w", w)
    return w.new_empty((w.shape[0], formats.get(format).row_bytes(w.shape[1])), dtype=torch.uint8)


@_fake("embedding")
def _embedding(
    ids: Tensor,
    weight: Tensor,
    format: str,
    in_features: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    k = _in_features(weight, format, in_features)
    _check_weight("weight", weight, format, k)
    return weight.new_empty((*ids.shape, k), dtype=dtype or torch.float32)
