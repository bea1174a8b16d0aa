"""Activations and packed weights for the tests, the same in every process."""

from __future__ import annotations

import torch
from format_cases import HALF_FIELDS, UNIT_SCALE
from torch import Tensor

from torch_metalmm import formats

# {format whose scales are its first bytes: (their number, the least, above the largest)}: random
# weights of like size.
SCALE_BYTES = {"mxfp4": (1, 124, 128), "nvfp4": (4, 0x30, 0x40), "mxfp8": (2, 118, 122)}


def generator(*seed: object) -> torch.Generator:
    """Seeded by the text of its arguments, the same in every process."""
    return torch.Generator().manual_seed(
        sum(b * 31**i for i, b in enumerate(repr(seed).encode())) % 2**63
    )


def activations(*shape: int, dtype: torch.dtype = torch.float32, seed: object = 0) -> Tensor:
    """Normal x of this shape."""
    return torch.randn(shape, generator=generator("x", seed)).to(dtype)


def _uniform(shape: tuple[int, ...], low: float, high: float, g: torch.Generator) -> Tensor:
    sign = torch.where(torch.rand(shape, generator=g) < 0.5, -1.0, 1.0)
    return sign * (low + (high - low) * torch.rand(shape, generator=g))


def random_weight(name: str, n: int, k: int, seed: object = 0) -> Tensor:
    """uint8 [n, row_bytes]: every code and sub-scale random, the scales finite and of like size."""
    f, g = formats.get(name), generator("w", name, seed)
    if n * k == 0:
        return torch.empty(n, f.row_bytes(k), dtype=torch.uint8)
    if hasattr(f, "dtype") and f.block_values == 1:
        return f.quantize(torch.randn(n, k, generator=g))
    if isinstance(f, formats.Affine):
        groups = (n, k // f.block_values)
        high = 2**f.bits - 1
        codes = torch.randint(0, 256, (n, k * f.bits // 8), generator=g, dtype=torch.uint8)
        scales = _uniform(groups, 0.5 / high, 1.5 / high, g).to(f.dtype)
        return f.pack(codes.view(torch.uint32), scales, _uniform(groups, 0.0, 1.0, g).to(f.dtype))
    if name not in HALF_FIELDS:  # random bytes may be infinite scales
        return f.quantize(_uniform((n, k), 0.0, 1.0, g))
    blocks = torch.randint(
        0, 256, (n * k // f.block_values, f.block_bytes), generator=g, dtype=torch.uint8
    )
    if name in SCALE_BYTES:
        count, low, high = SCALE_BYTES[name]
        shape = (len(blocks), count)
        blocks[:, :count] = torch.randint(low, high, shape, generator=g, dtype=torch.uint8)
    for at in HALF_FIELDS[name]:
        field = _uniform((len(blocks), 1), 2.0**-8, 2.0**-6, g).half()
        blocks[:, at : at + 2] = field.view(torch.uint8)
    return blocks.reshape(n, f.row_bytes(k))


def integer_weight(name: str, n: int, k: int, seed: object = 0) -> Tensor:
    """uint8 [n, row_bytes] of multiples of 1/2, at most 256: sums of them are exact."""
    f, g = formats.get(name), generator("i", name, seed)
    if hasattr(f, "dtype") and f.block_values == 1:
        return f.quantize(torch.randint(-8, 9, (n, k), generator=g).float())
    if isinstance(f, formats.Affine):
        groups = (n, k // f.block_values)
        codes = torch.randint(0, 256, (n, k * f.bits // 8), generator=g, dtype=torch.uint8)
        scales = torch.randint(1, 2, groups, generator=g).to(f.dtype)
        biases = torch.randint(-(2**f.bits) + 1, 1, groups, generator=g).to(f.dtype)
        return f.pack(codes.view(torch.uint32), scales, biases)
    blocks = torch.randint(
        0, 256, (n * k // f.block_values, f.block_bytes), generator=g, dtype=torch.uint8
    )
    if name == "mxfp8":  # 4 ... 240
        codes = torch.randint(0x48, 0x78, blocks.shape, generator=g, dtype=torch.uint8)
        blocks = codes | (blocks & 0x80)
    for at, data in UNIT_SCALE[name][0].items():
        blocks[:, at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return blocks.reshape(n, f.row_bytes(k))


def uniform(dtype: torch.dtype, *shape: int, seed: object) -> Tensor:
    """Multiples of 2^-20 in [-4, 4)."""
    whole = torch.randint(-(2**22), 2**22, shape, generator=generator("uniform", seed))
    return (whole.float() / 2**20).to(dtype)


def packed_weight(name: str, n: int, k: int, seed: object) -> Tensor:
    """uint8 [n, row_bytes]."""
    if formats.get(name).block_values == 1:
        return formats.get(name).quantize(uniform(torch.float32, n, k, seed=seed))
    return random_weight(name, n, k, seed)


def long_k(name: str) -> int:
    """A K that takes the loops of every engine more than twice round and leaves a ragged rest."""
    block = formats.get(name).block_values
    return {1: 1061, 32: 1056, 64: 1088, 128: 1152, 256: 2304}[block]


def short_k(name: str) -> int:
    """A K that enters the loops of every engine and leaves a ragged rest of some."""
    block = formats.get(name).block_values
    return {1: 163, 32: 160, 64: 192, 128: 256, 256: 512}[block]
