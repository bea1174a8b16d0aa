"""GGML formats of one or two bits a code with one scale: tq1_0, tq2_0, q1_0, q2_0."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import BlockFormat
from ._bits import (
    bytes_to_half,
    codes_to_stream,
    half_to_bytes,
    join_fields,
    split_fields,
    stream_to_codes,
)
from ._search import elements_first, ordered_sum, reciprocal


class _Ternary(BlockFormat):
    """w = d * (q - 1), d = max|x|, q - 1 = x * (1 / d) rounded to nearest, halves away from 0, with
    1 / 0 = 0. K that the block does not divide becomes q4_0, as in llama.cpp.
    """

    block_values, fallback = 256, "q4_0"

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x f32 [B, block] -> d f32 [B], q uint8 [B, block]."""
        d = x.abs().amax(dim=1)
        v = torch.nan_to_num(x * reciprocal(d)[:, None], nan=0.0)
        q = (v >= 0.5).to(torch.uint8) + (v > -0.5).to(torch.uint8)
        return d, q


class TQ1_0(_Ternary):
    """qs[48] @0, qh[4] @48, d f16 @52. A byte is a fraction of five (qh: four) digits of base 3.

    Byte b of digits t0 t1 ... is ceil((81 t0 + 27 t1 + 9 t2 + 3 t3 + t4) * 256 / 243), so that
    digit n is the integer part of 3 / 256 times the low byte of 3**n b. Values by n, then by byte:
    0 ... 159 in bytes 0 ... 31, 160 ... 239 in bytes 32 ... 47, 240 ... 255 in qh.
    """

    name, block_bytes = "tq1_0", 54

    PARTS = ((0, 32, 5), (32, 16, 5), (48, 4, 4))  # first byte, bytes, digits of each

    def encode(self, x: Tensor) -> Tensor:
        d, q = self.codes(x)
        parts, first = [], 0
        for _, count, digits in self.PARTS:
            values = q[:, first : first + count * digits].reshape(-1, digits, count).int()
            places = torch.tensor([81, 27, 9, 3, 1][:digits], dtype=torch.int32)
            whole = (values * places[:, None].to(q.device)).sum(1)
            parts.append(((whole * 256 + 242) // 243).to(torch.uint8))
            first += count * digits
        return torch.cat([*parts, half_to_bytes(d)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        digits = []
        for first, count, n in self.PARTS:
            powers = torch.tensor([1, 3, 9, 27, 81][:n], dtype=torch.int32, device=blocks.device)
            low = blocks[:, None, first : first + count].int() * powers[:, None] & 255
            digits.append((low * 3 >> 8).reshape(len(blocks), -1))
        return bytes_to_half(blocks[:, 52:]) * (torch.cat(digits, dim=1).float() - 1)


class TQ2_0(_Ternary):
    """qs[64] @0, 2 bits a code, d f16 @64. Codes of weaves of 128 values, as in q2_k."""

    name, block_bytes = "tq2_0", 66

    def encode(self, x: Tensor) -> Tensor:
        d, q = self.codes(x)
        return torch.cat([join_fields(q, 2, 2), half_to_bytes(d)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        return bytes_to_half(blocks[:, 64:]) * (split_fields(blocks[:, :64], 2, 2).float() - 1)


class Q1_0(BlockFormat):
    """d f16 @0, qs[16] @2, a bit a value: w = d where it is 1, else -d.

    d = the sum of |x|, in the order of the values, / 128; the bit is x >= 0.
    """

    name, block_values, block_bytes, fallback = "q1_0", 128, 18, "q4_0"

    def encode(self, x: Tensor) -> Tensor:
        total = ordered_sum(elements_first(x.abs(), 128))
        return torch.cat([half_to_bytes(total / 128), codes_to_stream((x >= 0).byte(), 1)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        bits = stream_to_codes(blocks[:, 2:], 1).float()
        return bytes_to_half(blocks[:, :2]) * (2 * bits - 1)


class Q2_0(_Ternary):
    """d f16 @0, qs[16] @2, 2 bits a code; files also have the code 3, w = 2 d."""

    name, block_values, block_bytes = "q2_0", 64, 18

    def encode(self, x: Tensor) -> Tensor:
        d, q = self.codes(x)
        return torch.cat([half_to_bytes(d), codes_to_stream(q, 2)], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        return bytes_to_half(blocks[:, :2]) * (stream_to_codes(blocks[:, 2:], 2).float() - 1)
