"""GGML formats whose codes are indices of grids: iq1_s, iq1_m, iq2_*, iq3_*.

A code stands for eight values at once (iq3: four): a row of a grid, the tables of
metal/formats/grids, which this file reads. In iq2 and iq3 the row has magnitudes, and each value
a sign. llama.cpp chooses codes by an importance matrix, so that quantize refuses.

Chunk c is values [32c, 32c + 32), group g values [8g, 8g + 8); a block has 8 chunks, 32 groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import BlockFormat
from ._bits import bytes_to_half, split_fields

_FOLDER = __file__.removesuffix("grids.py") + "tables/"  # links into metal/formats/grids


def _table(file: str, name: str) -> list[int]:
    """The numbers of a table in a file of metal/formats/grids."""
    with open(_FOLDER + file) as lines:
        text = lines.read()
    numbers = text.partition(f" {name}[")[2].partition("{")[2].partition("}")[0]
    return [int(one.rpartition("(")[2].strip(" )\n"), 16) for one in numbers.split(",")[:-1]]


def _fields(table: list[int], bits: int, count: int) -> Tensor:
    """int64 [rows, count]: field i of each number, from its lowest bits."""
    rows = [[number >> bits * i & (1 << bits) - 1 for i in range(count)] for number in table]
    return torch.tensor(rows)


def _bits_of(data: Tensor) -> Tensor:
    """uint8 [B, n] -> int64 [B, 8 n], the lowest bit of each byte first."""
    bits = data[:, :, None].long() >> torch.arange(8, device=data.device) & 1
    return bits.reshape(len(data), -1)


def _u16(data: Tensor) -> Tensor:
    """uint8 [B, 2 n] -> int64 [B, n], little-endian."""
    pairs = data.long().reshape(len(data), -1, 2)
    return pairs[:, :, 0] | pairs[:, :, 1] << 8


def _nibbles(data: Tensor) -> Tensor:
    """uint8 [B, n] -> int64 [B, 2 n], the low nibble of each byte first."""
    return split_fields(data.reshape(-1, 1), 1, 4).reshape(len(data), -1).long()


def _fields_of_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int64 [B, n] -> int64 [B, n * count], the lowest field of each first."""
    shifts = torch.arange(0, bits * count, bits, device=words.device)
    return (words[:, :, None] >> shifts & (1 << bits) - 1).reshape(len(words), -1)


def _signs(codes: Tensor) -> Tensor:
    """Signs of groups by 7 bits: int64 [B, n] -> bits [B, 8 n]; the eighth makes their sum even."""
    bits = codes[:, :, None] >> torch.arange(7, device=codes.device) & 1
    return torch.cat([bits, bits.sum(2, keepdim=True) & 1], dim=2).reshape(len(codes), -1)


class _Grid(BlockFormat):
    """w = (d * scale) * value, of which every product is exact."""

    block_values, fallback = 256, "iq4_nl"
    packs = False
    table: tuple[str, str]  # file and name
    bits, count = 2, 8  # bits and number of the fields of a row of the table
    levels: tuple[int, ...] = ()  # the values that fields stand for; empty: the fields

    _GRIDS: dict[str, Tensor] = {}

    def grid(self, device: torch.device) -> Tensor:
        """f32 [rows, count]."""
        file, name = self.table
        if name not in self._GRIDS:
            fields = _fields(_table(file, name), self.bits, self.count)
            levels = torch.tensor(self.levels or range(1 << self.bits), dtype=torch.float32)
            self._GRIDS[name] = levels[fields]
        return self._GRIDS[name].to(device)

    def look_up(self, codes: Tensor) -> Tensor:
        """int64 [B, 256 / count] -> f32 [B, 256]."""
        return self.grid(codes.device)[codes].reshape(len(codes), -1)

    def encode(self, x: Tensor) -> Tensor:
        raise ValueError(self.refusal())

    @staticmethod
    def scaled(d: Tensor, scale: Tensor, values: Tensor) -> Tensor:
        """d f32 [B, 1], scale f32 [B, n], values f32 [B, 256] of n runs -> f32 [B, 256]."""
        return (d * scale).repeat_interleave(values.shape[1] // scale.shape[1], 1) * values


class IQ1_S(_Grid):
    """w = (d * (2 s + 1)) * (value + delta), value of -1, 0, 1.

    d f16 @0, qs[32] @2, qh u16[8] @34. Group g of chunk c: code = byte g of qs | bits
    [3j, 3j + 3) of qh[c] << 8, j = g % 4. s = bits 12 ... 14 of qh[c]; delta = -1/8 where bit 15
    is set, else 1/8.
    """

    name, block_bytes = "iq1_s", 50
    table, levels = ("table_iq1.h", "kGridIQ1"), (-1, 0, 1)

    def decode(self, blocks: Tensor) -> Tensor:
        qh = _u16(blocks[:, 34:])
        values = self.look_up(blocks[:, 2:34].long() | _fields_of_words(qh, 3, 4) << 8)
        delta = 0.125 - 0.25 * (qh >> 15).float()
        scale = 2 * (qh >> 12 & 7).float() + 1
        return self.scaled(
            bytes_to_half(blocks[:, :2]), scale, values + delta.repeat_interleave(32, 1)
        )


class IQ1_M(_Grid):
    """w = (d * (2 s + 1)) * (value + delta), value of -1, 0, 1.

    qs[32] @0, qh[16] @32, scales u16[4] @48. Group g: nibble g of qh, low ones first; code =
    byte g of qs | low 3 bits of the nibble << 8; delta = -1/8 where its bit 3 is set, else 1/8.
    d: f16 of the top nibbles of the scales, from the lowest. s of 16 values: bits
    [3i, 3i + 3), i < 4, of each of the scales in turn.
    """

    name, block_bytes = "iq1_m", 56
    table, levels = ("table_iq1.h", "kGridIQ1"), (-1, 0, 1)

    def decode(self, blocks: Tensor) -> Tensor:
        scales, qh = _u16(blocks[:, 48:]), _nibbles(blocks[:, 32:48])
        top = scales >> 12
        low, high = top[:, 0] | top[:, 1] << 4, top[:, 2] | top[:, 3] << 4
        d = bytes_to_half(torch.stack([low, high], dim=1).to(torch.uint8))
        values = self.look_up(blocks[:, :32].long() | (qh & 7) << 8)
        delta = 0.125 - 0.25 * (qh >> 3).float()
        scale = 2 * _fields_of_words(scales, 3, 4).float() + 1
        return self.scaled(d, scale, values + delta.repeat_interleave(8, 1))


class _Signed(_Grid):
    def signed(self, codes: Tensor, signs: Tensor) -> Tensor:
        """Codes int64 [B, 256 / count] and sign bits [B, 256] -> f32 [B, 256]."""
        return self.look_up(codes) * (1 - 2 * signs.float())


_IQ2 = 8, 25, 43


class IQ2_XXS(_Signed):
    """w = (d * (2 s + 1) / 8) * value.

    d f16 @0, then 8 bytes a chunk @2: four codes, and a u32 of four 7-bit signs and s (top 4 bits).
    """

    name, block_bytes = "iq2_xxs", 66
    table, levels = ("table_iq2.h", "kGridIQ2_XXS"), _IQ2

    def decode(self, blocks: Tensor) -> Tensor:
        words = _u16(blocks[:, 2:]).reshape(len(blocks), 8, 4)
        rest = words[:, :, 2] | words[:, :, 3] << 16
        codes = blocks[:, 2:].long().reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32)
        values = self.signed(codes, _signs(_fields_of_words(rest, 7, 4)))
        scale = (2 * (rest >> 28).float() + 1) / 8
        return self.scaled(bytes_to_half(blocks[:, :2]), scale, values)


class IQ2_XS(_Signed):
    """w = (d * (2 s + 1) / 8) * value.

    d f16 @0, qs u16[32] @2: 9 bits of code, 7 of signs; s of 16 values: nibbles @66, low first.
    """

    name, block_bytes = "iq2_xs", 74
    table, levels = ("table_iq2.h", "kGridIQ2_XS"), _IQ2

    def decode(self, blocks: Tensor) -> Tensor:
        qs = _u16(blocks[:, 2:66])
        scale = (2 * _nibbles(blocks[:, 66:]).float() + 1) / 8
        values = self.signed(qs & 511, _signs(qs >> 9))
        return self.scaled(bytes_to_half(blocks[:, :2]), scale, values)


class IQ2_S(_Signed):
    """w = (d * (2 s + 1) / 8) * value.

    d f16 @0, qs[32] @2, signs[32] @34, qh[8] @66, scales[8] @74. Group g: code = byte g of qs |
    bits [2j, 2j + 2) of byte g / 4 of qh << 8, j = g % 4; s of 16 values as in iq2_xs.
    """

    name, block_bytes = "iq2_s", 82
    table, levels = ("table_iq2.h", "kGridIQ2_S"), _IQ2

    def decode(self, blocks: Tensor) -> Tensor:
        high = _fields_of_words(blocks[:, 66:74].long(), 2, 4)
        values = self.signed(blocks[:, 2:34].long() | high << 8, _bits_of(blocks[:, 34:66]))
        scale = (2 * _nibbles(blocks[:, 74:]).float() + 1) / 8
        return self.scaled(bytes_to_half(blocks[:, :2]), scale, values)


class IQ3_XXS(_Signed):
    """w = (d * (2 s + 1) / 4) * value; a code stands for four values.

    d f16 @0, qs[64] @2, u32[8] @66: four 7-bit signs and s (top 4 bits) of a chunk.
    """

    name, block_bytes = "iq3_xxs", 98
    table, bits, count = ("table_iq3.h", "kGridIQ3_XXS"), 8, 4

    def decode(self, blocks: Tensor) -> Tensor:
        words = _u16(blocks[:, 66:]).reshape(len(blocks), 8, 2)
        rest = words[:, :, 0] | words[:, :, 1] << 16
        values = self.signed(blocks[:, 2:66].long(), _signs(_fields_of_words(rest, 7, 4)))
        scale = (2 * (rest >> 28).float() + 1) / 4
        return self.scaled(bytes_to_half(blocks[:, :2]), scale, values)


class IQ3_S(_Signed):
    """w = (d * (2 s + 1)) * value; a code stands for four values.

    d f16 @0, qs[64] @2, qh[8] @66, signs[32] @74, scales[4] @106. Code i: byte i of qs | bit i of
    qh << 8; s of a chunk: nibbles, low first.
    """

    name, block_bytes = "iq3_s", 110
    table, bits, count = ("table_iq3.h", "kGridIQ3_S"), 8, 4

    def decode(self, blocks: Tensor) -> Tensor:
        codes = blocks[:, 2:66].long() | _bits_of(blocks[:, 66:74]) << 8
        values = self.signed(codes, _bits_of(blocks[:, 74:106]))
        scale = 2 * _nibbles(blocks[:, 106:]).float() + 1
        return self.scaled(bytes_to_half(blocks[:, :2]), scale, values)
