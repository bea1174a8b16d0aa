"""Math, integer and packing functions of the stand-in against torch and Python."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from msl_kernels import HEAD, LANES, Batch
from torch import Tensor

from torch_metalmm.testing import MetalSource

PI = 3.14159274101257324219
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    n: getattr(torch, n)
    for n in (
        *("exp", "exp2", "log", "log2", "log10", "sin", "cos", "tan", "tanh", "sqrt", "rsqrt"),
        *("floor", "ceil", "trunc", "abs", "sinh", "cosh", "asin", "acos", "atan", "asinh"),
        "atanh",
    )
} | {
    "rint": torch.round,
    "saturate": lambda x: x.clamp(0, 1),
    "sign": torch.sign,
    "acosh": torch.acosh,
    "fabs": torch.abs,
    "exp10": lambda x: 10**x,
    "sinpi": lambda x: (x * PI).sin(),
    "cospi": lambda x: (x * PI).cos(),
    "fract": lambda x: x - x.floor(),
}
INSIDE = ("asin", "acos", "atanh")

# Functions of v = float(i) / 4 - 2.
FLOATS: dict[str, Callable[[float], float]] = {
    "fmax(0, v)": lambda v: max(0.0, v),
    "fmin(1, v / 6 + 0.5)": lambda v: min(1.0, v / 6 + 0.5),
    "max(v, -v)": abs,
    "clamp(v, -0.5f, 1.5f)": lambda v: min(max(v, -0.5), 1.5),
    "clamp(float2(v), 0, 1).y": lambda v: min(max(v, 0.0), 1.0),
    "max(float4(v, 1, 2, 3), 0.5f).x": lambda v: max(v, 0.5),
    "pow(v, 2)": lambda v: v * v,
    "powr(abs(v), 2.0f)": lambda v: v * v,
    "atan2(v, 2.0f)": lambda v: math.atan2(v, 2),
    "tanpi(v / 32)": lambda v: math.tan(v * math.pi / 32),
    "float(ilogb(abs(v) + 1))": lambda v: math.floor(math.log2(abs(v) + 1)),
    "float(as_type<ushort>(nextafter(half(v), 9.0h)) - as_type<ushort>(half(v)))": (
        lambda v: 1.0 if v >= 0 else -1.0
    ),
    "mix(v, 4.0f, 0.25f)": lambda v: v + (4 - v) * 0.25,
    "mix(float3(v), float3(4), 0.25f).z": lambda v: v + (4 - v) * 0.25,
    "fma(v, 2.0f, 1.0f)": lambda v: 2 * v + 1,
    "fma(float4(v), 2.0f, float4(1)).w": lambda v: 2 * v + 1,
    "mad(v, 2.0f, 1.0f)": lambda v: 2 * v + 1,
    "step(0.5f, v)": lambda v: float(v >= 0.5),
    "fdim(v, 1.0f)": lambda v: max(v - 1, 0.0),
    "fmod(v, 1.5f)": lambda v: abs(v) % 1.5 * (1 if v > 0 else -1),
    "copysign(3.0f, v)": lambda v: 3.0 if v >= 0 else -3.0,
    "divide(v, 4.0f)": lambda v: v / 4,
    "fmin3(v, 0.5f, 1.0f)": lambda v: min(v, 0.5, 1.0),
    "fmax3(v, 0.5f, 1.0f)": lambda v: max(v, 0.5, 1.0),
    "fmedian3(v, 0.5f, 1.0f)": lambda v: sorted((v, 0.5, 1.0))[1],
    "max3(v, 0.5f, 1.0f)": lambda v: max(v, 0.5, 1.0),
    "median3(float2(v), float2(0.5f), float2(1)).x": lambda v: sorted((v, 0.5, 1.0))[1],
    "ldexp(v, 3)": lambda v: v * 8,
    "select(1.0f, 2.0f, v > 0)": lambda v: 2.0 if v > 0 else 1.0,
    "select(float4(1), float4(2), int4(0, 1, 0, 1)).y": lambda v: 2.0,
    "precise::exp(fast::log(abs(v) + 1))": lambda v: abs(v) + 1,
    "metal::precise::sqrt(v * v)": abs,
    "dot(float3(v, 1, 2), float3(2, 3, 4))": lambda v: 2 * v + 11,
    "length(float2(v * 3, v * 4))": lambda v: 5 * abs(v),
    "length_squared(float2(v, 1))": lambda v: v * v + 1,
    "distance(float2(v, 3), float2(1, 3))": lambda v: abs(v - 1),
    "distance_squared(float2(v, 1), float2(1, 3))": lambda v: (v - 1) ** 2 + 4,
    "dot(cross(float3(1, v, 2), float3(3, 1, v)), float3(1, 2, 3))": (
        lambda v: (v * v - 2) + 2 * (6 - v) + 3 * (1 - 3 * v)
    ),
    "faceforward(float2(1, v), float2(v, 0), float2(1, 0)).x": lambda v: 1.0 if v < 0 else -1.0,
    "normalize(float2(0, abs(v) + 1)).y": lambda v: 1.0,
    "reflect(float2(v, 1), float2(0, 1)).y": lambda v: -1.0,
    "smoothstep(-2.0f, 6.0f, v)": lambda v: (t := (v + 2) / 8) * t * (3 - 2 * t),
    "float(isnan(v / 0 * 0))": lambda v: 1.0,
    "float(isinf(1 / (v - v)))": lambda v: 1.0,
    "float(signbit(v))": lambda v: float(v < 0),
    "float(isnormal(v) && isordered(v, v) && isunordered(v, v / 0 * 0))": lambda v: float(v != 0),
    "float(any(float2(v, 0) > 0) && !all(float2(v, 0) > 0))": lambda v: float(v > 0),
    "MAXFLOAT > v ? FLT_EPSILON : 0": lambda v: 2.0**-23,
    "unpack_unorm4x8_to_float(0xFF800033u)[0]": lambda v: 51 / 255,
    "unpack_snorm4x8_to_float(0x8100007Fu).w": lambda v: -1.0,
    "unpack_unorm2x16_to_float(0xFFFF0000u).y": lambda v: 1.0,
    "float(unpack_snorm2x16_to_half(0x80007FFFu).x)": lambda v: 1.0,
    "unpack_unorm10a2_to_float(0xC00003FFu).x": lambda v: 1.0,
    "dot(unpack_unorm10a2_to_float(0x80200401u), float4(1, 2, 4, 8))": (
        lambda v: (1 + 2 + 4 * 2) / 1023 + 8 * 2 / 3
    ),
    "float(unpack_unorm10a2_to_half(0xC0000000u).w)": lambda v: 1.0,
    "dot(unpack_unorm4x8_srgb_to_float(0x80000533u), float4(1, 2, 4, 8))": (
        lambda v: ((0.2 + 0.055) / 1.055) ** 2.4 + 2 * 5 / 255 / 12.92 + 8 * 128 / 255
    ),
    "float(pack_float_to_unorm4x8(float4(0, 1, 0.5f, 2)) >> 8)": lambda v: float(0xFF80FF),
    "float(pack_half_to_snorm2x16(half2(1, 0)))": lambda v: 32767.0,
}
# Functions of v = i * 0x9E3779B1 mod 2^31.
INTS: dict[str, Callable[[int], int]] = {
    "ctz(v)": lambda v: (v & -v).bit_length() - 1 if v else 32,
    "clz(v)": lambda v: 32 - v.bit_length(),
    "popcount(v)": lambda v: bin(v).count("1"),
    "int(clz(ushort(v)))": lambda v: 16 - (v & 0xFFFF).bit_length(),
    "extract_bits(uint(v), 3, 7)": lambda v: v >> 3 & 127,
    "extract_bits(v, 3, 7)": lambda v: ((v >> 3 & 127) ^ 64) - 64,
    "insert_bits(v, 5, 4, 3)": lambda v: v & ~0x70 | 0x50,
    "int2(insert_bits(int2(v), int2(5), 4, 3)).y": lambda v: v & ~0x70 | 0x50,
    "mulhi(uint(v), 77u)": lambda v: v * 77 >> 32,
    "mulhi(uint2(v), uint2(77)).x": lambda v: v * 77 >> 32,
    "madhi(v, 77, 5)": lambda v: (v * 77 >> 32) + 5,
    "madsat(v, 2, 1)": lambda v: min(2 * v + 1, 2**31 - 1),
    "int(rotate(uint(v), 9u))": lambda v: signed(v << 9 | v >> 23),
    "int(reverse_bits(uint(v)))": lambda v: signed(int(f"{v:032b}"[::-1], 2)),
    "int(absdiff(v, 1000000))": lambda v: abs(v - 1000000),
    "hadd(v, 7)": lambda v: (v + 7) >> 1,
    "rhadd(v, 7)": lambda v: (v + 8) >> 1,
    "addsat(v, 0x7FFFFFFF)": lambda v: 2**31 - 1,
    "int(subsat(uint(v), 0xFFFFFFFFu))": lambda v: 0,
    "mul24(v & 1023, 77)": lambda v: (v & 1023) * 77,
    "mad24(v & 1023, 77, 5)": lambda v: (v & 1023) * 77 + 5,
    "int(min(ushort(v), ushort(9)))": lambda v: min(v & 0xFFFF, 9),
    "clamp(v, 10, 1000)": lambda v: min(max(v, 10), 1000),
    "min3(v, 5, 9)": lambda v: min(v, 5, 9),
    "abs(-v)": abs,
    "int(as_type<uint>(as_type<float>(v)))": lambda v: v,
    "int(numeric_limits<short>::max() + numeric_limits<char>::lowest())": lambda v: 32767 - 128,
    "numeric_limits<int>::digits + numeric_limits<uchar>::digits": lambda v: 31 + 8,
    "is_vector_v<float2> && !is_vector_v<float>": lambda v: 1,
    "conjunction<is_integral<int>, is_integral<float>>::value": lambda v: 0,
    "array<float, 1>().empty()": lambda v: 0,
    "int(pack_float_to_snorm4x8(float4(-2, 2, 0, 0)))": lambda v: 0x7F81,
    "int(pack_half_to_unorm10a2(half4(0, 1, 0.5h, 0)))": lambda v: 1023 << 10 | 512 << 20,
    "int(pack_half_to_srgb_unorm4x8(half4(0.001h, 0.2h, 0, 0.25h)))": lambda v: 0x40007C03,
}


def signed(u: int) -> int:
    u &= 0xFFFFFFFF
    return u - (1 << 32) if u >> 31 else u


FLOAT_BATCH = Batch([(e, "float") for e in FLOATS])
INT_BATCH = Batch([(e, "int") for e in INTS])


def test_functions_of_floats() -> None:
    """On scalars and vectors, within two units of the last place of the largest term."""
    text = HEAD + "\n".join(
        f"kernel void {n}_(device float* x, device float* y, device float* v, device half* h, "
        f"uint i [[thread_position_in_grid]]) {{ y[i] = {n}(x[i]); v[i] = {n}(float4(x[i])).w; "
        f"h[i] = {n}(half(x[i])); }}"
        for n in UNARY
    )
    source = MetalSource(text)
    for n, f in UNARY.items():
        low, high = (0.01, 0.99) if n in INSIDE else (1.1 if n == "acosh" else 0.1, 6.5)
        x = torch.linspace(low, high, 64)
        x[0] = 1.5 if n == "acosh" else 0.5
        y, v, h = torch.empty(64), torch.empty(64), torch.empty(64, dtype=torch.half)
        source.function(f"{n}_")(1, 64, [x, y, v, h])
        want = f(x.double())
        assert torch.allclose(y.double(), want, rtol=1e-6, atol=1e-6), n
        assert torch.equal(y, v), n
        rounded = f(x.half().double()).half().double()
        assert torch.allclose(h.double(), rounded, rtol=2**-10, atol=2**-10 * 32), n


def test_constants() -> None:
    """The nearest f32 of each."""
    want = {
        "PI": math.pi, "PI_2": math.pi / 2, "PI_4": math.pi / 4, "1_PI": 1 / math.pi,
        "2_PI": 2 / math.pi, "2_SQRTPI": 2 / math.pi**0.5, "E": math.e, "LOG2E": 1 / math.log(2),
        "LOG10E": 1 / math.log(10), "LN2": math.log(2), "LN10": math.log(10), "SQRT2": 2**0.5,
        "SQRT1_2": 0.5**0.5,
    }  # fmt: skip
    body = "".join(f"y[{i}] = M_{name}_F; " for i, name in enumerate(want))
    y = torch.zeros(len(want))
    MetalSource(f"{HEAD}kernel void k(device float* y) {{ {body} }}").function("k")(1, 1, [y])
    assert y.tolist() == torch.tensor(list(want.values()), dtype=torch.float32).tolist()


@pytest.mark.parametrize("expression", FLOATS)
def test_float_expressions(expression: str) -> None:
    values = [i / 4 - 2 for i in LANES]
    want = [FLOATS[expression](v) for v in values]
    assert FLOAT_BATCH(expression, "float", values) == pytest.approx(want, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("expression", INTS)
def test_integer_expressions(expression: str) -> None:
    values = [i * 0x9E3779B1 & 0x7FFFFFFF for i in LANES]
    assert INT_BATCH(expression, "int", values) == [INTS[expression](v) for v in values]


def test_a_half_is_rounded_once() -> None:
    """Of sums next to ties, which they are where f32 holds them."""
    x = torch.arange(0x3C00, 0x3D00, dtype=torch.int16).view(torch.half)
    arguments = "device half* x, device half* y, uint i [[thread_position_in_grid]]"
    body = "y[i] = fma(x[i], half(1.5), as_type<half>(ushort(0x8001)));"
    y, exact = torch.empty_like(x), x.double() * 1.5 - 2.0**-24
    MetalSource(HEAD + f"kernel void k({arguments}) {{ {body} }}").function("k")(4, 64, [x, y])
    assert torch.equal(y, torch.from_numpy(exact.numpy().astype("float16")))
    assert not torch.equal(y, exact.float().half())
