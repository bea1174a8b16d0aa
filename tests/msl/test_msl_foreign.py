"""Kernels of MLX, from the headers of its package, and a text with ggml's names, run by the
emulator. Every product and sum of their operands is exact: results are equal, not close."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from places import mlx_include
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.shaders import foreign
from torch_metalmm import formats
from torch_metalmm.formats.affine import Affine
from torch_metalmm.testing import MetalSource

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat16_t"}
DTYPES = tuple(TYPES)


def integers(*shape: int, seed: int, dtype: torch.dtype = torch.float32, high: int = 4) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=g).to(dtype)


@functools.cache
def mlx(instances: tuple[str, ...], *headers: str) -> MetalSource:
    """Kernels mlx_0, mlx_1, ...; for the newest Metal, whose lambdas they use."""
    text = foreign.mlx(mlx_include(), instances, *([headers] if headers else []))
    return MetalSource(text.text, name=text.name, include=text.include, version=320)


# Tile (rows, columns, K) of a threadgroup of four simdgroups; whether A, B lie transposed.
STEEL = (((32, 32, 16), (0, 1)), ((64, 32, 32), (0, 0)), ((32, 64, 16), (1, 0)))


@pytest.mark.parametrize("source", ["none", "added", "scaled"])
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (33, 30, 50), (70, 130, 64)])
@pytest.mark.parametrize("case", range(3))
def test_steel_gemm(case: int, m: int, n: int, k: int, source: str) -> None:
    (bm, bn, bk), (ta, tb) = STEEL[case]
    dtype, swizzle, batch = DTYPES[case], 1, 2
    a, b, c = (
        integers(batch, *shape, seed=i, dtype=dtype)
        for i, shape in enumerate([(m, k), (k, n), (m, n)])
    )
    left = a.mT.contiguous() if ta else a
    right = b.mT.contiguous() if tb else b
    tiles_n, tiles_m = -(-n // bn), -(-m // bm)
    sizes = (m, n, k, left.shape[2], right.shape[2], n, tiles_n, tiles_m, m * k, k * n, m * n)
    params = struct.pack("8i3q3i4x", *sizes, swizzle, k // bk, 0)
    alpha, beta = (2, -3) if source == "scaled" else (1, 1)
    add = struct.pack("2iq2f", n, 1, m * n, alpha, beta)
    instances = tuple(
        f"gemm<{TYPES[d]}, {', '.join(map(str, tile))}, 2, 2, {', '.join(map(str, transposed))}>"
        for d, (tile, transposed) in zip(DTYPES, STEEL, strict=True)
    )
    headers = ("utils", "steel/gemm/gemm", "steel/gemm/kernels/steel_gemm_fused")
    has_source = source != "none"
    constants = {10: False, 100: has_source, 110: source == "scaled"}
    constants |= {200: m % bm == 0, 201: n % bn == 0, 202: k % bk == 0}
    # Rows of C behind the last are read at an edge; what comes of them is not stored.
    behind = torch.cat([c.flatten(), torch.zeros(bm * n, dtype=dtype)])
    d = torch.full((batch, m, n), torch.nan, dtype=dtype)
    grid = (tiles_n << swizzle, -(-tiles_m >> swizzle), batch)
    buffers = [left, right, behind if has_source else None, d, params, add if has_source else None]
    mlx(instances, *headers).function(f"mlx_{case}", constants)(grid, 128, buffers)
    want = a.double() @ b.double()
    want = alpha * want + beta * c.double() if has_source else want
    assert torch.equal(d, want.to(dtype))


AFFINE = ("affine2_g64", "affine3_g32_bf16", "affine4_g128_f32", "affine6_g64")


def exact_weights(f: Affine, n: int, k: int) -> Tensor:
    """W that f packs without a loss: every group has all codes' ends, at a scale of its own."""
    g = torch.Generator().manual_seed(f.bits)
    least, most = -(2 ** (f.bits - 1)), 2 ** (f.bits - 1) - 1
    w = torch.randint(least, most + 1, (n, k // f.block_values, f.block_values), generator=g)
    w[..., 0], w[..., -1] = least, most
    scales = 0.5 ** torch.randint(0, 4, w.shape[:2], generator=g)
    return (w * scales[..., None]).reshape(n, k).float()


@pytest.mark.parametrize(
    ("kernel", "m", "n", "k"),
    [("qmv_fast", 2, 24, 1024), ("qmv", 2, 13, 384), ("qmm_t", 37, 45, 128)],
)
@pytest.mark.parametrize("name", AFFINE)
def test_mlx_reads_what_we_pack(name: str, kernel: str, m: int, n: int, k: int) -> None:
    f = formats.get(name)
    assert isinstance(f, Affine)
    w, x = exact_weights(f, n, k), integers(m, k, seed=1, dtype=f.dtype)
    packed = f.quantize(w)
    assert torch.equal(f.dequantize(packed, k), w)
    y = torch.full((m, n), torch.nan, dtype=f.dtype)
    arguments = f"{TYPES[f.dtype]}, {f.block_values}, {f.bits}"
    kernels = ("qmv_fast", "qmv", "qmm_t")
    instances = tuple(
        f"affine_{kind}<{arguments}, {'false, ' * (kind == 'qmm_t')}false>" for kind in kernels
    )
    grid = (-(-n // 32), -(-m // 32)) if kernel == "qmm_t" else (m, -(-n // 8))
    group = 128 if kernel == "qmm_t" else 64
    buffers = [*f.unpack(packed, k), x, y, k, n, m]
    mlx(instances).function(f"mlx_{kernels.index(kernel)}")(grid, group, buffers)
    assert torch.equal(y, (x.double() @ w.double().T).to(f.dtype))


@pytest.mark.parametrize("axpby", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_gemv(dtype: torch.dtype, axpby: bool) -> None:
    """Of one simdgroup for a row: those of several read partial sums behind a barrier without
    mem_threadgroup, where the emulator reports a missing one."""
    n, k, beta = 27, 150, -2.0
    w, x, bias = (
        integers(*shape, seed=i, dtype=dtype, high=1)
        for i, shape in enumerate([(n, k), (k,), (n,)])
    )
    instances = tuple(f"gemv<{TYPES[dtype]}, 4, 1, 1, 32, 4, 4, 0, {flag}>" for flag in (0, 1))
    y = torch.full((n,), torch.nan, dtype=dtype)
    stride = bytes(8)
    buffers = [w, x, bias, y, k, n, k, 3.0, beta, 1, 1, stride, stride, stride, 1]
    gemv = mlx(instances, "gemv").function(f"mlx_{int(axpby)}")
    gemv(-(-n // 16), 128, buffers)
    product = w.double() @ x.double()
    want = 3 * product + beta * bias.double() if axpby else product
    assert torch.equal(y, want.to(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mlx_attention(dtype: torch.dtype, causal: bool) -> None:
    """Scores are equal or 128 apart, each key has a twin: weights are 0, 1 or halves."""
    heads, kv_heads, rows, keys, size = 4, 2, 3, 46, 64
    q = 128 * integers(heads, rows, size, seed=0, dtype=dtype)
    k = integers(kv_heads, keys // 2, size, seed=1, dtype=dtype).repeat_interleave(2, 1)
    v = integers(kv_heads, keys, size, seed=2, dtype=dtype)
    y = torch.full_like(q, torch.nan)
    strides = [struct.pack("Q", s) for s in (keys * size, size) * 2]
    constants = {20: False, 21: False, 22: causal, 23: False, 24: False, 25: False}
    source = mlx((f"sdpa_vector<{TYPES[dtype]}, {size}>",), "utils", "sdpa_vector")
    buffers = [q, k, v, y, heads // kv_heads, keys, *strides, 1.0]
    source.function("mlx_0", constants)((heads, rows), 1024, buffers)
    mask = torch.ones(rows, keys).tril(keys - rows).bool() if causal else None
    want = scaled_dot_product_attention(
        *(t.double()[None] for t in (q, k, v)), attn_mask=mask, scale=1.0, enable_gqa=True
    )
    assert torch.equal(y, want[0].to(dtype))


def test_mlx_complex_numbers() -> None:
    """A struct with members for every address space."""
    a, b = (torch.view_as_complex(integers(33, 2, seed=s)) for s in (3, 4))
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    types = "complex64_t, complex64_t"
    multiply = mlx((f"binary_vv<{types}, Multiply>",), "utils", "binary_ops", "binary")
    multiply.function("mlx_0")(2, 32, [a, b, c, 33], threads=33)
    conjugate = mlx((f"unary_v<{types}, Conjugate>",), "utils", "unary_ops", "unary")
    conjugate.function("mlx_0")(2, 32, [a, d, 33], threads=33)
    assert torch.equal(c, a * b) and torch.equal(d, a.conj())


def test_mlx_reduction() -> None:
    x, y = integers(900, seed=3), torch.zeros(1)
    headers = ("utils", "atomic", "reduction/ops", "reduce")
    reduce = mlx(("all_reduce<float, float, Max<float>>",), *headers).function("mlx_0")
    sizes = [struct.pack("Q", x.numel())] * 2
    x[731] = 9
    reduce(1, 64, [x, y, *sizes])
    assert y.item() == 9


@functools.cache
def packed() -> MetalSource:
    file = Path(__file__).with_name("packed.metal")
    return MetalSource(file.read_text(), name=file.name)


@pytest.mark.parametrize(("m", "n"), [(8, 16), (13, 37)])
@pytest.mark.parametrize("name", ["mv_q4_0", "mm_q4_0", "mm_f16"])
def test_names_of_ggml(name: str, m: int, n: int) -> None:
    product, format = name.split("_", 1)
    k = 1088 if product == "mv" else 96
    w = formats.get(format).quantize(integers(n, k, seed=5))
    x, y = integers(m, k, seed=6), torch.full((m, n), torch.nan)
    grid: Sequence[int] = (-(-n // 2), m) if product == "mv" else (-(-n // 16), -(-m // 8))
    buffers = [struct.pack("4i", k, n, m, w.shape[1]), w, x, y]
    packed().function(f"kernel_mul_{name}_f32")(grid, 32, buffers, threadgroup_bytes=[1536])
    assert torch.equal(y, x @ formats.get(format).dequantize(w, k).T)
