"""Matmul kernels as other projects write them, compiled unmodified and run by the emulator."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.testing import MetalSource

FOLDER = Path(__file__).parent / "metal_foreign"


def source(name: str) -> MetalSource:
    """version: array frameworks compile for the newest Metal, whose lambdas they use."""
    return MetalSource((FOLDER / f"{name}.metal").read_text(), name=f"{name}.metal", version=320)


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: every product and sum is exact, so that results are equal, not close."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=g).to(dtype)


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k"), [("matmul_naive", 1, 5, 3), ("matmul_tiled", 17, 33, 40)]
)
def test_tutorial_matmul(kernel: str, m: int, n: int, k: int) -> None:
    a, b = integers(m, k, seed=0), integers(k, n, seed=1)
    c = torch.full((m, n), torch.nan)
    grid = ((n + 15) // 16, (m + 15) // 16)
    source("tiled").function(kernel)(grid, (16, 16), [a, b, c, struct.pack("3I", m, n, k)])
    assert torch.equal(c, a @ b)


def test_vec4_matmul() -> None:
    a, b = integers(8, 12, seed=0), integers(12, 16, seed=1)
    c = torch.empty(8, 16)
    arguments = struct.pack("4I", 8, 16, 12, 0)
    source("tiled").function("matmul_vec4")((1, 1), (4, 8), [a, b, c, arguments])
    assert torch.equal(c, a @ b)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (33, 31), (70, 130)])
@pytest.mark.parametrize(
    ("name", "dtype", "bm"),
    [
        ("gemm_nt_float32_bm32_bn32_bk16", torch.float32, 32),
        ("gemm_nt_float16_bm64_bn32_bk32", torch.float16, 64),
        ("gemm_nt_bfloat16_bm32_bn32_bk16", torch.bfloat16, 32),
    ],
)
def test_simdgroup_gemm(name: str, dtype: torch.dtype, bm: int, m: int, n: int, bias: bool) -> None:
    k = 64
    a, b = integers(m, k, seed=2, dtype=dtype), integers(n, k, seed=3, dtype=dtype)
    row = integers(n, seed=4, dtype=dtype)
    d = torch.full((m, n), torch.nan, dtype=dtype)
    constants = {200: m % bm == 0, 201: n % 32 == 0} | ({10: True} if bias else {})
    gemm = source("steel").function(name, constants)
    gemm(
        ((n + 31) // 32, (m + bm - 1) // bm),
        128,
        [a, b, d, struct.pack("6i", m, n, k, k, k, n), row],
    )
    expected = a.float() @ b.float().T + (row.float() if bias else 0)
    assert torch.equal(d, expected.to(dtype))


def block_arguments(n: int, k: int, m: int, row_bytes: int) -> bytes:
    return struct.pack("iiQiiQ", k, n, row_bytes, n, m, 4 * k)


def test_packed_matvec() -> None:
    n, k = 37, 1024
    w = formats.get("q4_0").quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(5)))
    x = integers(1, k, seed=6)
    y = torch.full((1, n), torch.nan)
    matvec = source("blocks").function("kernel_mul_mv_q4_0_f32", {702: 2})
    matvec((5, 1), 64, [block_arguments(n, k, 1, w.shape[1]), w, x, y])
    expected = x.double() @ formats.get("q4_0").dequantize(w, k).double().T
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("n", "m"), [(64, 32), (100, 45)])
@pytest.mark.parametrize("name", ["q4_0", "f16"])
def test_packed_gemm(name: str, n: int, m: int) -> None:
    k = 96
    codes = integers(n, k, seed=7)
    w = formats.get(name).quantize(codes)
    x = integers(m, k, seed=8)
    y = torch.full((m, n), torch.nan)
    tail = n % 64 != 0 or m % 32 != 0
    gemm = source("blocks").function(f"kernel_mul_mm_{name}_f32", {701: tail, 702: 1})
    buffers = [block_arguments(n, k, m, w.shape[1]), w, x, y]
    gemm(((m + 31) // 32, (n + 63) // 64), 128, buffers, threadgroup_bytes=[8192])
    expected = x.double() @ formats.get(name).dequantize(w, k).half().double().T
    assert (y - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_function_pointer_arguments_and_conversions() -> None:
    w = formats.get("q8_0").quantize(torch.randn(2, 64, generator=torch.Generator().manual_seed(9)))
    y = torch.empty(2, 64)
    source("blocks").function("kernel_get_rows_q8_0")(1, 32, [w, y])
    assert torch.equal(y, formats.get("q8_0").dequantize(w, 64).half().float())


@pytest.mark.parametrize("transposed", [False, True])
def test_gemm_in_registers(transposed: bool) -> None:
    m, n, k = 32, 24, 40
    a, b = integers(m, k, seed=10, dtype=torch.half), integers(k, n, seed=11, dtype=torch.half)
    c = torch.full((m, n), torch.nan)
    constants = {0: m, 1: n, 2: k, 11: transposed}
    gemm = source("registers").function("gemm_registers", constants)
    gemm((n // 8, m // 16), 64, [a, b.T.contiguous() if transposed else b, c])
    assert torch.equal(c, a.float() @ b.float())


@pytest.mark.parametrize(("name", "dtype"), [("float", torch.float32), ("half", torch.float16)])
def test_reduction_from_a_macro(name: str, dtype: torch.dtype) -> None:
    x, y = integers(200, seed=12, dtype=dtype), torch.zeros(1, dtype=dtype)
    source("registers").function(f"reduce_max_{name}")(1, 256, [struct.pack("Q", 200), x, y])
    assert y.item() == x.max().item()


def test_structs_in_device_memory() -> None:
    a, b = (torch.view_as_complex(integers(32, 2, seed=s)) for s in (13, 14))
    c = torch.zeros(32, dtype=torch.complex64)
    source("registers").function("complex_mul")(1, 32, [a, b, c])
    assert torch.equal(c, a * b)
