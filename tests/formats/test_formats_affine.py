"""The affine formats against mlx."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from format_cases import AFFINE, KINDS, same_bits, weights
from torch import Tensor

from torch_metalmm import formats

mx = pytest.importorskip("mlx.core")
from mlx_files import from_mlx  # noqa: E402


def to_mlx(t: Tensor) -> mx.array:
    if t.dtype == torch.bfloat16:
        return mx.array(t.view(torch.uint16).numpy()).view(mx.bfloat16)
    return mx.array(t.numpy())


def mlx_quantize(w: Tensor, f: formats.Affine) -> list[mx.array]:
    return mx.quantize(to_mlx(w), group_size=f.block_values, bits=f.bits)


def mlx_weights() -> Tensor:
    return torch.cat([weights(kind, 1, 512) for kind in KINDS if kind != "vanishing"])


@pytest.mark.quick
@pytest.mark.parametrize("name", AFFINE)
def test_equals_mlx(name):
    f = formats.get(name)
    w = mlx_weights()
    w = torch.where(w.abs() > 6e4, w.sign(), w).to(f.dtype)
    codes, scales, biases = mlx_quantize(w, f)
    expected = f.pack(from_mlx(codes), from_mlx(scales), from_mlx(biases))
    packed = f.quantize(w)
    assert torch.equal(packed, expected)
    for plane, theirs in zip(f.unpack(packed, 512), (codes, scales, biases), strict=True):
        assert torch.equal(plane.view(torch.uint8), from_mlx(theirs).view(torch.uint8))
    assert bool((packed[:, f.block_bytes * 512 // f.block_values :] == 0).all())


@pytest.mark.parametrize("name", AFFINE)
def test_dequantize_equals_mlx(name):
    """Ours is MLX's f32 result. Its f16 and bf16 results round the product and the sum to T."""
    f = formats.get(name)
    w = weights("normal", 8, 512).to(f.dtype)
    packed, (codes, scales, biases) = f.quantize(w), mlx_quantize(w, f)
    sizes = {"group_size": f.block_values, "bits": f.bits}
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    got = f.dequantize(packed, 512)
    assert same_bits(got, from_mlx(mx.dequantize(codes, *wide, **sizes)))

    _, s, b = f.unpack(packed, 512)
    units = from_mlx(mx.dequantize(codes, mx.ones_like(wide[0]), mx.zeros_like(wide[1]), **sizes))
    product = units.to(f.dtype).reshape(8, -1, f.block_values) * s[:, :, None]
    narrow = (product + b[:, :, None]).reshape(8, 512)
    assert torch.equal(narrow, from_mlx(mx.dequantize(codes, scales, biases, **sizes)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_the_scales_of_a_wider_source_only_when_stored(dtype):
    f = next(formats.get(n) for n in AFFINE if "4_g64" in n and formats.get(n).dtype == dtype)
    w = weights("normal", 8, 512)
    codes, scales, biases = mlx_quantize(w, f)
    expected = f.pack(from_mlx(codes), from_mlx(scales).to(dtype), from_mlx(biases).to(dtype))
    assert torch.equal(f.quantize(w), expected)


@pytest.mark.parametrize("name", AFFINE)
def test_pack_and_unpack_keep_every_bit(name):
    f = formats.get(name)
    g = torch.Generator().manual_seed(3)
    for k in (f.block_values, 5 * f.block_values, 1024):
        shapes = (k * f.bits // 8, *[k // f.block_values * f.dtype.itemsize] * 2)
        planes = [torch.randint(0, 256, (3, s), generator=g).to(torch.uint8) for s in shapes]
        given = [p.view(t) for p, t in zip(planes, (torch.uint32, f.dtype, f.dtype), strict=True)]
        packed = f.pack(*given)
        assert packed.shape == (3, f.row_bytes(k)) and f.row_bytes(k) % 16 == 0
        for plane, back in zip(planes, f.unpack(packed, k), strict=True):
            assert torch.equal(back.view(torch.uint8), plane)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_are_a_little_endian_bit_stream(bits):
    f = formats.get(f"affine{bits}_g32_f32")
    codes = np.random.RandomState(bits).randint(0, 2**bits, 4096)
    stream = sum(int(c) << (bits * i) for i, c in enumerate(codes)).to_bytes(512 * bits, "little")
    words = torch.frombuffer(bytearray(stream), dtype=torch.uint32)[None]
    packed = f.pack(words, torch.full((1, 128), 1.0), torch.full((1, 128), -3.0))
    assert f.dequantize(packed, 4096)[0].tolist() == [c - 3 for c in codes]
    assert set(codes) == set(range(2**bits))


def test_pack_names_the_wrong_argument():
    affine = formats.get("affine4_g64")
    codes, plane = torch.zeros(2, 16, dtype=torch.uint32), torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="codes must be uint32"):
        affine.pack(codes.view(torch.int32), plane, plane)
    with pytest.raises(ValueError, match=r"scales must be torch.float16 \[2, 2\], got torch.float"):
        affine.pack(codes, plane.float(), plane)
    with pytest.raises(ValueError, match=r"biases must be torch.float16 \[2, 2\], .* \[2, 1\]"):
        affine.pack(codes, plane, plane[:, :1])
