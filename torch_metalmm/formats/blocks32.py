"""GGML formats of 32 values with one scale: q4_0, q4_1, q5_0, q5_1, q8_0.

Byte offsets are in the class docstrings. Low nibble of qs[j] = element j, high nibble =
element j + 16; bit j of the little-endian qh is the fifth bit of element j.
Codes are computed with the unrounded f32 scale; only then is the scale rounded to f16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import BlockFormat
from ._bits import bytes_to_half, half_to_bytes, join_fields, split_fields
from ._importance import WEIGHTED_TRIALS, WeightedBlock
from ._search import (
    elements_first,
    first_max,
    first_min,
    groups_first,
    reciprocal,
    search_asymmetric,
    search_symmetric,
    signed_max,
)


def _truncate(v: Tensor, high: int) -> Tensor:
    """trunc(v) clamped to [0, high], NaN to 0, as uint8."""
    return torch.nan_to_num(v, nan=0.0).trunc_().clamp_(0, high).to(torch.uint8)


class _Block32(WeightedBlock):
    """Scales as f16, then the codes: nibbles, of 5 bits behind the fifth ones as qh[4]."""

    block_values = 32
    bits: int
    spread, over_rows = 1, True

    def joined(self, q: Tensor) -> Tensor:
        """q uint8 [B, 32] < 2**bits -> uint8 [B, 4 * bits]."""
        nibbles = join_fields(q & 15, 1, 4)
        return nibbles if self.bits == 4 else torch.cat([join_fields(q >> 4, 4, 1), nibbles], 1)

    def split(self, data: Tensor) -> Tensor:
        """Inverse of joined, as f32."""
        if self.bits == 4:
            return split_fields(data, 1, 4).float()
        return (split_fields(data[:, 4:], 1, 4) | (split_fields(data[:, :4], 4, 1) << 4)).float()


class _Symmetric(_Block32):
    """w = d * (q - h), h = 2**(bits - 1); d = (the element of largest |x|, first of equals) / -h;
    q = min(trunc(x * (1 / d) + (h + 0.5)), 2 * h - 1), with 1 / 0 = 0.
    With an importance, d and q are those of search_symmetric.
    """

    def codes(self, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """x f32 [B, 32] -> d f32 [B], q uint8 [B, 32]."""
        half = 1 << (self.bits - 1)
        if w is not None:
            d, q = search_symmetric(elements_first(x, 32), half, elements_first(w, 32))
            return d, groups_first(q, x.shape[0]).to(torch.uint8)
        d = signed_max(elements_first(x, 32)) / -half
        q = _truncate(x * reciprocal(d)[:, None] + (half + 0.5), 2 * half - 1)
        return d, q

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d, q = self.codes(x, w)
        return torch.cat([half_to_bytes(d), self.joined(q)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        return bytes_to_half(blocks[:, :2]) * (self.split(blocks[:, 2:]) - (1 << (self.bits - 1)))


class _Asymmetric(_Block32):
    """w = d * q + m; m = min(x), d = (max(x) - min(x)) / (2**bits - 1);
    q = min(trunc((x - m) * (1 / d) + 0.5), 2**bits - 1), with 1 / 0 = 0.
    min and max are the first of equals, so the sign of a zero m is that of the first zero.
    With an importance, d, -m and q are those of search_asymmetric.
    """

    def codes(self, x: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x f32 [B, 32] -> d f32 [B], m f32 [B], q uint8 [B, 32]."""
        high = (1 << self.bits) - 1
        xt = elements_first(x, 32)
        if w is not None:
            d, m, q = search_asymmetric(xt, elements_first(w, 32), high, *WEIGHTED_TRIALS)
            return d, -m, groups_first(q, x.shape[0]).to(torch.uint8)
        m = first_min(xt)
        d = (first_max(xt) - m) / high
        q = _truncate((x - m[:, None]) * reciprocal(d)[:, None] + 0.5, high)
        return d, m, q

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d, m, q = self.codes(x, w)
        return torch.cat([half_to_bytes(d), half_to_bytes(m), self.joined(q)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        d, m = bytes_to_half(blocks[:, :2]), bytes_to_half(blocks[:, 2:4])
        return d * self.split(blocks[:, 4:]) + m


class Q4_0(_Symmetric):
    """d f16 @0, qs[16] @2."""

    name, block_bytes, bits = "q4_0", 18, 4


class Q4_1(_Asymmetric):
    """d f16 @0, m f16 @2, qs[16] @4."""

    name, block_bytes, bits = "q4_1", 20, 4


class Q5_0(_Symmetric):
    """d f16 @0, qh u32 @2, qs[16] @6."""

    name, block_bytes, bits = "q5_0", 22, 5


class Q5_1(_Asymmetric):
    """d f16 @0, m f16 @2, qh u32 @4, qs[16] @8."""

    name, block_bytes, bits = "q5_1", 24, 5


class Q8_0(BlockFormat):
    """w = d * q; d f16 @0, q i8[32] @2.

    d = max|x| / 127; q = x * (1 / d) rounded to nearest, halves away from 0, with 1 / 0 = 0.
    """

    name, block_values, block_bytes = "q8_0", 32, 34

    def encode(self, x: Tensor) -> Tensor:
        d = x.abs().amax(dim=1) / 127
        v = torch.nan_to_num(x * reciprocal(d)[:, None], nan=-128.0)
        whole = v.trunc()
        away = ((v - whole).abs() >= 0.5).float()
        q = (whole + away.copysign(v)).clamp_(-128, 127).to(torch.int8)
        return torch.cat([half_to_bytes(d), q.view(torch.uint8)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        q = blocks[:, 2:].contiguous().view(torch.int8).float()
        return bytes_to_half(blocks[:, :2]) * q
