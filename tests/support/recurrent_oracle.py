"""What the recurrent ops must return, each value with its bound as in oracle.py.

Beside the roundings of each operation of `Value`: e^x of a computed x is e^x within e^error - 1
of what is relative, and exp itself is within 2 u; softplus is log(1 + e^x), whose slope is at most
1, within 8 u of a positive result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from backends import Backend
from layer_oracle import inverse_rms
from oracle import TINY, Value, check, gamma
from torch import Tensor

_FIELDS = ("exact", "error")


def exp(x: Value) -> Value:
    exact = x.exact.exp()
    return Value(exact, exact * torch.expm1(x.error)).rounded(2)


def softplus(x: Value) -> Value:
    exact = x.exact.clamp_min(0) + torch.log1p(torch.exp(-x.exact.abs()))
    return Value(exact, x.error).rounded(8)


def summed(terms: Value, dim: int) -> Value:
    """Products that are added up in any order."""
    count, size = terms.exact.shape[dim], terms.size().sum(dim)
    return Value(terms.exact.sum(dim), terms.error.sum(dim) + gamma(count) * size + count * TINY)


def unit(x: Tensor, eps: float) -> Value:
    """x / sqrt(sum of squares + eps): sqrt(k) times a norm whose eps is eps / k."""
    k = x.shape[-1]
    return (Value.of(x) * inverse_rms(x, eps / k) * k**-0.5).rounded(2)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, activation: str | None
) -> tuple[Value, Tensor]:
    """y [B, S, C], not yet stored, and the state behind the last position."""
    rows = torch.cat([state.transpose(1, 2), x], 1)
    taps, last = weight.shape[1], rows.shape[1]
    windows = rows[:, last - x.shape[1] - taps + 1 :].unfold(1, taps, 1).double()  # [B, S, C, taps]
    terms = windows * weight.double()
    if bias is not None:
        terms = torch.cat([terms, bias.double()[:, None].expand(*terms.shape[:-1], 1)], -1)
    y = summed(Value(terms, 0 * terms), -1)
    after = rows[:, last - state.shape[2] :].transpose(1, 2)
    return y.silu() if activation else y, after


def gated_delta(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    eps: float = 1e-6,
) -> tuple[Value, Value]:
    """y [B, S, H, dv], not yet stored, and the state behind the last position."""
    heads, dk, dv = state.shape[1:]
    keys, values = qkv.split([qkv.shape[-1] - heads * dv, heads * dv], -1)
    q, k = (
        t.unflatten(-1, (-1, dk)).repeat_interleave(heads * 2 * dk // keys.shape[-1], -2)
        for t in keys.chunk(2, -1)
    )
    q_unit, k_unit = unit(q, eps) * dk**-0.5, unit(k, eps)
    rate = exp(Value.of(a_log)) * softplus(Value.of(a) + Value.of(dt_bias))
    decay, beta = exp(rate * -1.0), Value.of(b)
    beta = Value(b.double().sigmoid(), 0 * b.double()).rounded(5)
    v, s, out = values.unflatten(-1, (heads, dv)), Value.of(state), []
    for i in range(qkv.shape[1]):
        at = lambda t, i=i: Value(t.exact[:, i], t.error[:, i])  # noqa: E731
        lift = lambda t, d: Value(t.exact.unsqueeze(d), t.error.unsqueeze(d))  # noqa: E731
        key = lift(at(k_unit), -1)
        s = s * lift(lift(at(decay), -1), -1)
        seen = summed(s * key, -2)
        delta = (Value.of(v[:, i]) + seen * -1.0) * lift(at(beta), -1)
        s = s + key * lift(delta, -2)
        out.append(summed(s * lift(at(q_unit), -1), -2))
    y = Value(torch.stack([o.exact for o in out], 1), torch.stack([o.error for o in out], 1))
    return y, s


def ssm_scan(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    d: Tensor,
    state: Tensor,
    gate: Tensor | None = None,
    dt_min: float = 0.0,
    dt_max: float | None = None,
) -> tuple[Value, Value]:
    """y [B, S, heads P], not yet stored, and the state behind the last position."""
    heads, p, n = state.shape[1:]
    x, *rest = xbc.split([heads * p, *[(xbc.shape[-1] - heads * p) // 2] * 2], -1)
    x = x.unflatten(-1, (heads, p))
    b, c = (t.unflatten(-1, (-1, n)).repeat_interleave(heads * n // t.shape[-1], -2) for t in rest)
    step = softplus(Value.of(dt) + Value.of(dt_bias))
    limits = torch.tensor([dt_min, torch.inf if dt_max is None else dt_max]).double()  # in f32
    step.exact = step.exact.clamp(*limits)
    decay = exp(step * exp(Value.of(a_log)) * -1.0)
    s, out = Value.of(state), []
    for i in range(xbc.shape[1]):
        of_head = [Value(v.exact[:, i, :, None], v.error[:, i, :, None]) for v in (step, decay)]
        scaled = Value.of(x[:, i]) * of_head[0]  # [B, heads, P]
        scaled = Value(scaled.exact[..., None], scaled.error[..., None])
        kept = s * Value(of_head[1].exact[..., None], of_head[1].error[..., None])
        s = kept + scaled * Value.of(b[:, i, :, None])
        y = summed(s * Value.of(c[:, i, :, None]), -1) + Value.of(x[:, i]) * Value.of(d[:, None])
        out.append(y)
    y = Value(*(torch.stack([getattr(o, n) for o in out], 1).flatten(2) for n in _FIELDS))
    return y if gate is None else y * Value.of(gate).silu(), s


def check_written(
    want: Callable[..., tuple[Value, Value | Tensor]],
    given: dict[str, Any],
    backend: Backend,
    what: str,
) -> None:
    """The op of the name of `want`, a function above: its result, and the state that it writes."""
    exact, after = want(**given)
    put = {name: backend.put_view(t) for name, t in given.items()}
    put["state"] = put["state"].clone()
    y = getattr(torch.ops.metalmm, want.__name__)(**put)
    rows = next(iter(given.values()))
    assert y.dtype == rows.dtype and y.is_contiguous()
    check(y, exact.store(y.dtype), what)
    check(put["state"], after if isinstance(after, Value) else Value.of(after), f"{what} state")
