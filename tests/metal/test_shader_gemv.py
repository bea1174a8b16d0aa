"""The vector kernels of metal/ on the lockstep emulator: the gemv family, swiglu, embedding,
dequantize, split-K and the probes; exact where that is a theorem, else within derived bounds."""

from __future__ import annotations

import operator
import re

import oracle
import pytest
import torch
from inputs import activations, random_weight
from oracle import DTYPES, FORMATS, Value, check, spec
from plan_cases import STRATEGIES, codecs, pieces, strategies_used
from shaders import alignment_of, execute, linear, memory_of
from torch import Tensor

from bench.shaders import cells
from torch_metalmm import _C, formats

pytestmark = pytest.mark.shaders

KERNELS = tuple(name for name in STRATEGIES if name.startswith("gemv"))
WIDEST = 33  # rows of W: one more than the widest threadgroup owns
# One format of each decode struct and plane: values of N and K vary over these only.
KINDS = (
    *("f32", "bf16", "q4_0", "q4_1", "q5_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "mxfp4", "affine2_g32", "affine3_g128_bf16", "affine4_g64_f32"),
)


def step(name: str) -> int:
    """Values of K that a simdgroup takes at a time: a piece for each lane."""
    return _C.SIMD_WIDTH * pieces()[re.sub(r"_g\d+.*", "", name)]


def two_loops(name: str, simdgroups: int = 1) -> int:
    """K at which every lane loops twice and some of them a third time."""
    block = formats.get(name).block_values
    return 2 * step(name) * simdgroups + (block if block > 1 else 13)


def picked(name: str, k: int) -> Tensor:
    """Places in a row: all of the first and of the last block, every 37th between."""
    span = max(64, min(256, formats.get(name).block_values))
    return torch.tensor(sorted({*range(span), *range(0, k, 37), *range(k - span, k)}))


def same(got: Tensor, want: Tensor, what: object) -> None:
    wrong = (got != want).nonzero()
    assert len(wrong) == 0, f"{what}: {len(wrong)} differ, the first at {wrong[0].tolist()}"


@pytest.mark.every_format
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_gives_the_weight(name: str, kernel: str) -> None:
    """x = e_k gives W[:, k], rounded once; every place of a block, in one dtype or another."""
    k = two_loops(name)
    packed = random_weight(name, 3, k)
    w, places = spec(name, packed, k), picked(name, k)
    for i, dtype in enumerate(DTYPES):
        at = places[i::3]
        x = torch.zeros(len(at), k, dtype=dtype)
        x[torch.arange(len(at)), at] = 1
        same(linear(kernel, name, packed, x), w.T[at].to(dtype), (name, kernel, dtype))


@pytest.mark.parametrize("name", FORMATS)
def test_batched_rows_are_those_of_gemv(name: str) -> None:
    """gemv_batched gives every row the bits that gemv gives it alone, whatever its neighbours."""
    k = two_loops(name)
    packed = random_weight(name, 6, k)
    for m, dtype in ((2, torch.float16), (5, torch.bfloat16), (8, torch.float32), (17, DTYPES[0])):
        x = activations(m, k, dtype=dtype, seed=m)
        rows = torch.cat([linear("gemv", name, packed, row) for row in x.split(1)])
        same(linear("gemv_batched", name, packed, x), rows, (name, m, dtype))
        same(linear("gemv", name, packed, x), rows, (name, m, dtype))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", KINDS)
def test_products_within_the_bound(name: str, kernel: str) -> None:
    """Every tail of N, from below a simdgroup's rows, and of K; rows apart in memory."""
    block = formats.get(name).block_values
    ks = [two_loops(name)]
    ks += [1, 7, 31, 130] if block == 1 else [block, 3 * block]
    packed, values = {}, {}
    for k in ks:
        packed[k] = random_weight(name, WIDEST, k)
        values[k] = spec(name, packed[k], k)
    for i, n in enumerate((1, 2, 3, 4, 5, 6, 7, 15, 16, 17, WIDEST)):
        k, dtype = ks[i % len(ks)], DTYPES[i % 3]
        x = activations(1 + i % 3, k, dtype=dtype, seed=(i, k))
        y = linear(kernel, name, packed[k][:n], x, gap=i % 4, offset=i % 2)
        check(y, oracle.linear(x, values[k][:n]), f"{kernel} {name} N={n} K={k}")


@pytest.mark.parametrize("name", ("f16", "q4_0", "q4_k", "iq4_nl", "affine4_g64"))
def test_large_k_loops_twice_in_every_simdgroup(name: str) -> None:
    """K of two rounds of the whole threadgroup and a rest."""
    k = two_loops(name, simdgroups=8)
    packed, x = random_weight(name, 5, k), activations(1, k)
    y = linear("gemv_large_k", name, packed, x)
    check(y, oracle.linear(x, spec(name, packed, k)), name)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_epilogue(kernel: str, dtype: torch.dtype) -> None:
    """alpha x Wᵀ + bias + beta c, any of them absent, K in one part and in several."""
    name, n, k = "q5_1", 7, 32 * 40
    packed, m = random_weight(name, n, k), 3
    x = activations(m, k, dtype=dtype)
    bias, c = activations(n, dtype=dtype, seed="b"), activations(m, n, dtype=dtype, seed="c")
    product = Value.of(x).dot(spec(name, packed, k))
    for alpha, b, beta in (
        (1.0, bias, 0.0),
        (-0.75, None, 0.0),
        (1.0, None, 2.5),
        (0.3, bias, -1.5),
    ):
        want = product * alpha if alpha != 1 else product
        want = want if b is None else want + Value.of(b)
        want = want + Value.of(c) * beta if beta else want
        y = linear(kernel, name, packed, x, bias=b, c=c if beta else None, alpha=alpha, beta=beta)
        check(y, want.store(dtype), f"{kernel} alpha={alpha} beta={beta}")


@pytest.mark.parametrize("name", ("f32", "bf16", "q4_0", "q6_k", "mxfp4", "affine6_g32"))
def test_split_k(name: str) -> None:
    """Parts of K in f32, added in order: one-hot rows exact, products within the bound."""
    k = 4 * two_loops(name) // 256 * 256
    packed = random_weight(name, 5, k)
    w, at = spec(name, packed, k), picked(name, k)[::5]
    for m in (1, 6):
        for dtype in DTYPES:
            x = torch.zeros(m, k, dtype=dtype)
            x[torch.arange(m), at[:m]] = 1
            same(
                linear("split_reduce", name, packed, x, cores=4),
                w.T[at[:m]].to(dtype),
                (name, m, dtype),
            )
            x = activations(m, k, dtype=dtype)
            bias = activations(5, dtype=dtype, seed="b")
            check(
                linear("split_reduce", name, packed, x, cores=4, bias=bias),
                oracle.linear(x, w, bias),
                name,
            )


@pytest.mark.parametrize("name", FORMATS)
def test_swiglu(name: str) -> None:
    """silu(x Gᵀ) (x Uᵀ), and (silu(g) u) Wᵀ, in every dtype, with a tail of N."""
    n, k, m = 5, two_loops(name), 2
    gate, up = random_weight(name, n, k, seed="g"), random_weight(name, n, k, seed="u")
    gate_w, up_w = spec(name, gate, k), spec(name, up, k)
    common = {"m": m, "n": n, "k": k, "format": name}
    row = gate.shape[1]
    for dtype in DTYPES:
        # Small, so that no product overflows f16.
        x, x2 = (activations(m, k, seed=s).div(16).to(dtype) for s in "ab")
        v = Value.of(x)
        want = (v.dot(gate_w).silu() * v.dot(up_w)).store(dtype)
        for gap, gap2 in ((0, 0), (16, 0), (0, 16)):  # between rows of gate, of up
            w = {"weight": memory_of(gate, gap), "weight2": memory_of(up, gap2)}
            y = torch.full((m, n), torch.nan, dtype=dtype)
            strides = {"w_stride": row + gap, "w2_stride": row + gap2}
            got = execute("swiglu_up", {"x": x, "y": y, **w}, **common, **strides)
            check(got, want, f"up {name}, gaps {gap} and {gap2}")
        y = torch.full((m, n), torch.nan, dtype=dtype)
        got = execute("swiglu_down", {"x": x, "x2": x2, "weight": gate, "y": y}, **common)
        activated = v.silu() * Value.of(x2)
        check(got, activated.dot(gate_w).store(dtype), f"down {name}")


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_specification(name: str) -> None:
    """dequantize and embedding, rounded once; K with and without a tail of 16 and of 4."""
    block = formats.get(name).block_values
    for i, k in enumerate((1, 17, 36, 64) if block == 1 else (block, 3 * block)):
        packed = random_weight(name, 7, k)
        w, ids = spec(name, packed, k), torch.tensor([6, 0, 3, 3, 6, 1])
        for dtype in DTYPES:
            stride = packed.shape[1] + 16 * i
            weight = memory_of(packed, 16 * i)
            common = {"n": 7, "k": k, "format": name, "w_stride": stride}
            y = torch.full((7, k), torch.nan, dtype=dtype)
            execute("dequantize", {"weight": weight, "y": y}, **common)
            same(y, w.to(dtype), (name, k, dtype))
            y = torch.full((6, k), torch.nan, dtype=dtype)
            execute("embedding", {"weight": weight, "ids": ids, "y": y}, m=6, **common)
            same(y, w[ids].to(dtype), (name, k, dtype))


def test_ids_out_of_range_stay_inside_the_table() -> None:
    """The host checks ids; the kernel, if it is given a wrong one, reads no other memory."""
    packed = random_weight("q4_0", 4, 32)
    w, ids = spec("q4_0", packed, 32), torch.tensor([-1, 4, 2**40, -(2**40)])
    y = torch.empty(4, 32)
    execute("embedding", {"weight": packed, "ids": ids, "y": y}, m=4, n=4, k=32, format="q4_0")
    same(y, w[[0, 3, 3, 0]], "ids")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_probes(dtype: torch.dtype) -> None:
    """add, sub, mul, div rounded once; act_mul of f32, dot within their bounds; counts around a
    threadgroup's."""
    ops = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
    for count in (1, 255, 1024, 1025, 2500):
        x, x2 = (activations(count, dtype=dtype, seed=s) for s in "ab")
        for op, of in ops.items():
            y = torch.full((count,), torch.nan, dtype=dtype)
            execute(op, {"x": x, "x2": x2, "y": y}, n=count)
            same(y, of(x.float(), x2.float()).to(dtype), (op, count))
        gate, up = (activations(count, seed=s) for s in "cd")
        y = torch.full((count,), torch.nan, dtype=dtype)
        execute("act_mul", {"x": gate, "x2": up, "y": y}, n=count)
        check(y, (Value.of(gate).silu() * Value.of(up)).store(dtype), f"act_mul {count}")
        y = torch.full((1,), torch.nan, dtype=dtype)
        execute("dot", {"x": x, "x2": x2, "y": y}, k=count)
        check(y, Value.of(x).dot(x2.float()[None]).store(dtype), f"dot {count}")


def test_rows_of_x_at_any_alignment() -> None:
    """x that starts at an element, not at a vector, and rows an odd number of elements apart."""
    name, k = "q4_0", 96
    packed = random_weight(name, 4, k)
    x = activations(3, k, dtype=torch.float16)
    memory = memory_of(x, gap=3, offset=1)
    assert alignment_of(memory) == 2
    for kernel in KERNELS:
        want = linear(kernel, name, packed, x)
        same(linear(kernel, name, packed, x, gap=3, offset=1), want, kernel)


# What a simdgroup of gemv_large_k walks at a step: as many units as its lanes reach.
STEPS = """#include <metal_stdlib>
#include "kernels/gemv.h"
#include "entry.h"
#include "formats/all.h"
#define MM_FORMAT(name, Struct)                                                             \\
  extern "C" __attribute__((used)) constant uint step_##name = metalmm::kSimdWidth /        \\
      metalmm::Struct::Pieces::kLanes * metalmm::Walk<metalmm::Struct>::kUnit;
#include "formats/each.h"
"""


def test_long_k_is_counted_in_steps_of_the_kernel() -> None:
    """The K from which M4 Max splits it among 8 simdgroups has one step of the kernel for each."""
    kernel = dict(re.findall(r"\bstep_(\w+) = (\d+);", cells.compile_text(STEPS)))
    assert list(kernel) == codecs()
    simdgroups = _C.strategy("gemv_large_k")["threads"] // _C.SIMD_WIDTH
    for name in formats.names():
        codec = re.sub(r"_g\d+.*", "", name)
        long = simdgroups * int(kernel[codec])
        for k, wanted in ((long, "gemv_large_k"), (long - formats.get(name).block_values, "gemv")):
            plan = _C.plan(n=2048, k=k, format=name, chip="m4-max")
            assert strategies_used(plan)[0] == wanted, (name, k, plan["reason"])
