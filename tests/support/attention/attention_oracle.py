"""What attention must return, with its bound; oracle.py has the words, u, gamma and Value.

A score s = scale q k has the error of a dot product of D terms and of two roundings (scale is
rounded to f32). A soft cap c tanh(s / c) is at most as steep as 1, and so is log tanh as a function
of log: its quotient, tanh (2 ulp) and product, c rounded twice, are 8 roundings of the result. A
mask is one addition. So |s' - s| <= e for the computed s', e a vector over the slots.

A weight is exp(s' - m), or exp(s' - m1) exp(m1 - m) where m1 is the largest score of a part. What m
is does not matter to the quotient. The differences are rounded in proportion to their sizes, which
add up to m' - s' <= gap + e + e_m: gap = m - s, e_m the error of a score that may be the largest.
Two exponentials within 1 ulp and a product are 5 roundings. So the weight w has a relative error of
    eps = (1 + gamma(5)) exp(e + u (gap + e + e_m)) - 1,
and where w is below 2^-125 it may be 0. The largest weight is 1, so the sum of weights is at least
1 - eps, and what underflows is in proportion to it.

Numerator N = sum w v and sum of weights W are sums of T + P + 1 terms at most, P <= 64 parts and a
sink, with a product each in N and a quotient before or after it:
    E_N <= sum w |v| ((1 + eps) (1 + gamma(T + 68)) - 1),   E_W alike without v
    |y - N / W| <= (E_N + |N / W| E_W) / (W - E_W), one rounding more, and the store.

Matrices of halves round k, v and the weights of N, not those of W: by 2^-11 in proportion, 2^-25
where the half is subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from oracle import TINY, U, Value, gamma
from torch import Tensor

PARTS = 68  # and what is added or divided once
EXP_ROUNDINGS = 5
CAP_ROUNDINGS = 8
LOWEST = 86.0  # exp(-LOWEST) and what is larger is no subnormal number
HALF, HALF_TINY = 2.0**-11, 2.0**-25  # of a value that is rounded to f16
UNBOUNDED = 1e30  # of scores that a mask absorbs: any mean of the values


@dataclass
class Traits:
    """The optional arguments of attention."""

    mask: Tensor | None = None
    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None
    causal: bool = True

    def kwargs(self, put: Any = lambda t: t) -> dict[str, Any]:
        return {k: put(v) if isinstance(v, Tensor) else v for k, v in vars(self).items()}


def visible(queries: int, slots: int, t: Traits) -> Tensor:
    """Which of `slots` slots each query sees: bool [S, T]."""
    own = torch.arange(queries)[:, None] + slots - queries
    at = torch.arange(slots)[None]
    out = torch.ones(queries, slots, dtype=torch.bool)
    if t.causal:
        out &= at <= own
    if t.window:
        out &= at > own - min(t.window, queries + slots)
    return out


def as_half(x: Tensor) -> Tensor:
    """The error of f64 values that are rounded to f16."""
    return x.abs() * HALF + HALF_TINY


def scores(q: Tensor, k: Tensor, t: Traits, halves: bool) -> tuple[Value, Tensor]:
    """Scores [B, H, S, T] and which of them count; k [B, H, T, D], a head for each of q."""
    dim, slots = q.shape[-1], k.shape[2]
    scale = dim**-0.5 if t.scale is None else t.scale
    columns = k.double().mT
    error = as_half(columns) if halves else torch.zeros_like(columns)
    s = Value.of(q).matmul(Value(columns, error))
    s = Value(s.exact * scale, s.error * abs(scale)).rounded(2)
    if t.softcap:
        s = Value(torch.tanh(s.exact / t.softcap) * t.softcap, s.error).rounded(CAP_ROUNDINGS)
    seen = visible(q.shape[2], slots, t).expand(s.exact.shape)
    if t.mask is not None:
        mask = t.mask[..., :slots]
        if mask.dtype == torch.bool:
            seen = seen & mask
        else:
            seen = seen & (mask != -torch.inf)
            finite = mask.masked_fill(mask == -torch.inf, 0)
            s = s + Value(finite.double(), torch.zeros_like(finite, dtype=torch.float64))
    return s, seen


def attention(q: Tensor, k: Tensor, v: Tensor, t: Traits, halves: bool = False) -> Value:
    """softmax(scores) v, [B, S, H, D] in f32; k and v f32 [B, kv_heads, length, D].

    halves: they are multiplied by matrices of halves.
    """
    group, slots = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    zero = torch.zeros(q.shape, dtype=torch.float64).transpose(1, 2)
    if slots == 0:
        return Value(zero, zero)
    s, seen = scores(q, k, t, halves)
    exact, error = s.exact.masked_fill(~seen, -torch.inf), s.error.masked_fill(~seen, 0)
    if t.sinks is not None:
        sinks = t.sinks.double().view(1, -1, 1, 1).expand(*exact.shape[:3], 1)
        exact = torch.cat([exact, sinks], -1)
        error = torch.cat([error, torch.zeros_like(sinks)], -1)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    top = exact.amax(-1, keepdim=True)
    is_top = exact + error >= (exact - error).amax(-1, keepdim=True)
    top_error = torch.where(is_top, error, 0).amax(-1, keepdim=True)
    gap = torch.where(exact == -torch.inf, torch.inf, top - exact)
    w = torch.exp(-gap)
    off = error + U * (gap + error + top_error)
    chain = gamma(slots + PARTS)
    eps = (1 + gamma(EXP_ROUNDINGS)) * (1 + chain) * torch.exp(off.clamp(max=700)) - 1
    w_error = torch.where(gap - error - top_error - off > LOWEST, 0.0, w * eps) + 8 * TINY
    w_error = torch.where(exact == -torch.inf, 0.0, w_error)
    w = torch.where(exact == -torch.inf, 0.0, w)
    total, total_error = w.sum(-1, keepdim=True), w_error.sum(-1, keepdim=True)
    y = torch.where(total > 0, (w @ v) / total, 0.0)
    rest = total - total_error
    n_error = w_error @ v.abs()
    if halves:
        n_error = n_error + (w * HALF + HALF_TINY) @ v.abs() + w @ as_half(v) * (1 + HALF)
    y_error = (n_error + y.abs() * total_error) / rest
    y_error = torch.where(rest > 0, y_error.nan_to_num(UNBOUNDED), UNBOUNDED).masked_fill(
        total == 0, 0.0
    )
    out = Value(y.transpose(1, 2), y_error.transpose(1, 2))
    return Value(out.exact, out.error + gamma(1) * out.size() + TINY * (out.error > 0))
