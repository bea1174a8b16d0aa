"""What the ops on experts must return, each value with its bound as in oracle.py.

A choice's product is that of linear. Where choices are summed as they are multiplied, a term takes
part in as many additions more as there are choices, and its score is one multiplication.
"""

from __future__ import annotations

import torch
from backends import Backend
from layer_oracle import activated
from oracle import SILU_ROUNDINGS, SILU_SLOPE, Halved, Value
from torch import Tensor

from torch_metalmm import _C


def products(
    x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None = None, halved: Halved = False
) -> Value:
    """x W^T + bias of every choice [T, C, N]; w f32 [E, N, K]."""
    rows = x if x.dim() == 3 else x[:, None].expand(-1, ids.shape[1], -1)
    chain, shape = x.shape[-1] + 8 + ids.shape[1], (*ids.shape, w.shape[1])
    exact, error = [], []
    for row, expert in zip(rows.flatten(0, 1), ids.flatten().tolist(), strict=True):
        y = Value.of(row).dot(w[expert], chain, halved=halved)
        y = y if bias is None else y + Value.of(bias[expert])
        exact.append(y.exact)
        error.append(y.error)
    none = torch.zeros(shape, dtype=torch.float64)
    if not exact:
        return Value(none, none)
    return Value(torch.stack(exact).view(shape), torch.stack(error).view(shape))


def weighted(y: Value, scores: Tensor) -> Value:
    """sum over c of scores[t, c] y[t, c]"""
    terms = [
        Value(y.exact[:, c], y.error[:, c]) * Value.of(scores[:, c, None])
        for c in range(scores.shape[1])
    ]
    out = terms[0]
    for term in terms[1:]:
        out = out + term
    return out


def clamped(x: Value, low: float, high: float) -> Value:
    return Value(x.exact.clamp(low, high), x.error)


def gated(
    gate: Value, up: Value, activation: str, limit: float | None = None, alpha: float = 1.0
) -> Value:
    """alpha is rounded to f32, and its product with gate: 2 u |alpha gate| of exp's value."""
    if limit is not None:
        gate, up = clamped(gate, -torch.inf, limit), clamped(up, -limit, limit)
    if activation != "swiglu_oai":
        return activated(gate, activation) * up
    exact = gate.exact * torch.sigmoid(alpha * gate.exact)
    slope = Value(exact, SILU_SLOPE * gate.error)
    act = slope.rounded(SILU_ROUNDINGS + 2 * abs(alpha) * gate.size())
    return act * (up + Value.of(torch.ones(())))


def halves(y: Value, interleaved: bool) -> tuple[Value, Value]:
    """Gate and up of [..., 2 N]."""
    if interleaved:
        parts = [(slice(i, None, 2)) for i in range(2)]
    else:
        n = y.exact.shape[-1] // 2
        parts = [slice(0, n), slice(n, None)]
    gate, up = (Value(y.exact[..., p], y.error[..., p]) for p in parts)
    return gate, up


def is_halved(
    backend: Backend, dtype: torch.dtype, ids: Tensor, w: torch.Size, name: str,
    strategy: str | None,
) -> Halved:  # fmt: skip
    """What is rounded beside the sums: in tiles of f16; by torch's matmul of an expert's rows."""
    experts, n, k = w
    if not backend.chip():
        most = int(ids.flatten().bincount().max()) if ids.numel() else 0
        return backend.halves(strategy, dtype, name, (most, n, k))
    tiled = _C.experts_are_tiled(ids.numel(), experts) if strategy is None else "gemm" in strategy
    return tiled and dtype == torch.float16


def strategies_of(backend: Backend, op: str) -> tuple[str | None, ...]:
    """What can be forced for an op of plans on an engine, and its own choice."""
    if op == "linear":
        return (None, *backend.strategies)
    if not backend.chip():
        return (None, "gemv", "gemv_batched", "gemm", "gemv_steps", "gemm_naive")
    return (None, *_C.strategies(op), "expert_gemm")
