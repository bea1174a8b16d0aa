"""What the ops between the matrix products must return, each value with its bound as in oracle.py.

RMS norm: S = sum of x² has K non-negative terms: the computed one is S (1 + d), |d| <= gamma(K),
and K 2^-126 less where squares underflow. S / K + eps is two roundings more, the root halves what
is relative, and root and reciprocal (or rsqrt within 2 ulp) are 4 roundings at most.
"""

from __future__ import annotations

import torch
from oracle import SILU_ROUNDINGS, SILU_SLOPE, TINY, Value, gamma
from torch import Tensor

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
GELU_SLOPE = 1.13  # the largest |derivative| of both forms is 1.129
# gelu(x) = x / 2 (1 + f), |f| <= 1: f within 8 u (of tanh, whose argument has 5 roundings that its
# slope damps by |z| (1 - tanh² z) < 0.45; of erf, within 4 ulp), then 3 roundings. Where 1 + f
# cancels, what is left of f's error is in proportion to x, not to the result.
GELU_ROUNDINGS = 12


def inverse_rms(x: Tensor, eps: float) -> Value:
    """1 / sqrt(mean(x²) + eps) over the last dimension, [..., 1]."""
    k = x.shape[-1]
    squares = x.double().square().sum(-1, keepdim=True)
    inside = squares / k + eps
    exact = inside.rsqrt()
    relative = (gamma(k + 3) * inside + TINY) / inside
    return Value(exact, exact * (relative / 2 + relative.square() + gamma(4)))


def factors(weight: Tensor, offset: float) -> Value:
    g = Value.of(weight)
    return g if offset == 0 else g + Value.of(torch.tensor(offset))


def normalized(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0) -> Value:
    """(offset + weight) x / sqrt(mean(x²) + eps)"""
    scaled = Value.of(x) if weight is None else Value.of(x) * factors(weight, offset)
    return scaled * inverse_rms(x, eps)


def normed_heads(x: Tensor, weight: Tensor, eps: float, offset: float) -> Value:
    """Heads [B, H, S, D] by a weight [D] of each, or [H D] of all of a position as one row."""
    if weight.numel() == x.shape[-1]:
        return normalized(x, weight, eps, offset)
    heads = (x.shape[1], x.shape[3])
    y = normalized(x.transpose(1, 2).flatten(2), weight, eps, offset)
    return Value(*(t.unflatten(-1, heads).transpose(1, 2) for t in (y.exact, y.error)))


def activated(x: Value, activation: str) -> Value:
    exact = ACTIVATIONS[activation](x.exact)
    if activation == "silu":
        return Value(exact, SILU_SLOPE * x.error).rounded(SILU_ROUNDINGS)
    if activation == "sigmoid":  # of slopes up to 1 / 4
        return Value(exact, x.error / 4).rounded(SILU_ROUNDINGS)
    if activation == "relu2":
        return Value(exact, 2 * x.size() * x.error).rounded()
    return Value(exact, GELU_SLOPE * x.error + gamma(GELU_ROUNDINGS) * x.size() + TINY)


def rotated(x: Value, cos: Tensor, sin: Tensor, interleaved: bool) -> Value:
    """Heads [B, H, S, D] of which the first R values are rotated; cos and sin [B or 1, S, R]."""
    rotated = cos.shape[-1]
    head = Value(x.exact[..., :rotated], x.error[..., :rotated])

    def turn(t: Tensor, sign: float) -> Tensor:
        if interleaved:
            a, b = t[..., 0::2], t[..., 1::2]
            return torch.stack([sign * b, a], -1).flatten(-2)
        a, b = t.chunk(2, -1)
        return torch.cat([sign * b, a], -1)

    turned = Value(turn(head.exact, -1), turn(head.error, 1))
    y = head * Value.of(cos[:, None]) + turned * Value.of(sin[:, None])
    return Value(
        torch.cat([y.exact, x.exact[..., rotated:]], -1),
        torch.cat([y.error, x.error[..., rotated:]], -1),
    )
