"""GGML formats whose 4-bit codes are indices of a table: iq4_nl, iq4_xs, mxfp4."""

from __future__ import annotations

import torch
from torch import Tensor

from ._bits import bytes_to_half, half_to_bytes, join_fields, split_fields
from ._importance import WeightedBlock
from ._planes import Planes
from ._search import elements_first, nearest_level, reciprocal, search_levels, signed_max, to_code

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
IQ4_TRIES = 7

FP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # 2 * e2m1


def look_up(q: Tensor, table: tuple[int, ...]) -> Tensor:
    """f32 of the entries of `table` at q."""
    return torch.tensor(table, dtype=torch.float32, device=q.device)[q.long()]


def _search(x: Tensor, w: Tensor | None) -> Tensor:
    """search_levels of each 32 values of x f32 [B, K]."""
    weights = None if w is None else elements_first(w, 32)
    return search_levels(elements_first(x, 32), IQ4_LEVELS, IQ4_TRIES, weights)


class IQ4_NL(WeightedBlock):
    """w = d * IQ4_LEVELS[q]. d f16 @0, qs[16] @2, nibbles ordered as in q4_0.

    d = search_levels; q = nearest_level(x * (1 / d)) with the unrounded d and 1 / 0 = 0.
    """

    name, block_values, block_bytes = "iq4_nl", 32, 18
    spread = 2

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        d = _search(x, w)
        q = nearest_level(reciprocal(d)[:, None] * x, IQ4_LEVELS).to(torch.uint8)
        return torch.cat([half_to_bytes(d), join_fields(q, 1, 4)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        q = split_fields(blocks[:, 2:], 1, 4)
        return bytes_to_half(blocks[:, :2]) * look_up(q, IQ4_LEVELS)


class IQ4_XS(WeightedBlock):
    """w = (d * (sc - 32)) * IQ4_LEVELS[q]; groups of 32.

    d f16 @0, scales_h u16 @2, scales_l[4] @4, qs[128] @8 (16 bytes a group, as iq4_nl).
    sc of group s: low 4 bits in nibble s % 2 of scales_l[s / 2], high 2 in bits 2s of scales_h.
    scale = search_levels of each group; D = the one of largest magnitude (first of equals);
    d = -D / 32, l = clamp(rint((1 / d) * scale), -32, 31) with 1 / 0 = 0, sc = l + 32,
    q = nearest_level((1 / (d * l)) * x), with the unrounded d.
    """

    name, block_values, block_bytes = "iq4_xs", 256, 136
    fallback = "iq4_nl"
    spread = 2

    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        scale = _search(x, w).reshape(-1, 8)
        d = -signed_max(scale.t()) / 32
        sc = to_code(reciprocal(d)[:, None] * scale, -32, 31)
        inv = reciprocal(d[:, None] * sc)[:, :, None]
        q = nearest_level(inv * x.reshape(-1, 8, 32), IQ4_LEVELS).to(torch.uint8)
        sc = (sc + 32).to(torch.uint8)
        scales = [join_fields(sc >> 4, 2, 2), join_fields(sc & 15, 4, 4)]
        return torch.cat([half_to_bytes(d), *scales, join_fields(q, 8, 4)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        sc = split_fields(blocks[:, 4:8], 4, 4) | (split_fields(blocks[:, 2:4], 2, 2) << 4)
        spacing = bytes_to_half(blocks[:, :2]) * (sc.float() - 32)
        w = look_up(split_fields(blocks[:, 8:], 8, 4), IQ4_LEVELS).reshape(-1, 8, 32)
        return (spacing[:, :, None] * w).reshape(-1, 256)


# Values just below a power of two 2**n whose log2 rounds to n in f32, by floor(log2 |n|): those
# with mantissa 2**24 - j, 1 <= j <= floor(2**floor(log2 |n|) * ln 2).
_ROUNDS_UP = (0, 1, 2, 5, 11, 22, 44, 88)


def _floor_log2(x: Tensor) -> Tensor:
    """floor(log2(x) rounded to f32), int32, for f32 x >= 0 (0 and subnormals: -127).

    The rounding is that of ggml: 7.9999995 counts as 2**3. Written with integers only, since
    log2 of two libraries may differ: n = exponent + 1, j = multiples of 2**-24 relative below 2**n,
    and the result is n if j <= _ROUNDS_UP[k], k = floor(log2 |n|), less 1 if n is a positive
    power of two (the spacing of f32 halves there); no entry for k < 0.
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) - 127
    n = exponent + 1
    j = (1 << 23) - (bits & 0x7FFFFF)
    size = n.abs()
    k = ((size.float().view(torch.int32) >> 23) - 127) - ((n > 0) & (size & (size - 1) == 0)).int()
    limit = torch.tensor(_ROUNDS_UP, dtype=torch.int32, device=x.device)[k.clamp(min=0).long()]
    return torch.where((k >= 0) & (j <= limit), n, exponent)


class MXFP4(Planes):
    """w = 2**(e - 128) * FP4_DOUBLED[q]. e u8 @0, qs[16] @1, nibbles ordered as in q4_0.

    Code 8 decodes to +0. e = clamp(floor_log2(max|x|) - 2 + 127, 0, 254), 0 for a block of
    zeros; q = the first index with the smallest |2**(e - 128) * FP4_DOUBLED[q] - x|.
    """

    name, block_values, block_bytes = "mxfp4", 32, 17
    bits, group = 4, 32
    exact = torch.bfloat16  # 2 bits of mantissa, multiples of 2**-128

    @staticmethod
    def scale(e: Tensor) -> Tensor:
        """2**(e - 128) f32 for e uint8 or int, exact; 0 and 1 give subnormals."""
        e = e.int()
        return torch.where(e < 2, 0x00200000 << e, (e - 1) << 23).int().view(torch.float32)

    def join(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([scales, join_fields(codes, 1, 4)], dim=1)

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return split_fields(blocks[:, 1:], 1, 4), blocks[:, :1]

    def refused(self, codes: Tensor, scales: Tensor) -> str | None:
        return "a scale is NaN (e = 255)" if bool((scales == 255).any()) else None

    def encode(self, x: Tensor) -> Tensor:
        top = x.abs().amax(dim=1)
        e = (_floor_log2(top) + 125).clamp(0, 254).masked_fill(top == 0, 0)[:, None]
        d = self.scale(e)
        best = (d * FP4_DOUBLED[0] - x).abs()
        q = torch.zeros_like(x, dtype=torch.uint8)
        for code, value in enumerate(FP4_DOUBLED):
            error = (d * value - x).abs()
            q = torch.where(error < best, code, q)
            best = torch.where(error < best, error, best)
        return self.join(q, e.to(torch.uint8))

    def decode(self, blocks: Tensor) -> Tensor:
        q, e = self.split(blocks)
        return self.scale(e) * look_up(q, FP4_DOUBLED)
