"""Small floats with small floats for scales: nvfp4, mxfp8.

MLX quantizes both: the bytes here are those of mlx.quantize, in other places. e4m3 is sign, 4 bits
of exponent (bias 7), 3 of mantissa, without infinities: codes 0x7F and 0xFF, NaN elsewhere, count
as 480 and -480 here, and pack refuses them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._bits import as_bytes, join_fields, split_fields
from ._planes import Planes
from .codebook import FP4_DOUBLED, look_up

_E4M3_MAX = 448.0


def e4m3_of(x: Tensor) -> Tensor:
    """f32 -> its nearest e4m3 (ties to even, at most 448) as uint8."""
    near = x.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return as_bytes(near)


def e4m3_values(codes: Tensor) -> Tensor:
    """uint8 -> f32, exact."""
    exponent, mantissa = codes.int() >> 3 & 15, codes.int() & 7
    units = torch.where(exponent == 0, mantissa, (mantissa + 8) << (exponent - 1).clamp(min=0))
    return units.float().copysign(0.5 - (codes >= 128).float()) * 2.0**-9


class NVFP4(Planes):
    """w = s / 2 * FP4_DOUBLED[q]; s e4m3[4] @0, one of 16 values, its sign ignored; qs[32] @4.

    8 bytes a group: byte j has value j (low nibble) and j + 8. Code 8 and s of 0x7F give +0.
    s = e4m3_of(max|x| / 6); q = the first index with the smallest |FP4_DOUBLED[q] / 2 - x / s|
    (MLX's choice), 0 where s is 0; beyond the range of s, where MLX loses the codes, +6 or -6.
    """

    name, block_values, block_bytes = "nvfp4", 64, 36
    bits, group, fallback = 4, 16, "mxfp4"
    exact = torch.bfloat16  # 2 bits of mantissa times 4

    @staticmethod
    def scale(s: Tensor) -> Tensor:
        """s / 2 f32."""
        return torch.where(s == 0x7F, 0.0, e4m3_values(s & 0x7F) / 2)

    def join(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([scales, join_fields(codes, 4, 4)], dim=1)

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return split_fields(blocks[:, 4:], 4, 4), blocks[:, :4]

    def refused(self, codes: Tensor, scales: Tensor) -> str | None:
        return "a scale is negative or NaN" if bool((scales >= 0x7F).any()) else None

    def encode(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.group)
        s = e4m3_of(groups.abs().amax(dim=1) / 6)
        v = groups / e4m3_values(s)[:, None]
        q = torch.zeros_like(groups, dtype=torch.uint8)
        for low, high in zip(FP4_DOUBLED[:7], FP4_DOUBLED[1:8], strict=True):
            q += v.abs() > (low + high) / 4  # between neighbours, halved
        q |= ((v < 0) & (q > 0)).to(torch.uint8) << 3
        q = torch.where(s[:, None] == 0, 0, q)
        return self.join(q.reshape(-1, 64), s.reshape(-1, 4))

    def decode(self, blocks: Tensor) -> Tensor:
        q, s = self.split(blocks)
        return self.scale(s).repeat_interleave(16, 1) * look_up(q, FP4_DOUBLED)


class MXFP8(Planes):
    """w = 2**(e - 127) * e4m3_values(q); e u8[2] @0, one of 32 values; q u8[64] @2, in order.

    e = 255 is infinity. e = the least with max|x| <= 448 * 2**(e - 127), 127 for zeros, 0 where it
    would be less (MLX's wraps there); q = e4m3_of(x / 2**(e - 127)).
    """

    name, block_values, block_bytes = "mxfp8", 64, 66
    bits, group, fallback = 8, 32, "q8_0"

    @staticmethod
    def scale(e: Tensor) -> Tensor:
        """2**(e - 127) f32; 0 gives a subnormal."""
        return torch.where(e == 0, 0x00400000, e.int() << 23).int().view(torch.float32)

    def join(self, codes: Tensor, scales: Tensor) -> Tensor:
        return torch.cat([scales, codes], dim=1)

    def split(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        return blocks[:, 2:], blocks[:, :2]

    def refused(self, codes: Tensor, scales: Tensor) -> str | None:
        if bool((scales == 255).any()):
            return "a scale is NaN (e = 255)"
        return "a code is NaN (0x7F or 0xFF)" if bool((codes & 127 == 127).any()) else None

    def encode(self, x: Tensor) -> Tensor:
        groups = x.reshape(-1, self.group)
        top = groups.abs().amax(dim=1)
        bits = top.view(torch.int32)
        above = (bits & 0x7FFFFF) > 0x600000  # the mantissa of 448 is 1.75
        e = ((bits >> 23) - 8 + above.int()).clamp(min=0).masked_fill(top == 0, 127)
        q = e4m3_of(groups / self.scale(e)[:, None])
        return self.join(q.reshape(-1, 64), e.to(torch.uint8).reshape(-1, 2))

    def decode(self, blocks: Tensor) -> Tensor:
        q, e = self.split(blocks)
        return self.scale(e).repeat_interleave(32, 1) * e4m3_values(q)
