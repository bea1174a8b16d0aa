"""mxfp4, mxfp8 and nvfp4 against mlx: planes of codes and of scales."""

from __future__ import annotations

import pytest
import torch
from format_cases import KINDS, same_bits, weights
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.formats._planes import Planes

mx = pytest.importorskip("mlx.core")
from mlx_files import from_mlx  # noqa: E402

PLANES = ("mxfp4", "mxfp8", "nvfp4")
QUANTIZED = ("mxfp8", "nvfp4")  # by MLX's rules; mxfp4 by ggml's
K = 1024


def mlx_packed(w: Tensor, name: str) -> Tensor:
    """uint8 [N, row_bytes] of what mlx makes of w."""
    return formats.get(name).pack(*map(from_mlx, mx.quantize(mx.array(w.numpy()), mode=name)))


def planes(name: str, n: int = 16) -> tuple[Tensor, Tensor]:
    """Random codes and scales that both have."""
    f, g = formats.get(name), torch.Generator().manual_seed(3)
    codes = torch.randint(0, 256, (n, K * f.bits // 8), generator=g).to(torch.uint8)
    if name == "mxfp8":
        codes = torch.where(codes & 127 == 127, 0, codes)
    high = 0x7F if name == "nvfp4" else 255
    scales = torch.randint(0, high, (n, K // f.group), generator=g).to(torch.uint8)
    return codes.view(torch.uint32), scales


@pytest.mark.parametrize("name", PLANES)
def test_dequantize_equals_mlx(name: str) -> None:
    """Every code and scale; but where ggml's code 8 is +0, MLX's is -0."""
    f, (codes, scales) = formats.get(name), planes(name)
    theirs = mx.dequantize(mx.array(codes.numpy()), mx.array(scales.numpy()), mode=name,
                           dtype=mx.float32)  # fmt: skip
    got = f.dequantize(f.pack(codes, scales), K)
    assert torch.equal(got, from_mlx(theirs))
    if f.bits == 8:
        assert same_bits(got, from_mlx(theirs))


@pytest.mark.parametrize("name", PLANES)
def test_pack_and_unpack_keep_every_bit(name: str) -> None:
    f, given = formats.get(name), planes(name)
    packed = f.pack(*given)
    assert packed.shape == (16, f.row_bytes(K))
    for plane, back in zip(given, f.unpack(packed, K), strict=True):
        assert plane.dtype == back.dtype
        assert torch.equal(plane.view(torch.uint8), back.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantize_equals_mlx(name: str, kind: str) -> None:
    w = weights(kind)
    if name == "nvfp4" and kind == "huge":  # beyond 448 * 6
        w = w.clamp(-2688, 2688)
    if name == "mxfp8" and kind == "vanishing":  # e would be below 0
        w = w * 2.0**20
    assert torch.equal(formats.get(name).quantize(w), mlx_packed(w, name))


def test_values_between_neighbours_round_as_mlx_rounds_them() -> None:
    """Scales and codes of e4m3 half way between two, and one step of f32 beside that."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    for step in (-1, 0, 1):
        v = (middle.view(torch.int32) + step).view(torch.float32)
        w = torch.zeros(126, 64)
        w[:, 5] = -6 * v  # scales, of which 6 v / 6 is v
        assert torch.equal(formats.get("nvfp4").quantize(w), mlx_packed(w, "nvfp4"))
        w = torch.cat([v, -v, torch.zeros(4)]).reshape(4, 64)
        w[:, ::32] = 448.0  # so that the scale is 1
        assert torch.equal(formats.get("mxfp8").quantize(w), mlx_packed(w, "mxfp8"))


def test_beyond_the_range_of_the_scales() -> None:
    """MLX's exponent wraps below 0, its codes of 4 bits become 0; here they stay near."""
    tiny = torch.full((1, 64), 2.0**-130)
    f = formats.get("mxfp8")
    assert torch.equal(f.dequantize(f.quantize(tiny), 64), tiny)
    huge = torch.full((1, 64), -1e30)
    f = formats.get("nvfp4")
    assert torch.equal(f.dequantize(f.quantize(huge), 64), torch.full((1, 64), -448.0 * 6))


@pytest.mark.parametrize("name", [n for n in formats.names() if formats.get(n).exact.itemsize < 4])
def test_a_smaller_dtype_has_every_value(name: str) -> None:
    f = formats.get(name)
    every = torch.arange(1 << 16).to(torch.int16).view(torch.uint8).view(-1, 2)
    if isinstance(f, Planes):  # each code with each scale
        codes, scales = every[:, :1], every[:, 1:]
        codes = codes.expand(-1, f.block_values) & (1 << f.bits) - 1
        packed = f.join(codes, scales.expand(-1, f.block_values // f.group))
    else:
        packed = every
    w = f.dequantize(packed.contiguous(), f.block_values)
    assert torch.equal(w.to(f.exact).float().nan_to_num(0), w.nan_to_num(0))
    narrow = torch.ops.metalmm.dequantize(packed.contiguous(), name, f.block_values, dtype=f.exact)
    assert torch.equal(narrow.float().nan_to_num(0), w.nan_to_num(0))


def test_pack_names_the_wrong_argument() -> None:
    f = formats.get("mxfp8")
    codes, scales = planes("mxfp8")
    with pytest.raises(ValueError, match=r"mxfp8: codes must be uint32 \[N, K \* 8 / 32\]"):
        f.pack(codes.view(torch.int32), scales)
    with pytest.raises(ValueError, match=r"mxfp8: scales must be torch.uint8 \[16, 32\], .*, 31\]"):
        f.pack(codes, scales[:, :31])
    with pytest.raises(ValueError, match="mxfp8: K = 96 is not a multiple of the block of 64"):
        f.pack(codes[:, :24], scales[:, :3])
    wrong = {
        "mxfp4": (0, 255, "a scale is NaN"),
        "mxfp8": (0, 255, "a scale is NaN"),
        "nvfp4": (0, 0x80, "a scale is negative or NaN"),
    }
    for name, (at, value, said) in wrong.items():
        codes, scales = planes(name)
        scales[3, at] = value
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            formats.get(name).pack(codes, scales)
    codes, scales = planes("mxfp8")
    codes.view(torch.uint8)[2, 7] = 0xFF
    with pytest.raises(ValueError, match="mxfp8: a code is NaN"):
        f.pack(codes, scales)
