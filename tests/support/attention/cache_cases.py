"""Caches of one layer for the tests of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attention_oracle import Traits
from inputs import activations
from torch import Tensor

from torch_metalmm import formats

CACHE_FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0")


def pack(name: str, rows: Tensor) -> Tensor:
    """Rows [..., D] of the format by its specification, uint8 [..., row_bytes]."""
    flat = rows.reshape(-1, rows.shape[-1])
    f = formats.get(name)
    return f.quantize(flat).reshape(*rows.shape[:-1], f.row_bytes(rows.shape[-1]))


def unpack(name: str, packed: Tensor, dim: int) -> Tensor:
    flat = packed.reshape(-1, packed.shape[-1])
    return formats.get(name).dequantize(flat, dim).reshape(*packed.shape[:-1], dim)


def as_stored(name: str, packed: Tensor) -> Tensor:
    """Packed rows of a dense format as values of its dtype, others as they are."""
    dtype = formats.DTYPES.get(name)
    return packed if dtype is None else packed.view(dtype)


def unwritten(name: str, *shape: int, byte: int = 255) -> Tensor:
    """Slots [..., D] that nobody has written, of this byte: 255 is NaN, or decodes to it."""
    row = formats.get(name).row_bytes(shape[-1])
    return as_stored(name, torch.full((*shape[:-1], row), byte, dtype=torch.uint8))


@dataclass
class Layer:
    """A cache whose slots behind `length` hold NaN, or bytes that decode to it."""

    keys: Tensor
    values: Tensor
    k: Tensor  # f32 [B, kv_heads, length, D], as decoded
    v: Tensor
    format_k: str
    format_v: str
    length: int


def layer(
    sizes: tuple[int, int, int, int],
    length: int,
    names: tuple[str, str],
    seed: object = 0,
    packed_rows: Callable[[str, Tensor], Tensor] = pack,
) -> Layer:
    """A cache of [B, kv_heads, capacity, D], its first `length` slots random.

    packed_rows(format, rows): [N, row_bytes] of normal rows [N, D].
    """
    batch, kv_heads, capacity, dim = sizes
    rows, decoded = [], []
    for i, name in enumerate(names):
        x = activations(batch, kv_heads, length, dim, seed=(seed, i))
        packed = packed_rows(name, x.view(-1, dim))
        packed = packed.view(batch, kv_heads, length, packed.shape[-1])
        empty = torch.full((batch, kv_heads, capacity, packed.shape[-1]), 255, dtype=torch.uint8)
        empty[:, :, :length] = packed
        rows.append(as_stored(name, empty))
        decoded.append(unpack(name, packed, dim))
    return Layer(rows[0], rows[1], decoded[0], decoded[1], names[0], names[1], length)


@dataclass
class Call:
    """A call of attention."""

    q: Tensor
    cache: Layer
    traits: Traits
