"""What every op must return, by the Python specification in float64, each value with its bound.

A function takes the arguments of the op by their names, and the engine for what it rounds beside
the sums; it returns what the op returns, then what it has written: a Value, or a tensor where
bits are demanded. Exact values have gradients where the arguments, in float64, require them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from attention_oracle import attention as attended
from backends import Backend
from cache_cases import pack
from expert_oracle import gated, halves, is_halved, products, weighted
from layer_oracle import activated, normalized, rotated
from oracle import Halved, Value, spec
from random_calls import call_of, halved
from recurrent_oracle import gated_delta as steps
from route_oracle import route64
from torch import Tensor

from torch_metalmm import formats

Wanted = tuple[Value | Tensor, ...]


def decoded(weight: Tensor, name: str, k: int) -> Tensor:
    """W f32 [..., N, K] of packed rows, or of values of a dense format."""
    if weight.dtype != torch.uint8:
        return weight.float()
    *lead, size = weight.shape
    rows = weight.reshape(torch.Size(lead).numel(), size)
    return spec(name.lower(), rows, k).view(*lead, k)


def rows_of(x: Tensor) -> int:
    return x.shape[:-1].numel()


def common(x: Tensor, *others: Tensor | None) -> torch.dtype:
    """In which the shaders compute: that of x where all have it, else f32."""
    return x.dtype if all(t is None or t.dtype == x.dtype for t in others) else torch.float32


class Product:
    """x Wᵀ of an engine, as it rounds W and the product."""

    def __init__(self, e: Backend, x: Tensor, *others: Tensor | None) -> None:
        self.e, self.m = e, rows_of(x)
        self.dtype = common(x, *others) if e.chip() else x.dtype

    def __call__(
        self, x: Value, weight: Tensor, name: str, strategy: str | None = None
    ) -> Value:
        w, name = decoded(weight, name, x.exact.shape[-1]), name.lower()
        return x.dot(w, w.shape[1] + 8, self.halved(w, name, strategy))

    def halved(self, w: Tensor, name: str, strategy: str | None) -> Halved:
        if self.dtype == torch.float64:
            return False
        forced = strategy and strategy.lower()
        return self.e.halves(forced, self.dtype, name, (self.m, *w.shape))


def joined(y: Value, dtype: torch.dtype, *addends: Tensor | None) -> Value:
    for t in addends:
        y = y if t is None else y + Value.of(t)
    return y.store(dtype)


def linear(e: Backend, x, weight, bias, format, strategy, residual) -> Wanted:
    y = Product(e, x, bias, residual)(Value.of(x), weight, format, strategy)
    return (joined(y, x.dtype, bias, residual),)


def linear_input_grad(e: Backend, grad, weight, format, in_features) -> Wanted:
    w = decoded(weight, format, in_features)
    return (Value.of(grad).dot(w.T).store(grad.dtype),)


def normal(e: Backend, x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Value:
    """The norm that a product reads: rounded to the dtype of x where it may be a pass."""
    n = normalized(x, weight, eps, offset)
    return n.store(x.dtype) if e.chip() and rows_of(x) != 1 else n


def norm_linear(
    e: Backend, x, norm_weight, eps, offset, weight, bias, format, residual
) -> Wanted:
    product = Product(e, x, norm_weight, bias, residual)
    y = product(normal(e, x, norm_weight, eps, offset), weight, format)
    return (joined(y, x.dtype, bias, residual),)


def swiglu(
    e: Backend, x, gate_weight, up_weight, format_gate, format_up, activation,
    norm_weight=None, eps=None, offset=0.0,
) -> Wanted:  # fmt: skip
    product = Product(e, x, norm_weight)
    n = Value.of(x) if eps is None else normal(e, x, norm_weight, eps, offset)
    gate, up = product(n, gate_weight, format_gate), product(n, up_weight, format_up)
    return ((activated(gate, activation) * up).store(x.dtype),)


def swiglu_linear(e: Backend, gate, up, weight, bias, format, activation, residual) -> Wanted:
    hidden = activated(Value.of(gate), activation) * Value.of(up)
    y = Product(e, gate, bias, residual)(hidden, weight, format)
    return (joined(y, gate.dtype, bias, residual),)


def gemm(e: Backend, x, weight, format, c, alpha, beta, strategy) -> Wanted:
    y = Product(e, x, c if beta else None)(Value.of(x), weight, format, strategy)
    y = y if alpha == 1 else y * alpha
    return ((y + Value.of(c) * beta if beta else y).store(x.dtype),)


def rms_norm(e: Backend, x, weight, eps, offset, residual) -> Wanted:
    return (joined(normalized(x, weight, eps, offset), x.dtype, residual),)


def add_rms_norm(e: Backend, x, residual, weight, eps, offset) -> Wanted:
    if x.dtype == torch.float64:
        return normalized(x + residual, weight, eps, offset), Value.of(x + residual)
    total = (x.float() + residual.float()).to(x.dtype)
    return normalized(total, weight, eps, offset).store(x.dtype), total


def rope(
    e: Backend, qkv, cos, sin, heads, kv_heads, v, q_norm=None, k_norm=None, eps=0.0, offset=0.0,
    interleaved=False,
) -> Wanted:  # fmt: skip
    dim = qkv.shape[-1] // (heads + (1 if v is not None else 2) * kv_heads)
    parts = qkv.unflatten(-1, (-1, dim)).transpose(1, 2)
    of_v = parts[:, heads + kv_heads :]
    values = of_v if v is None else v.unflatten(-1, (-1, dim)).transpose(1, 2)
    out: list[Value | Tensor] = []
    for x, weight in ((parts[:, :heads], q_norm), (parts[:, heads : heads + kv_heads], k_norm)):
        head = Value.of(x) if weight is None else normalized(x, weight, eps, offset)
        out.append(rotated(head, cos, sin, interleaved).store(qkv.dtype))
    return (*out, values)


def written(cache: Tensor, name: str, slots: Tensor, rows: Tensor) -> Tensor:
    """The cache with rows of the format at its slots."""
    packed = pack(name, rows)
    packed = packed if cache.dtype == torch.uint8 else packed.view(cache.dtype)
    return cache.clone().index_copy_(2, slots, packed)


def cache_append(e: Backend, keys, values, k, v, slots, format_k, format_v) -> Wanted:
    return written(keys, format_k, slots, k), written(values, format_v, slots, v)


def rope_append(e: Backend, keys, values, slots, format_k, format_v, **given: Any) -> Wanted:
    """The rows are those that the engine's own rope returns."""
    put = {n: e.put_view(t) if isinstance(t, Tensor) else t for n, t in given.items()}
    _, k, v = (t.cpu() for t in torch.ops.metalmm.rope(**put))
    q = rope(e, **given)[0]
    return q, *cache_append(e, keys, values, k, v, slots, format_k, format_v)


def attention(e: Backend, **given: Any) -> Wanted:
    c = call_of(given)
    y = attended(c.q, c.cache.k, c.cache.v, c.traits, halved(c, e, given.get("strategy")))
    return (y.store(c.q.dtype),)


def gated_delta(e: Backend, **given: Any) -> Wanted:
    y, state = steps(**given)
    return y.store(given["qkv"].dtype), state


def route(e: Backend, x, top_k, weight=None, bias=None, format="f32", **given: Any) -> Wanted:
    logits = Value.of(x) if weight is None else Value.of(x).dot(weight.float())
    return route64(logits if bias is None else logits + Value.of(bias), top_k, given)


def dequantize(e: Backend, weight, format, in_features, dtype) -> Wanted:
    k = in_features
    if k is None:
        f = formats.get(format)
        k = weight.shape[1] * (1 if weight.dtype != torch.uint8 else 0)
        k = k or weight.shape[1] // f.block_bytes * f.block_values
    return (decoded(weight, format, k).to(dtype or torch.float32),)


def embedding(e: Backend, ids, **given: Any) -> Wanted:
    (rows,) = dequantize(e, **given)
    return (rows[ids.long()],)


def quantize(e: Backend, w, format, importance) -> Wanted:
    return (formats.get(format).quantize(w, importance),)


def probe(e: Backend, x, x2, op) -> Wanted:
    if op == "dot":
        dot = Value.of(x.reshape(-1)).dot(x2.float().reshape(1, -1)).store(x.dtype)
        return (Value(dot.exact[0], dot.error[0]),)
    name = {"div": "truediv"}.get(op, op)
    return (getattr(operator, name)(x.double(), x2.double()).float().to(x.dtype),)


def of_choices(e: Backend, x, weight, ids, bias, format, strategy) -> Value:
    w = decoded(weight, format, x.shape[-1])
    dtype = common(x, bias) if e.chip() else x.dtype
    halved = x.dtype != torch.float64 and is_halved(e, dtype, ids, w.shape, format, strategy)
    return products(x, w, ids.long(), bias, halved)


def expert_linear(e: Backend, x, weight, ids, bias, format, scores, strategy=None) -> Wanted:
    y = of_choices(e, x, weight, ids, bias, format, strategy)
    return ((y if scores is None else weighted(y, scores)).store(x.dtype),)


def expert_swiglu(
    e: Backend, x, weight, ids, bias, format, activation, limit, alpha, strategy=None,
    up_weight=None, interleaved=False,
) -> Wanted:  # fmt: skip
    weight = weight if up_weight is None else torch.cat([weight, up_weight], 1)
    both = of_choices(e, x, weight, ids, bias, format, strategy)
    gate, up = halves(both, interleaved)
    return (gated(gate, up, activation, limit, alpha).store(x.dtype),)


def expert_input_grad(e: Backend, grad, weight, ids, format, in_features) -> Wanted:
    w = decoded(weight, format, in_features)
    return (products(grad, w.mT, ids.long()).store(grad.dtype),)


WANTED: dict[str, Callable[..., Wanted]] = {
    f.__name__: f
    for f in (
        *(linear, linear_input_grad, norm_linear, swiglu, swiglu_linear, gemm, rms_norm),
        *(add_rms_norm, rope, rope_append, cache_append, attention, gated_delta, route),
        *(dequantize, embedding, quantize, probe, expert_linear, expert_swiglu, expert_input_grad),
    )
} | {"gemv": gemm}
