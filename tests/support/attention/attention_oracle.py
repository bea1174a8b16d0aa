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

Torch's scaled_dot_product_attention rounds the same, to the dtype of q. Beside that it may multiply
q and k each by a root of the scale, of 2 roundings: 6 u of each term of a score with their product.
It may take powers of 2, by a scale of two roundings more, from which a product with the largest
score, rounded on its own, is taken away: 4 roundings of a score. Its exponentials are within 20 ulp
(fexp_u20), 42 roundings of a weight with the product. The walk takes at least 32 slots at a time,
and at each turn an exponential and a product: 42 / 32 of a rounding for each slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from oracle import STORE, TINY, Halved, U, Value, gamma
from torch import Tensor

PARTS = 68  # and what is added or divided once
EXP_ROUNDINGS = 5
LOWEST = 86.0  # exp(-LOWEST) and what is larger is no subnormal number
SDPA_EXP_ROUNDINGS = 42
SDPA_SLOT_ROUNDINGS = 42 / 32
SDPA_TERM_ROUNDINGS, SDPA_SCORE_ROUNDINGS = 6, 4
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


def matrices(halved: Halved) -> torch.dtype:
    """To which k, v and the weights are rounded."""
    if isinstance(halved, torch.dtype):
        return halved
    return torch.float16 if halved else torch.float32


def of_rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of f64 values that are rounded to dtype; of its own values none."""
    u, spacing = STORE[dtype]
    return torch.where(x.to(dtype).double() == x, 0.0, x.abs() * u + spacing)


def scores(q: Tensor, k: Tensor, t: Traits, halved: Halved) -> tuple[Value, Tensor]:
    """Scores [B, H, S, T] and which of them count; k [B, H, T, D], a head for each of q."""
    dim, slots = q.shape[-1], k.shape[2]
    scale = dim**-0.5 if t.scale is None else t.scale
    columns = k.double().mT
    keys = Value(columns, of_rounding(columns, matrices(halved)))
    s = Value.of(q).matmul(keys)
    roundings = 2
    if isinstance(halved, torch.dtype):
        s.error += gamma(SDPA_TERM_ROUNDINGS) * (q.double().abs() @ keys.size())
        roundings += SDPA_SCORE_ROUNDINGS
    s = Value(s.exact * scale, s.error * abs(scale)).rounded(roundings)
    if t.softcap:
        s = s.soft_cap(t.softcap)
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


def attention(q: Tensor, k: Tensor, v: Tensor, t: Traits, halved: Halved = False) -> Value:
    """softmax(scores) v, [B, S, H, D] in f32; k and v f32 [B, kv_heads, length, D].

    halved: by matrices of halves; a dtype: by torch's scaled_dot_product_attention in it.
    """
    group, slots = q.shape[1] // k.shape[1], k.shape[2]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    zero = torch.zeros(q.shape, dtype=torch.float64).transpose(1, 2)
    if slots == 0:
        return Value(zero, zero)
    s, seen = scores(q, k, t, halved)
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
    of_exp, of_slot = EXP_ROUNDINGS, 1.0
    if isinstance(halved, torch.dtype):
        of_exp, of_slot = SDPA_EXP_ROUNDINGS, 1 + SDPA_SLOT_ROUNDINGS
    chain = gamma(of_slot * slots + PARTS)
    eps = (1 + gamma(of_exp)) * (1 + chain) * torch.exp(off.clamp(max=700)) - 1
    w_error = torch.where(gap - error - top_error - off > LOWEST, 0.0, w * eps) + 8 * TINY
    w_error = torch.where(exact == -torch.inf, 0.0, w_error)
    w = torch.where(exact == -torch.inf, 0.0, w)
    total, total_error = w.sum(-1, keepdim=True), w_error.sum(-1, keepdim=True)
    y = torch.where(total > 0, (w @ v) / total, 0.0)
    rest = total - total_error
    n_error = w_error @ v.abs()
    u, spacing = STORE[matrices(halved)]
    n_error += (w * u + spacing) @ v.abs() + w @ of_rounding(v, matrices(halved)) * (1 + u)
    y_error = (n_error + y.abs() * total_error) / rest
    y_error = torch.where(rest > 0, y_error.nan_to_num(UNBOUNDED), UNBOUNDED).masked_fill(
        total == 0, 0.0
    )
    out = Value(y.transpose(1, 2), y_error.transpose(1, 2))
    return Value(out.exact, out.error + gamma(1) * out.size() + TINY * (out.error > 0))
