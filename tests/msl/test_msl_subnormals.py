"""The emulator's mode that drops subnormals of f32 and bf16, as Apple's GPUs do; f16 keeps them."""

from __future__ import annotations

import pytest
import torch
from inputs import SCALE_BYTES, generator, random_weight
from msl_kernels import kernel, same
from oracle import flushed, flushed_spec, spec
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.testing import MetalSource, emulated

TYPES = {"float": torch.float32, "bfloat": torch.bfloat16, "half": torch.float16}
BINARY = {"+": torch.add, "-": torch.sub, "*": torch.mul, "/": torch.div}


def every_exponent() -> Tensor:
    """f32 of both signs: each exponent with the first, the last and some other mantissas."""
    g = generator("mantissas")
    mantissas = torch.randint(0, 2**23, (256, 12), generator=g, dtype=torch.int64)
    mantissas[:, 0], mantissas[:, 1], mantissas[:, 2] = 0, 2**23 - 1, 1
    bits = torch.arange(256)[:, None] << 23 | mantissas
    bits = torch.cat([bits.flatten(), bits.flatten() | 1 << 31])
    return bits.to(torch.uint32).view(torch.float32)


def inputs(name: str) -> Tensor:
    """All values of a 16-bit type; of f32, all exponents."""
    if name == "float":
        return every_exponent()
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(TYPES[name])


def compute(source: MetalSource, *buffers: Tensor, flush: bool = True) -> None:
    n = buffers[0].numel()
    source.function("k")((n + 63) // 64, 64, buffers, threads=n, flush_subnormals=flush)


def wide(a: Tensor, b: Tensor, f: object) -> Tensor:
    """f(a, b) in f64, rounded to f32: once, since f64 has more than twice the digits."""
    return f(a.double(), b.double()).float()  # type: ignore[operator]


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_arithmetic(name: str, flush: bool) -> None:
    """Operands and results of + - * / are flushed where their type is, and nowhere else."""
    dtype, a = TYPES[name], inputs(name)
    tiny = torch.tensor([2.0**-70, 1.0, -(2.0**-133), 2.0**70, 0.0], dtype=torch.float32)
    operands = [a.flip(0), *(v.to(dtype).expand_as(a) for v in tiny)]
    source = kernel(
        "s[i] = a[i] + b[i]; d[i] = a[i] - b[i]; p[i] = a[i] * b[i]; q[i] = a[i] / b[i];",
        f"device const {name}* a, device const {name}* b, device {name}* s, device {name}* d, "
        f"device {name}* p, device {name}* q",
    )
    drops = flush and name != "half"
    for b in operands:
        got = [torch.empty_like(a) for _ in BINARY]
        compute(source, a, b.contiguous(), *got, flush=flush)
        x, y = a.float(), b.float()
        if drops:
            x, y = flushed(x), flushed(y)
        for result, f in zip(got, BINARY.values(), strict=True):
            exact = wide(x, y, f)
            want = (flushed(exact) if drops else exact).to(dtype)
            edge = near_the_edge(f, x, y) if drops else torch.zeros_like(x, dtype=torch.bool)
            assert same(result[~edge], want[~edge]), f
            assert set(result[edge].float().abs().tolist()) <= {0.0, 2.0**-126}


def near_the_edge(f: object, x: Tensor, y: Tensor) -> Tensor:
    """Whether the exact result is below 2^-126 and rounds to it.

    Processors may tell before they round or after that a result is subnormal.
    """
    exact = f(x.double(), y.double()).abs()  # type: ignore[operator]
    return (exact < 2.0**-126) & (exact > 2.0**-126 * (1 - 2.0**-23))


def test_conversions() -> None:
    """Subnormal f32 converts to zeros of bf16 and f16; f16 subnormals widen and come back."""
    x = every_exponent()
    b, h, back = (torch.empty(x.shape, dtype=d) for d in (torch.bfloat16, torch.half, torch.half))
    halves = inputs("half")[: x.numel()]
    source = kernel(
        "b[i] = bfloat(x[i]); h[i] = half(x[i]); back[i] = half(float(halves[i]) * 1.5f);",
        "device const float* x, device const half* halves, device bfloat* b, device half* h, "
        "device half* back",
    )
    compute(source, x, halves, b, h, back)
    assert same(b, flushed(x).bfloat16())
    assert same(h, x.half())
    assert same(back, (halves.float() * 1.5).half())
    assert (h.abs() < 2.0**-14).logical_and(h != 0).any()


def test_bits_that_only_move_are_kept() -> None:
    """Loads, stores, as_type and selections are no arithmetic."""
    x = every_exponent()
    y, z, s = (torch.zeros_like(x) for _ in range(3))
    source = kernel(
        "y[i] = x[i]; z[i] = as_type<float>(as_type<uint>(x[i])); s[i] = i % 2 ? x[i] : 0.0f;",
        "device const float* x, device float* y, device float* z, device float* s",
    )
    compute(source, x, y, z, s)
    bits = x.view(torch.int32)
    assert torch.equal(y.view(torch.int32), bits) and torch.equal(z.view(torch.int32), bits)
    assert torch.equal(s.view(torch.int32)[1::2], bits[1::2])


def test_fused_sums_and_collectives() -> None:
    """fma and the sums of a simdgroup and of its matrices, which the scheduler computes."""
    x = torch.full((64,), 2.0**-127)
    x[32:] = 2.0**-125
    y, m = torch.zeros(64), torch.full((64,), torch.nan)
    source = kernel(
        "y[i] = simd_sum(x[i]); simdgroup_float8x8 a, b(1), c;"
        "if (i < 32) { simdgroup_load(a, x, 8); simdgroup_multiply(c, a, b); "
        "simdgroup_store(c, m, 8); } y[i] += fma(x[i], 1.0f, 0.0f);",
        "device const float* x, device float* y, device float* m",
    )
    compute(source, x, y, m)
    assert same(y, torch.cat([torch.zeros(32), torch.full((32,), 33 * 2.0**-125)]))
    assert same(m, flushed(x))
    compute(source, x, y, m, flush=False)
    assert same(y[:32], torch.full((32,), 33 * 2.0**-127)) and same(m, x)


def near_subnormals(name: str, n: int, k: int) -> Tensor:
    """Packed W of scales, biases and values around 2^-126, of which terms cancel too."""
    f, g = formats.get(name), generator("near", name)
    if name in SCALE_BYTES:
        packed = random_weight(name, n, k).view(n, -1, f.block_bytes)
        scales = packed[:, :, : SCALE_BYTES[name][0]]
        scales.copy_(torch.randint(0, 4, scales.shape, generator=g, dtype=torch.uint8))
        return packed.view(n, -1)
    if not isinstance(f, formats.Affine):
        scale = torch.exp2(torch.randint(-130, -122, (n, k), generator=g).float())
        return f.quantize(torch.randn(n, k, generator=g) * scale)
    codes, scales, biases = f.unpack(random_weight(name, n, k), k)
    shift = torch.randint(-128, -120, scales.shape, generator=g)
    bias = -scales.float() * torch.randint(0, 4, scales.shape, generator=g)
    bias = torch.where(shift % 2 == 0, bias, biases.float())
    scales, biases = (torch.ldexp(t.float(), shift).to(f.dtype) for t in (scales, bias))
    return f.pack(codes, scales, biases)


@pytest.mark.parametrize("forced", ["gemv", "gemv_batched", "gemm"])
@pytest.mark.parametrize(
    "name",
    ["f32", "bf16", "mxfp4", "mxfp8", "affine4_g32_bf16", "affine3_g64_f32", "affine8_g64_f32"],
)
def test_weights(name: str, forced: str) -> None:
    """Decoding flushes factors and values, exactly; dense weights, which only move, may be kept."""
    n, k = 11, 256
    packed = near_subnormals(name, n, k)
    kept, want = spec(name, packed, k), flushed_spec(name, packed, k)
    assert not same(kept, want) and (want != 0).any()
    with emulated(flush_subnormals=True):
        w = torch.ops.metalmm.dequantize(packed, name, k, dtype=torch.float32)
        y = torch.ops.metalmm.linear(torch.eye(k)[::9], packed, None, name, forced)
    assert same(w, want) or (name in ("f32", "bf16") and same(w, kept))
    assert torch.equal(y, want.T[::9])


def test_the_mode_ends_with_the_launch() -> None:
    """The thread that launches is one of the emulator's workers."""
    tiny, w = torch.tensor([2.0**-100]), torch.full((1, 32), 2.0**-130).view(torch.uint8)
    with emulated(flush_subnormals=True):
        assert torch.ops.metalmm.linear(torch.ones(1, 32), w, None, "f32").item() == 0
    source = kernel("y[1 << 20] = x[i];")
    with pytest.raises(RuntimeError, match="out of bounds"):
        compute(source, tiny, torch.zeros(1))
    assert (tiny * 2.0**-40).item() == 2.0**-140


def test_a_caller_that_flushes_changes_nothing() -> None:
    """Without the mode subnormals are kept, whatever the thread that launches does with them."""
    x, y = torch.full((1,), 2.0**-130), torch.zeros(1)
    assert torch.set_flush_denormal(True)
    try:
        compute(kernel("y[i] = x[i] * 2.0f;"), x, y, flush=False)
    finally:
        torch.set_flush_denormal(False)
    assert y.item() == 2.0**-129
