"""GGML K-quants: blocks of 256 values in groups of 16 or 32, whose scales are quantized too.

Element order and byte offsets are in the class docstrings; `split_fields` gives the order of the
codes. Every quantizer searches the scale of each group, quantizes the scales, rounds d (and
dmin) to f16, then quantizes the values again with the scales as they will be decoded; a
group whose decoded scale is 0 keeps the codes of the search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._bits import bytes_to_half, half_to_bytes, join_fields, round_to_half, split_fields
from ._importance import WEIGHTED_TRIALS, WeightedBlock
from ._search import (
    TINY,
    divide,
    elements_first,
    f32,
    first_max,
    groups_first,
    ordered_sum,
    search_asymmetric,
    search_descent,
    search_positive,
    search_symmetric,
    signed_max,
    square_root,
    to_code,
)


def _requantize(x: Tensor, d: Tensor, codes: Tensor, low: int, high: int) -> Tensor:
    """clamp(rint(x / d), low, high) - low, or codes where d is 0; all [n, G] and [G]."""
    return torch.where(d == 0, codes, to_code(x / d, low, high) - low)


def _quantize_scales(v: Tensor, levels: int, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales v [B, S] >= 0 -> f32 d [B], codes f32 [B, S].

    top = the largest of +0 and v; d = top / levels,
    code = clamp(rint((levels / top) * v), 0, levels); all 0 where top is 0.
    With weights w f32 [B, S]: search_positive.
    """
    if w is not None:
        d, found = search_positive(v.t().contiguous(), w.t().contiguous(), levels)
        return d, found.t()
    top = first_max(torch.cat([torch.zeros_like(v[:, :1]), v], dim=1).t())
    codes = to_code(divide(levels, top)[:, None] * v, 0, levels)
    return top / levels, codes.masked_fill((top == 0)[:, None], 0)


class _Asymmetric(WeightedBlock):
    """w = (d * sc[s]) * q - (dmin * m[s]); sc, m >= 0 per group s, q in 0..2**bits - 1.

    scale, offset = search_asymmetric of each group with its weights; d, sc from the scales
    and dmin, m from the offsets by _quantize_scales with `levels`; then
    q = clamp(rint((x + f16(dmin) * m) / (f16(d) * sc))).
    With an importance, d, sc, dmin and m are those of search_positive, each group weighing the sum
    of its weights.
    """

    block_values = 256
    group: int  # values in a group
    bits: int
    levels: int  # largest sc and m
    trials: tuple[float, float, int, bool]  # start, increment, last, absolute error

    def weights(self, x: Tensor) -> Tensor:
        """Importance of each element: sqrt((sum x^2) / n) + |x| over the n of a group."""
        return square_root(ordered_sum(x * x) / x.shape[0]) + x.abs()

    def search(self, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x f32 [B, 256] -> d f32 [B], dmin f32 [B], sc u8 [B, S], m u8 [B, S], q u8 [B, 256]."""
        blocks, high = x.shape[0], 2**self.bits - 1
        xt = elements_first(x, self.group)
        wt = self.weights(xt) if w is None else elements_first(w, self.group)
        trials = self.trials if w is None else WEIGHTED_TRIALS
        scale, offset, q = search_asymmetric(xt, wt, high, *trials)
        sums = None if w is None else ordered_sum(wt).reshape(blocks, -1)
        d, sc = _quantize_scales(scale.reshape(blocks, -1), self.levels, sums)
        dmin, m = _quantize_scales(offset.reshape(blocks, -1), self.levels, sums)
        spacing = (round_to_half(d)[:, None] * sc).reshape(-1)
        shift = (round_to_half(dmin)[:, None] * m).reshape(-1)
        q = groups_first(_requantize(xt + shift, spacing, q, 0, high), blocks)
        return d, dmin, sc.to(torch.uint8), m.to(torch.uint8), q.to(torch.uint8)

    def values(self, d: Tensor, dmin: Tensor, sc: Tensor, m: Tensor, q: Tensor) -> Tensor:
        """The equation of the class: d, dmin f32 [B, 1], sc, m u8 [B, S], q u8 [B, 256]."""
        codes = q.float().reshape(q.shape[0], -1, self.group)
        return ((d * sc)[:, :, None] * codes - (dmin * m)[:, :, None]).reshape(q.shape[0], -1)


class Q2_K(_Asymmetric):
    """scales[16] @0 (low nibble sc, high nibble m), qs[64] @16, d f16 @80, dmin f16 @82.

    Groups of 16; the search minimises sum |x| * |error|.
    """

    name, block_bytes = "q2_k", 84
    fallback = "iq4_nl"
    group, bits, levels, trials = 16, 2, 15, (-0.5, 0.1, 15, True)
    spread = 1

    def weights(self, x: Tensor) -> Tensor:
        return x.abs()

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d, dmin, sc, m, q = self.search(x, w)
        qs = join_fields(q, 2, 2)
        return torch.cat([sc | (m << 4), qs, half_to_bytes(d), half_to_bytes(dmin)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        d, dmin = bytes_to_half(blocks[:, 80:82]), bytes_to_half(blocks[:, 82:84])
        q = split_fields(blocks[:, 16:80], 2, 2)
        return self.values(d, dmin, blocks[:, :16] & 15, blocks[:, :16] >> 4, q)


class Q3_K(WeightedBlock):
    """w = (d * (sc - 32)) * (q - 4). hmask[32] @0, qs[64] @32, scales[12] @96, d f16 @108.

    Groups of 16. scale = search_descent; D = the scale of largest magnitude (first of equals);
    inv = -32 / D, sc = clamp(rint(inv * scale), -32, 31) + 32, d = 1 / inv; if D is 0 then all
    sc and d are 0. q = clamp(rint(x / (f16(d) * (sc - 32))), -4, 3) + 4.
    scales: low nibbles of bytes 0..7 = low 4 bits of sc 0..7, high nibbles those of sc 8..15;
    bits 2p, 2p+1 of byte 8 + i = high 2 bits of sc 4p + i. hmask holds bit 2 of q.
    With an importance, scale is that of search_symmetric, and so are d and sc, each group weighing
    the sum of its weights.
    """

    name, block_values, block_bytes = "q3_k", 256, 110
    fallback = "iq4_nl"
    spread = 2

    def search(self, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x f32 [B, 256] -> d f32 [B], sc f32 [B, 16], codes of the search f32 [16, 16 B]."""
        xt = elements_first(x, 16)
        if w is not None:
            wt = elements_first(w, 16)
            scale, q = search_symmetric(xt, 4, wt)
            sums = ordered_sum(wt).reshape(-1, 16).t().contiguous()
            d, sc = search_symmetric(scale.reshape(-1, 16).t().contiguous(), 32, sums)
            return d, sc.t(), q
        scale, q = search_descent(xt, 4)
        scale = scale.reshape(-1, 16)
        top = signed_max(scale.t())
        inv = divide(-32, top)
        d = divide(1, inv).masked_fill(top == 0, 0)
        sc = (to_code(inv[:, None] * scale, -32, 31) + 32).masked_fill((top == 0)[:, None], 0)
        return d, sc, q

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d, sc, q = self.search(x, w)
        spacing = (round_to_half(d)[:, None] * (sc - 32)).reshape(-1)
        q = groups_first(_requantize(elements_first(x, 16), spacing, q, -4, 3), x.shape[0])
        codes, sc = q.to(torch.uint8), sc.to(torch.uint8)
        scales = [join_fields(sc & 15, 1, 4), join_fields(sc >> 4, 1, 2)]
        qs = [join_fields(codes >> 2, 1, 1), join_fields(codes & 3, 2, 2)]
        return torch.cat([*qs, *scales, half_to_bytes(d)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        sc = split_fields(blocks[:, 96:104], 1, 4) | (split_fields(blocks[:, 104:108], 1, 2) << 4)
        q = split_fields(blocks[:, 32:96], 2, 2) | (split_fields(blocks[:, :32], 1, 1) << 2)
        spacing = bytes_to_half(blocks[:, 108:]) * (sc.float() - 32)
        return (spacing[:, :, None] * (q.float() - 4).reshape(-1, 16, 16)).reshape(-1, 256)


def _join_scales(sc: Tensor, m: Tensor) -> Tensor:
    """6-bit sc, m uint8 [B, 8] -> 12 bytes.

    Bytes 0..3 = sc[0..3] | (sc[4..7] >> 4) << 6, bytes 4..7 the same of m,
    bytes 8..11 = sc[4..7] & 15 | (m[4..7] & 15) << 4.
    """
    first = sc[:, :4] | ((sc[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    return torch.cat([first, second, (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)], dim=1)


def _split_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of _join_scales."""
    a, b, c = data[:, :4], data[:, 4:8], data[:, 8:]
    sc = torch.cat([a & 63, (c & 15) | ((a >> 6) << 4)], dim=1)
    return sc, torch.cat([b & 63, (c >> 4) | ((b >> 6) << 4)], dim=1)


class _Grouped32(_Asymmetric):
    """d f16 @0, dmin f16 @2, scales[12] @4 (8 sc and 8 m of 6 bits), then the codes.

    Groups of 32; the search minimises sum weight * error^2.
    """

    group, levels, spread = 32, 63, 2

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d, dmin, sc, m, q = self.search(x, w)
        head = [half_to_bytes(d), half_to_bytes(dmin), _join_scales(sc, m)]
        fifth = [join_fields(q >> 4, 1, 1)] if self.bits == 5 else []
        return torch.cat([*head, *fifth, join_fields(q & 15, 4, 4)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        d, dmin = bytes_to_half(blocks[:, :2]), bytes_to_half(blocks[:, 2:4])
        q = split_fields(blocks[:, -128:], 4, 4)
        if self.bits == 5:
            q = q | (split_fields(blocks[:, 16:48], 1, 1) << 4)
        return self.values(d, dmin, *_split_scales(blocks[:, 4:16]), q)


class Q4_K(_Grouped32):
    """qs[128] @16."""

    name, block_bytes, fallback = "q4_k", 144, "q5_0"
    bits, trials = 4, (-1.0, 0.1, 20, False)


class Q5_K(_Grouped32):
    """qh[32] @16, qs[128] @48; bit s of qh[l] is the fifth bit of element 32 * s + l."""

    name, block_bytes, fallback = "q5_k", 176, "q5_1"
    bits, trials = 5, (-0.5, 0.1, 15, False)


class Q6_K(WeightedBlock):
    """w = (d * sc) * (q - 32). ql[128] @0, qh[64] @128, sc i8[16] @192, d f16 @208.

    Groups of 16. scale = search_symmetric; D = the scale of largest magnitude (first of
    equals). If |D| < TINY all bytes are 0. inv = -128 / D, d = 1 / inv,
    sc = clamp(rint(inv * scale), -128, 127), q = clamp(rint(x / (f16(d) * sc)), -32, 31) + 32.
    """

    name, block_values, block_bytes = "q6_k", 256, 210
    fallback = "q8_0"
    spread = None

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        xt = elements_first(x, 16)
        scale, q = search_symmetric(xt, 32, None if w is None else elements_first(w, 16))
        scale = scale.reshape(-1, 16)
        top = signed_max(scale.t())
        inv = divide(-128, top)
        sc = to_code(inv[:, None] * scale, -128, 127)
        d = divide(1, inv)
        spacing = (round_to_half(d)[:, None] * sc).reshape(-1)
        q = groups_first(_requantize(xt, spacing, q, -32, 31), x.shape[0]).to(torch.uint8)
        qs = [join_fields(q & 15, 2, 4), join_fields(q >> 4, 2, 2)]
        out = torch.cat([*qs, sc.to(torch.int8).view(torch.uint8), half_to_bytes(d)], dim=1)
        return out.masked_fill((top.abs() < f32(TINY, x))[:, None], 0)

    def decode(self, blocks: Tensor) -> Tensor:
        q = split_fields(blocks[:, :128], 2, 4) | (split_fields(blocks[:, 128:192], 2, 2) << 4)
        sc = blocks[:, 192:208].contiguous().view(torch.int8).float()
        spacing = bytes_to_half(blocks[:, 208:]) * sc
        return (spacing[:, :, None] * (q.float() - 32).reshape(-1, 16, 16)).reshape(-1, 256)
