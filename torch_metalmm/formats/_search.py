"""Rounding and ordered sums: the arithmetic rules that the native quantizers repeat.

Tensors are f32 [n, G]: element i of G independent groups is row i. Rules for equal bits:

* one IEEE f32 rounding per written operation, evaluated left to right, never fused;
* a sum over the elements of a group starts at +0 and adds them in index order;
* a comparison with NaN is false, so a trial that overflowed is never chosen;
* `rint` rounds ties to even; `to_code` clamps in float, and NaN becomes the lowest code;
* "first of equals" is a loop that replaces its result only by a strictly larger (smaller) one.

With these rules every quantizer gives the bytes of ggml's C code built without FMA contraction
(llama.cpp 2025-08, 13 formats x 18 kinds of weights, all blocks whose scale fits f16).
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-15  # as f32: a group whose largest |x| is below this is stored as zeros


def f32(value: float, like: Tensor) -> Tensor:
    """value rounded to f32, as a scalar on the device of `like`."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def divide(a: float, t: Tensor) -> Tensor:
    """a / t with one rounding. (torch's a / t for a number a is a * t.reciprocal(): two.)"""
    return f32(a, t) / t


def square_root(t: Tensor) -> Tensor:
    """sqrt(t) with one rounding. (torch's f32 sqrt is not: MKL is off by one ulp at times. The
    square root of an f32 is never near enough to a tie for its f64 value to round wrongly.)"""
    return t.double().sqrt().float()


def elements_first(x: Tensor, n: int) -> Tensor:
    """f32 [B, S * n] -> [n, B * S]: row i holds element i of every group of n."""
    return x.reshape(-1, n).t().contiguous()


def groups_first(x: Tensor, blocks: int) -> Tensor:
    """Inverse of elements_first: [n, B * S] -> [B, S * n]."""
    return x.t().reshape(blocks, -1)


def ordered_sum(t: Tensor) -> Tensor:
    """((0 + t[0]) + t[1]) + ... over dimension 0."""
    total = torch.zeros_like(t[0])
    for row in t:
        total += row
    return total


def to_code(v: Tensor, low: int, high: int) -> Tensor:
    """rint(v) clamped to [low, high], NaN to low; an integer held in f32."""
    return torch.nan_to_num(v, nan=float(low)).round_().clamp_(low, high)


def signed_max(x: Tensor) -> Tensor:
    """The element of largest |x|, sign kept, the first one of equals; 0 if all are 0."""
    best, best_abs = torch.zeros_like(x[0]), torch.zeros_like(x[0])
    for row in x:
        size = row.abs()
        larger = size > best_abs
        best, best_abs = torch.where(larger, row, best), torch.where(larger, size, best_abs)
    return best


def first_min(x: Tensor) -> Tensor:
    """The smallest element, the first one of equals (-0 and +0 are equal)."""
    best = x[0]
    for row in x[1:]:
        best = torch.where(row < best, row, best)
    return best


def first_max(x: Tensor) -> Tensor:
    """The largest element, the first one of equals."""
    return -first_min(-x)


def reciprocal(d: Tensor) -> Tensor:
    """1 / d, and 0 where d is 0."""
    return torch.where(d == 0, torch.zeros_like(d), divide(1, d))


def search_symmetric(x: Tensor, high: int, w: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Scale and codes for x ~ scale * (q - high), 0 <= q < 2 * high ("make_qx").

    The signed maximum M maps to about -high: trials s = 0, -9..-1, 1..9 use
    inv = -(high + 0.1f * s) / M, l = clamp(rint(inv * x), -high, high - 1) and the sums
    A = sum (w * x) * l, B = sum (w * l) * l, w being x * x where none is given. Trial 0 sets
    scale = A / B (0 if B = 0) and best = scale * A; a later one replaces them when B > 0 and
    A * A > best * B.
    Returns scale f32 [G] and q = l + high, f32 [n, G]. Groups with max|x| < TINY: 0 and 0.
    """
    top = signed_max(x)
    w = x * x if w is None else w
    wx = w * x
    scale, best, codes = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(x)
    tenth = f32(0.1, x)
    for s in (0, *range(-9, 0), *range(1, 10)):
        inv = -(high + tenth * s) / top
        q = to_code(inv * x, -high, high - 1)
        a, b = ordered_sum(wx * q), ordered_sum(w * q * q)
        if s == 0:
            scale = torch.where(b == 0, scale, a / b)
            best, codes = scale * a, q
            continue
        better = (b > 0) & (a * a > best * b)
        scale = torch.where(better, a / b, scale)
        best = torch.where(better, scale * a, best)
        codes = torch.where(better, q, codes)
    empty = top.abs() < f32(TINY, x)
    return scale.masked_fill(empty, 0), (codes + high).masked_fill(empty, 0)


def _descend(x: Tensor, w: Tensor, codes: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Five passes of coordinate descent for x ~ scale * l, on codes l f32 [n, G], in place.

    With A = sum (w * x) * l, B = sum (w * l) * l, each pass goes over i = 0..n-1, an element using
    the A and B left by the one before: a = A - (w * x) * l, b = B - (w * l) * l,
    l' = clamp(rint(x * b / a), low, high), a' = a + (w * x) * l', b' = b + (w * l') * l'.
    If a > 0, l' != l, b' > 0 and a' * a' * B > A * A * b', then l, A, B = l', a', b'.
    Returns A and B, f32 [G].
    """
    wx = w * x
    sum_a, sum_b = ordered_sum(wx * codes), ordered_sum(w * codes * codes)
    for _ in range(5):
        for i in range(x.shape[0]):
            old = codes[i]
            a = sum_a - wx[i] * old
            b = sum_b - w[i] * old * old
            new = to_code(x[i] * b / a, low, high)
            new_a, new_b = a + wx[i] * new, b + w[i] * new * new
            better = (a > 0) & (new != old) & (new_b > 0)
            better &= new_a * new_a * sum_b > sum_a * sum_a * new_b
            codes[i] = torch.where(better, new, old)
            sum_a = torch.where(better, new_a, sum_a)
            sum_b = torch.where(better, new_b, sum_b)
    return sum_a, sum_b


def search_descent(x: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Scale and codes for x ~ scale * (q - high), 0 <= q < 2 * high ("make_q3", weights x^2).

    Starts from l = clamp(rint((-high / M) * x), -high, high - 1), M the signed maximum, and
    descends. Returns A / B f32 [G] and q = l + high, f32 [n, G]. Groups with max|x| < TINY: 0
    and 0.
    """
    top = signed_max(x)
    w = x * x
    codes = to_code(divide(-high, top) * x, -high, high - 1)
    sum_a, sum_b = _descend(x, w, codes, -high, high - 1)
    empty = top.abs() < f32(TINY, x)
    return (sum_a / sum_b).masked_fill(empty, 0), (codes + high).masked_fill(empty, 0)


def search_asymmetric(
    x: Tensor, w: Tensor, high: int, start: float, increment: float, last: int, absolute: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, offset and codes for x ~ scale * q - offset, 0 <= q <= high ("make_qkx2").

    lo = min(min(x), 0), hi = max(x). If hi == lo: scale 0, offset -lo, q 0. Otherwise, first,
    inv = high / (hi - lo), scale = 1 / inv, q = clamp(rint(inv * (x - lo)), 0, high), and
    best = sum w * e with e = (scale * q + lo) - x, then |e| (absolute) or e * e.
    For s = 0..last, with the current lo: inv = ((start + increment * s) + high) / (hi - lo),
    l as q above, S1 = sum w * l, S2 = sum (w * l) * l, SX = sum (w * l) * x;
    det = W * S2 - S1 * S1 (W = sum w, X = sum w * x); skip unless det > 0;
    scale' = (W * SX - X * S1) / det, lo' = (S2 * X - S1 * SX) / det;
    if lo' > 0: lo' = 0, scale' = SX / S2. If its error sum is < best: take scale', lo', l.
    Returns scale f32 [G], offset = -lo f32 [G], q f32 [n, G].
    """
    hi = first_max(x)
    lo = first_min(x).clamp(max=0.0)
    flat = hi == lo
    sum_w, sum_x = ordered_sum(w), ordered_sum(w * x)

    def error(scale: Tensor, low: Tensor, q: Tensor) -> Tensor:
        e = scale * q + low - x
        return ordered_sum(w * (e.abs() if absolute else e * e))

    inv = divide(high, hi - lo)
    scale = divide(1, inv)
    codes = to_code(inv * (x - lo), 0, high)
    best = error(scale, lo, codes)
    for s in range(last + 1):
        inv = (f32(start, x) + f32(increment, x) * s + high) / (hi - lo)
        q = to_code(inv * (x - lo), 0, high)
        wq = w * q
        s1, s2, sx = ordered_sum(wq), ordered_sum(wq * q), ordered_sum(wq * x)
        det = sum_w * s2 - s1 * s1
        new_scale = (sum_w * sx - sum_x * s1) / det
        new_lo = (s2 * sum_x - s1 * sx) / det
        positive = new_lo > 0
        new_scale = torch.where(positive, sx / s2, new_scale)
        new_lo = new_lo.masked_fill(positive, 0)
        new_error = error(new_scale, new_lo, q)
        better = (det > 0) & (new_error < best) & ~flat
        scale = torch.where(better, new_scale, scale)
        lo = torch.where(better, new_lo, lo)
        best = torch.where(better, new_error, best)
        codes = torch.where(better, q, codes)
    return scale.masked_fill(flat, 0), -lo, codes.masked_fill(flat, 0)


def search_positive(x: Tensor, w: Tensor, high: int) -> tuple[Tensor, Tensor]:
    """Scale and codes for x ~ scale * q, x >= 0, 0 <= q <= high ("make_qp").

    M = max(x), and 0 and 0 where M < TINY. q = clamp(rint(inv * x), 0, high) with the first of
    inv = high / M, then (0.1f * s + high) / M for s = -4..-1, 1..4, of the least
    sum (w * e) * e, e = x - (1 / inv) * q; then it descends.
    Returns scale = A / B, 0 if B = 0, f32 [G] and q f32 [n, G].
    """
    top = first_max(torch.cat([torch.zeros_like(x[:1]), x]))

    def codes_of(inv: Tensor) -> Tensor:
        return to_code(inv * x, 0, high)

    def error(inv: Tensor) -> Tensor:
        e = x - divide(1, inv) * codes_of(inv)
        return ordered_sum(w * e * e)

    inv = divide(high, top)
    best = error(inv)
    tenth = f32(0.1, x)
    for s in (*range(-4, 0), *range(1, 5)):
        other = (tenth * s + high) / top
        this = error(other)
        inv, best = torch.where(this < best, other, inv), torch.where(this < best, this, best)
    codes = codes_of(inv)
    sum_a, sum_b = _descend(x, w, codes, 0, high)
    empty = top < f32(TINY, x)
    scale = torch.where(sum_b == 0, 0, sum_a / sum_b).masked_fill(empty, 0)
    return scale, codes.masked_fill(empty, 0)


def nearest_level(v: Tensor, levels: tuple[int, ...]) -> Tensor:
    """Index (int64) of the level nearest to v, the upper one of a tie, the last one for NaN.

    levels are ascending. Equal to counting the midpoints that are <= v (exact in f32).
    """
    middle = [(a + b) / 2 for a, b in zip(levels, levels[1:], strict=False)]
    return torch.bucketize(v, f32(0, v).new_tensor(middle), right=True)


def search_levels(
    x: Tensor, levels: tuple[int, ...], tries: int, w: Tensor | None = None
) -> Tensor:
    """scale for x ~ scale * levels[l] (iq4), f32 [G].

    M is the signed maximum. Trials use inv = 1 / (-M / levels[0]), then
    inv = (levels[0] + t) / M for t = -tries..tries; q = the level nearest to inv * x;
    A = sum (w * q) * x, B = sum (w * q) * q, w being x * x where none is given. The first sets
    scale = A / B, 0 if B = 0, and best = scale * A; a later one replaces them when B > 0 and
    A * A > best * B.
    Groups with max|x| < TINY: 0.
    """
    top = signed_max(x)
    w = x * x if w is None else w
    table = f32(0, x).new_tensor(levels)

    def sums(inv: Tensor) -> tuple[Tensor, Tensor]:
        q = table[nearest_level(inv * x, levels)]
        return ordered_sum(w * q * x), ordered_sum(w * q * q)

    a, b = sums(divide(1, -top / levels[0]))
    scale = torch.where(b == 0, 0, a / b)
    best = scale * a
    for t in range(-tries, tries + 1):
        a, b = sums(divide(levels[0] + t, top))
        better = (b > 0) & (a * a > best * b)
        scale = torch.where(better, a / b, scale)
        best = torch.where(better, scale * a, best)
    return scale.masked_fill(top.abs() < f32(TINY, x), 0)
