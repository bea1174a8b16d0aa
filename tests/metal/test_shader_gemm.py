"""The matrix kernels of metal/ on the lockstep emulator, every launch under both schedules."""

from __future__ import annotations

import mmap
from typing import Any

import plan_cases
import pytest
import shaders
import torch
from backends import ONE_OF_EACH, around
from inputs import activations, random_weight
from oracle import DTYPES, FORMATS, Value, check, spec
from places import ROOT
from shaders import NAMES, alignment_of, arranged_of, launch, memory_of
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.testing import EmulatorFault, MetalSource

pytestmark = pytest.mark.shaders

STRATEGIES = tuple(name for name in plan_cases.STRATEGIES if name.startswith("gemm"))
KINDS = ("f32", "bf16", "q4_0", "q5_1", "q6_k", "affine3_g64_bf16")
DENSE = {"f32": 4, "f16": 2, "bf16": 2}  # bytes of a value
METAL = ROOT / "metal"

PARTIAL = _C.EPILOGUE_BITS["partial"]


def multiply(
    strategy: str,
    name: str,
    packed: Tensor,
    x: Tensor,
    *,
    gaps: tuple[int, int] = (0, 0),
    k_per_part: int = 0,
    bias: Tensor | None = None,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> Tensor:
    """alpha x Wᵀ + bias + beta c [M, N]; with k_per_part the f32 sums of the parts [parts, M, N].

    gaps: elements between rows of x, bytes between rows of W.
    """
    (m, k), n = x.shape, packed.shape[0]
    memory = {"x": memory_of(x, gaps[0]), "weight": memory_of(packed, gaps[1])}
    plan = _C.plan(
        m=m, n=n, k=k, format=name, dtype=NAMES[x.dtype], chip="m1", strategy=strategy,
        bias=bias is not None, c=c is not None, alpha=alpha, beta=beta, gpu={"cores": 1},
        x_stride=k + gaps[0], w_stride=packed.shape[1] + gaps[1],
        x_alignment=alignment_of(memory["x"]), w_alignment=alignment_of(memory["weight"]),
    )  # fmt: skip
    (*arranging, one) = plan["passes"]
    memory |= {"y2": arranged_of(plan)}
    for first in arranging:
        launch(first, memory)
    y = torch.full((m, n), torch.nan, dtype=x.dtype)
    if k_per_part:
        parts = -(-k // k_per_part)
        y = torch.full((parts, m, n), torch.nan)
        one["args"] |= {"k_per_part": k_per_part, "parts": parts}
        one["constants"]["epilogue"] = PARTIAL
        one["grid"][2] = parts
    unbound = torch.full((1,), torch.nan)
    optional = {"bias": unbound if bias is None else bias, "c": unbound if c is None else c}
    launch(one, memory | optional | {"y": y})
    return y


def expected(strategy: str, x: Tensor, w: Tensor) -> Value:
    """x Wᵀ in f32, as the strategy computes it: the matrix kernels round W to f16 for f16 x."""
    halved = _C.strategy(strategy)["rounds_to_half"] and x.dtype == torch.float16
    return Value.of(x).dot(w, halved=halved)


def some_k(name: str) -> int:
    """More than two steps of every kernel, with a tail where the format has one."""
    block = formats.get(name).block_values
    return {1: 291, 32: 288, 64: 320}.get(block, 2 * block)


@pytest.mark.every_format(kernel="gemm")
@pytest.mark.parametrize("kernel", STRATEGIES)
@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_gives_the_weight(name: str, kernel: str) -> None:
    """Row i of x picks value i of every row of W: the output is W, rounded once to the dtype.

    For f16, affine4 may round the exact value instead of that of f32: no weight here differs.
    """
    k = some_k(name)
    packed = random_weight(name, 3, k)
    w = spec(name, packed, k)
    for i, dtype in enumerate(DTYPES):
        picked = torch.arange(i, k, 3)
        y = multiply(kernel, name, packed, torch.eye(k, dtype=dtype)[picked])
        want = w.T[picked].to(dtype)
        assert torch.equal(y, want), (dtype, (y != want).nonzero()[:3].tolist())


@pytest.mark.parametrize("kernel", ("gemm", "gemm_small"))
def test_affine4_in_halves(kernel: str) -> None:
    """Scales and biases of both signs and of every exponent, up to 2^11: the weights, rounded once
    from the exact value or from the specification's f32 value."""
    random, k = torch.Generator().manual_seed(0), 64 * 32
    exponents = torch.stack([torch.arange(64), torch.arange(64) * 7 + 3]) % 26 << 10
    bits = exponents + torch.randint(0, 1 << 10, (2, 64), generator=random)
    bits += torch.randint(0, 2, (2, 64), generator=random) << 15
    scales = bits.to(torch.int32).to(torch.uint16).view(torch.float16)
    codes = random_weight("affine4_g32", 1, k)[:, : k // 2]
    packed = torch.cat([codes.flatten(), scales.view(torch.uint8).flatten()])[None]
    w = spec("affine4_g32", packed, k)[0]
    some = torch.arange(0, k, 3)  # 10 or 11 of each group, of both nibbles of a byte
    y = multiply(kernel, "affine4_g32", packed, torch.eye(k, dtype=torch.float16)[some])[:, 0]
    nibbles = torch.stack([codes[0] & 15, codes[0] >> 4], 1).double().view(64, 32)
    exact = (nibbles * scales[0].double()[:, None] + scales[1].double()[:, None]).flatten()[some]
    once = torch.from_numpy(exact.numpy().astype("float16"))  # torch rounds to f32 first
    w = w[some]
    assert w.abs().max() > 1e4 and ((w != 0) & (w.abs() < 2**-14)).any()
    assert bool(((y == once) | (y == w.half())).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", STRATEGIES)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_format(name: str, kernel: str, dtype: torch.dtype) -> None:
    """Random x, with tails of M and N, rows side by side and rows apart."""
    k = some_k(name)
    packed, x = random_weight(name, 67, k), activations(11, k, dtype=dtype)
    want = expected(kernel, x, spec(name, packed, k)).store(dtype)
    gaps = ((0, 0), (3, DENSE.get(name, 16)), (-k % 4 + 4, 48))[DTYPES.index(dtype)]
    check(multiply(kernel, name, packed, x, gaps=gaps), want, f"{name} {kernel} gaps={gaps}")


@pytest.mark.parametrize("kernel", STRATEGIES)
@pytest.mark.parametrize("name", KINDS)
def test_around_the_edges_of_the_tile(name: str, kernel: str) -> None:
    """M and N at 1, one below, at, one above and twice above the tile; M up to 130, and such that
    a tile of gemm has one matrix of x, two, and five.

    Dtypes take turns: each sees every edge, of another N where the format is another.
    """
    tile = _C.strategy(kernel)
    ms, ns = ({1, *around(tile[size])} for size in "mn")
    ms, ns = sorted(ms | {8, 9, 40, 130}), sorted(ns)
    k = formats.get(name).block_values
    k = {1: 65, 32: 96, 64: 128}.get(k, k)
    packed, x = random_weight(name, ns[-1], k), activations(ms[-1], k)
    xs = [x.to(dtype) for dtype in DTYPES]
    wants = [expected(kernel, x, spec(name, packed, k)).store(x.dtype) for x in xs]
    turn = KINDS.index(name)
    for i, m in enumerate(ms):
        for n in ns[i % 2 :: 2]:
            x, want = xs[turn % 3], wants[turn % 3]
            y = multiply(kernel, name, packed[:n], x[:m])
            check(y, Value(want.exact[:m, :n], want.error[:m, :n]), f"{x.dtype} M={m} N={n}")
            turn += 1


@pytest.mark.parametrize("kernel", STRATEGIES)
@pytest.mark.parametrize("name", DENSE)
def test_every_k_of_dense_rows(name: str, kernel: str) -> None:
    """K around every step: values beyond K are not read, and count as zero."""
    step = _C.strategy(kernel)["k"]
    for i, k in enumerate(sorted({*range(1, 20), *around(step), 3 * step + 17})):
        packed, x = random_weight(name, 5, k), activations(9, k, dtype=DTYPES[i % 3])
        want = expected(kernel, x, spec(name, packed, k)).store(x.dtype)
        for gaps in ((0, 0), (-k % 4, -k * DENSE[name] % 16), (1, DENSE[name])):
            y = multiply(kernel, name, packed, x, gaps=gaps)
            check(y, want, f"{name} K={k} gaps={gaps}")


@pytest.mark.parametrize("kernel", STRATEGIES)
@pytest.mark.parametrize("name", KINDS)
def test_parts_of_k(name: str, kernel: str) -> None:
    """Split K leaves the f32 sum of each part, whatever the dtype; the last part is shorter.

    A dtype takes every third format.
    """
    block = formats.get(name).block_values
    step = max(_C.strategy(kernel)["k"], block)
    k = 4 * step + (5 if block == 1 else step)
    packed = random_weight(name, 70, k)
    w = spec(name, packed, k)
    x = activations(35, k, dtype=DTYPES[KINDS.index(name) % 3])
    y = multiply(kernel, name, packed, x, k_per_part=2 * step)
    assert y.dtype == torch.float32 and len(y) == 3
    for i, part in enumerate(y):
        cut = slice(2 * step * i, 2 * step * (i + 1))
        check(part, expected(kernel, x[:, cut], w[:, cut]), f"{name} part {i}")


@pytest.mark.parametrize("kernel", STRATEGIES)
def test_epilogue(kernel: str) -> None:
    """alpha x Wᵀ + bias + beta c, each alone and all together, rounded once."""
    packed = random_weight("q4_0", 70, 64)
    w = spec("q4_0", packed, 64)
    for dtype in DTYPES:
        x = activations(35, 64, dtype=dtype)
        bias, c = activations(70, dtype=dtype, seed="b"), activations(35, 70, dtype=dtype, seed="c")
        terms: list[dict[str, Any]] = [{"bias": bias}, {"alpha": -0.37}, {"c": c, "beta": 1.7}]
        for given in (*terms, terms[0] | terms[1] | terms[2]):
            want = expected(kernel, x, w) * given.get("alpha", 1.0)
            if "bias" in given:
                want = want + Value.of(bias)
            if "c" in given:
                want = want + Value.of(c) * given["beta"]
            y = multiply(kernel, "q4_0", packed, x, **given)
            check(y, want.store(dtype), f"{dtype} {sorted(given)}")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kernel", STRATEGIES)
def test_large_activations_stay_finite(kernel: str, dtype: torch.dtype) -> None:
    """x beyond the range of f16: none is staged through half."""
    packed, x = random_weight("q4_k", 9, 256), (activations(9, 256) * 2.0**100).to(dtype)
    want = expected(kernel, x, spec("q4_k", packed, 256)).store(dtype)
    check(multiply(kernel, "q4_k", packed, x), want, kernel)


def far_apart(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros that take no memory until they are written."""
    size = count * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)


@pytest.mark.parametrize("kernel", STRATEGIES)
def test_offsets_beyond_32_bits(kernel: str) -> None:
    """Rows of x, W and y 2^30 elements apart: offsets pass 2^32 bytes, and elements 2^31."""
    m, n, k, stride = 9, 6, 64, 2**30
    packed, x = random_weight("q8_0", n, k), activations(m, k, dtype=torch.float16)
    memory = {"weight": far_apart((n - 1) * stride + packed.shape[1], torch.uint8)}
    memory |= {s: far_apart((m - 1) * stride + k, x.dtype) for s in ("x", "y")}
    memory["x"].as_strided(x.shape, (stride, 1)).copy_(x)
    memory["weight"].as_strided(packed.shape, (stride, 1)).copy_(packed)
    strides = {"x_stride": stride, "w_stride": stride, "y_stride": stride}
    plan = _C.plan(m=m, n=n, k=k, format="q8_0", chip="m1", strategy=kernel, **strides)
    unbound = torch.full((1,), torch.nan)
    memory |= {"bias": unbound, "c": unbound, "y2": arranged_of(plan)}
    for one in plan["passes"]:
        launch(one, memory, "ascending")
    want = expected(kernel, x, spec("q8_0", packed, k)).store(x.dtype)
    check(memory["y"].as_strided((m, n), (stride, 1)), want, kernel)


@pytest.mark.parametrize(("kernel", "barrier"), (("gemm", 0), ("gemm_tiled", 0), ("gemm_tiled", 1)))
def test_every_barrier_is_needed(
    kernel: str, barrier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one barrier of the main loop the emulator reports a race; with all, none."""
    call = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    pieces = (METAL / "kernels" / f"{kernel}.h").read_text().split(call)
    text = call.join(pieces[: barrier + 1]) + call.join(["", *pieces[barrier + 1 :]])[len(call) :]
    assert text.count(call) == len(pieces) - 2
    text = text.replace("#pragma once", "").replace('"../', '"')
    struct = {"gemm": "Gemm", "gemm_tiled": "GemmTiled"}[kernel]
    text += f'#include "formats/all.h"\nMM_MATMUL(f32, float, {kernel}, q4_0, Q4_0, {struct})\n'
    library = MetalSource(text, include=[METAL]).library
    monkeypatch.setattr(shaders, "shader_library", lambda _: library)
    with pytest.raises(EmulatorFault) as fault:
        multiply(kernel, "q4_0", random_weight("q4_0", 64, 96), activations(32, 96))
    assert fault.value.kind in ("race", "uninitialized"), fault.value
