"""torch.ops.metalmm: importing this module registers the ops and their fake implementations.

The kernels, autograd and autocast are native. A fake returns what the op would: same shape, dtype
and strides, same errors. It also runs for meta tensors, and where only some arguments are: that
is an error, not a result without data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from . import _C, formats

_native: Any = _C  # whose import registers the ops; mypy does not see into it
_Function = TypeVar("_Function", bound=Callable[..., Tensor])


def _fake(op: str) -> Callable[[_Function], _Function]:
    """torch.library.register_fake for an op of ours, typed."""
    return cast(Callable[[_Function], _Function], torch.library.register_fake(f"metalmm::{op}"))


_ACTIVATIONS = (torch.float32, torch.float16, torch.bfloat16)
_ALLOWED = "allowed: float32, float16, bfloat16"
_DENSE = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PROBES = ("add", "sub", "mul", "div", "dot")


def _check_device(name: str, t: Tensor, x: Tensor) -> None:
    if t.device != x.device:
        raise ValueError(
            f"{name}: is on {t.device}, the activations on {x.device}; "
            "all tensors of a call must be on one device"
        )


def _check_k(name: str, format: str, k: int) -> formats.Format:
    f = formats.get(format)
    if k < 0 or k % f.block_values:
        raise ValueError(
            f"{name}: K = {k} is not a multiple of the block of {f.name}, {f.block_values} values"
        )
    return f


def _check_weight(name: str, weight: Tensor, format: str, k: int, x: Tensor) -> int:
    """N of a packed weight; ValueError if its dtype, row size or device does not fit."""
    f = _check_k(name, format, k)
    _check_device(name, weight, x)
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


def _check_activations(name: str, x: Tensor) -> int:
    """K, the last size of x."""
    if x.dtype not in _ACTIVATIONS:
        raise ValueError(f"{name}: dtype {x.dtype}; {_ALLOWED}")
    if x.dim() < 1:
        raise ValueError(f"{name}: must have at least one dimension, [..., K]")
    return x.shape[-1]


def _check_addend(name: str, t: Tensor | None, shape: tuple[int, ...], x: Tensor) -> None:
    if t is None:
        return
    _check_device(name, t, x)
    if t.dtype not in _ACTIVATIONS:
        raise ValueError(f"{name}: dtype {t.dtype}; {_ALLOWED}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name}: shape {list(t.shape)}; must be {list(shape)}")


def _check_strategy(strategy: str | None, x: Tensor) -> None:
    allowed = _native.strategies_on(x.device.type)
    if strategy is not None and allowed and strategy not in allowed:
        raise ValueError(
            f"strategy: '{strategy}' is not available on {x.device.type}; "
            f"allowed: {', '.join(allowed)}"
        )


def _check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    if dtype is not None and dtype not in _ACTIVATIONS:
        raise ValueError(f"dtype: {dtype}; {_ALLOWED}")
    return dtype or torch.float32


def _in_features(weight: Tensor, format: str, in_features: int | None) -> int:
    f = formats.get(format)
    if in_features is not None:
        return in_features
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {list(weight.shape)}; must be [N, row_bytes]")
    row = weight.shape[1]
    if weight.dtype != torch.uint8:
        return row
    k = row // f.block_bytes * f.block_values
    if f.row_bytes(k) != row:
        raise ValueError(f"weight: rows of {row} bytes are no whole number of {f.name} blocks")
    smaller = k - f.block_values
    if smaller >= 0 and f.row_bytes(smaller) == row:
        raise ValueError(
            f"in_features: rows of {row} bytes hold {smaller} or {k} values of {f.name}; say which"
        )
    return k


@_fake("linear")
def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, strategy: str | None = None
) -> Tensor:
    n = _check_weight("weight", weight, format, _check_activations("x", x), x)
    _check_addend("bias", bias, (n,), x)
    _check_strategy(strategy, x)
    return x.new_empty((*x.shape[:-1], n))


@_fake("linear_input_grad")
def _linear_input_grad(grad: Tensor, weight: Tensor, format: str, in_features: int) -> Tensor:
    n = _check_activations("grad", grad)
    rows = _check_weight("weight", weight, format, in_features, grad)
    if n != rows:
        raise ValueError(f"grad: last size {n}; weight has {rows} rows")
    return grad.new_empty((*grad.shape[:-1], in_features))


@_fake("swiglu")
def _swiglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, format_gate: str, format_up: str
) -> Tensor:
    k = _check_activations("x", x)
    n = _check_weight("gate_weight", gate_weight, format_gate, k, x)
    rows = _check_weight("up_weight", up_weight, format_up, k, x)
    if n != rows:
        raise ValueError(f"up_weight: has {rows} rows, gate_weight {n}")
    return x.new_empty((*x.shape[:-1], n))


@_fake("swiglu_linear")
def _swiglu_linear(
    gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, format: str
) -> Tensor:
    k = _check_activations("gate", gate)
    _check_addend("up", up, tuple(gate.shape), gate)
    n = _check_weight("weight", weight, format, k, gate)
    _check_addend("bias", bias, (n,), gate)
    return gate.new_empty((*gate.shape[:-1], n))


def _fake_scaled(op: str, dim: int) -> None:
    """gemv and gemm: the same arguments, x of `dim` dimensions."""

    @_fake(op)
    def scaled(
        x: Tensor,
        weight: Tensor,
        format: str,
        c: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
        strategy: str | None = None,
    ) -> Tensor:
        _check_strategy(strategy, x)
        k = _check_activations("x", x)
        if x.dim() != dim:
            raise ValueError(f"x: shape {list(x.shape)}; must have {dim} dimensions")
        shape = (*x.shape[:-1], _check_weight("weight", weight, format, k, x))
        _check_addend("c", c, shape, x)
        if beta != 0 and c is None:
            raise ValueError(f"c: missing, but beta = {beta}")
        return x.new_empty(shape)


_fake_scaled("gemv", 1)
_fake_scaled("gemm", 2)


@_fake("dequantize")
def _dequantize(
    weight: Tensor,
    format: str,
    in_features: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = _check_dtype(dtype)
    k = _in_features(weight, format, in_features)
    n = _check_weight("weight", weight, format, k, weight)
    return weight.new_empty((n, k), dtype=out)


@_fake("quantize")
def _quantize(w: Tensor, format: str) -> Tensor:
    _check_activations("w", w)
    if w.dim() != 2:
        raise ValueError(f"w: shape {list(w.shape)}; must be [N, K]")
    f = _check_k("w", format, w.shape[1])
    return w.new_empty((w.shape[0], f.row_bytes(w.shape[1])), dtype=torch.uint8)


@_fake("embedding")
def _embedding(
    ids: Tensor,
    weight: Tensor,
    format: str,
    in_features: int | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    out = _check_dtype(dtype)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids: dtype {ids.dtype}; allowed: int64, int32")
    k = _in_features(weight, format, in_features)
    _check_weight("weight", weight, format, k, ids)
    if not weight.shape[0] and ids.numel():
        raise IndexError(f"ids: {ids.numel()} of them; the table has 0 rows")
    return weight.new_empty((*ids.shape, k), dtype=out)


@_fake("probe")
def _probe(x: Tensor, x2: Tensor, op: str) -> Tensor:
    if x.dtype not in _ACTIVATIONS:
        raise ValueError(f"x: dtype {x.dtype}; {_ALLOWED}")
    _check_device("x2", x2, x)
    if x2.dtype != x.dtype or x2.shape != x.shape:
        given, wanted = (f"{t.dtype} {list(t.shape)}" for t in (x2, x))
        raise ValueError(f"x2: {given}; must be as x, {wanted}")
    if op not in PROBES:
        raise ValueError(f"op: '{op}'; allowed: {', '.join(PROBES)}")
    return x.new_empty(() if op == "dot" else x.shape)
