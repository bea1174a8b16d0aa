"""Calls of the ops on experts and what they must return, each value with its bound as in oracle.py.

A choice's product is that of linear. Where choices are summed as they are multiplied, a term takes
part in as many additions more as there are choices, and its score is one multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from backends import Backend
from inputs import activations, generator, random_weight
from layer_oracle import activated
from oracle import SILU_ROUNDINGS, SILU_SLOPE, Value, spec
from torch import Tensor

from torch_metalmm import _C


@dataclass(frozen=True)
class Experts:
    """Sizes: E experts of n rows of k values, T tokens, C choices of each."""

    experts: int
    n: int
    k: int
    tokens: int
    choices: int


def weights(name: str, s: Experts, seed: object = 0) -> Tensor:
    """uint8 [E, N, row_bytes]."""
    packed = random_weight(name, s.experts * s.n, s.k, seed)
    return packed.view(s.experts, s.n, -1)


def decoded(name: str, packed: Tensor, k: int) -> Tensor:
    """f32 [E, N, K]"""
    rows = spec(name, packed.flatten(0, 1), k)
    return rows.view(*packed.shape[:2], k)


def chosen(s: Experts, seed: object = 0) -> Tensor:
    """ids int64 [T, C], an expert twice for a token here and there."""
    shape = (s.tokens, s.choices)
    return torch.randint(0, s.experts, shape, generator=generator("ids", seed, shape))


def rows(s: Experts, dtype: torch.dtype, apart: bool = False) -> Tensor:
    """x [T, K], or apart [T, C, K]."""
    shape = (s.tokens, s.choices, s.k) if apart else (s.tokens, s.k)
    return activations(*shape, dtype=dtype)


def stacked(parts: list[list[Value]], tail: tuple[int, ...]) -> Value:
    """Values [T][C] of N each as one [T, C, N]; of none, of the sizes `tail`."""
    if not parts or not parts[0]:
        none = torch.zeros(len(parts), 0, *tail, dtype=torch.float64)
        return Value(none, none)
    exact, error = (
        torch.stack([torch.stack([getattr(v, part) for v in row]) for row in parts])
        for part in ("exact", "error")
    )
    return Value(exact, error)


def products(
    x: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None = None, halved: bool = False
) -> Value:
    """x W^T + bias of every choice [T, C, N]; w f32 [E, N, K]."""
    k = x.shape[-1]
    out = []
    for t, of_token in enumerate(ids.tolist()):
        row = []
        for c, expert in enumerate(of_token):
            one = x[t] if x.dim() == 2 else x[t, c]
            y = Value.of(one).dot(w[expert], k + 8 + ids.shape[1], halved=halved)
            row.append(y if bias is None else y + Value.of(bias[expert]))
        out.append(row)
    return stacked(out, (w.shape[1],))


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
    backend: Backend, s: Experts, dtype: torch.dtype, strategy: str | None = None
) -> bool:
    """Whether W meets x rounded to f16: in tiles of f16."""
    if not backend.chip():
        return False
    tiled = strategy == "expert_gemm" or (
        strategy is None and _C.experts_are_tiled(s.tokens * s.choices, s.experts)
    )
    return tiled and dtype == torch.float16


def strategies_of(backend: Backend, op: str) -> tuple[str | None, ...]:
    """What can be forced for an op of plans on an engine, and its own choice."""
    if not backend.chip():
        return (None, "gemv", "gemv_batched", "gemm", "gemv_steps", "gemm_naive")
    return (None, *_C.strategies(op), "expert_gemm")
