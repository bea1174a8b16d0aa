"""activations="int8" and "int16" on the CPU: codes and scales as specified, block sums exact."""

from __future__ import annotations

import inputs
import oracle
import pytest
import torch
from backends import CPU, ONE_OF_EACH, SELECTED
from inputs import activations, random_weight
from oracle import check, linear_of_rounded
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.formats.activations import BLOCK, TOP_CODES, quantize, smallest

pytestmark = [
    pytest.mark.covering,
    pytest.mark.isa,
    pytest.mark.skipif(CPU not in SELECTED, reason="the cpu engine was not asked for"),
]

linear = torch.ops.metalmm.linear
STRATEGIES = (None, "gemv", "gemv_batched", "gemm")
PACKED = tuple(n for n in ONE_OF_EACH if _C.has_integer_codes(n))
ALL_PACKED = tuple(n for n in oracle.FORMATS if _C.has_integer_codes(n))
EXACT = tuple(n for n in formats.names() if not _C.has_integer_codes(n))
# Panels of 1 to 16 rows filled and not, two and more of them, a second block of columns.
ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 40)


@pytest.fixture(params=TOP_CODES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unit_matrix(k: int) -> Tensor:
    """The unit matrix in q8_0, whose scales are 1."""
    blocks = torch.zeros(k, k // 32, 34, dtype=torch.uint8)
    blocks[..., 1] = 0x3C
    rows = torch.arange(k)
    blocks[rows, rows // 32, 2 + rows % 32] = 1
    return blocks.view(k, -1)


def hard_rows(m: int, k: int, kind: str) -> Tensor:
    """Rows of all sizes, with blocks of zeros, ties, tiny numbers and an outlier."""
    x = activations(m, k) * torch.logspace(-44, 33, m)[:, None]
    x[::3, :BLOCK] = 0
    x[1::4, :BLOCK] = torch.arange(BLOCK) - 0.5
    x[1::4, 0] = TOP_CODES[kind]
    x[2::5, :BLOCK] = smallest(kind)
    x[3::5, :BLOCK] = -smallest(kind) / 2
    x[:, -1] *= 1000
    return x


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_codes_and_scales_are_those_of_the_specification(strategy: str | None, kind: str) -> None:
    """With the unit matrix y is code times scale: bit for bit, whatever the batch is.

    Tiles add the two parts of int16 in f32: both products and their sum are rounded, and the scale
    of the first.
    """
    for k in (32, 96, 544, 1056):
        w = unit_matrix(k)
        for m in ROWS:
            x = hard_rows(m, k, kind)
            codes, scales = quantize(x, kind)
            want = codes.float() * scales.repeat_interleave(BLOCK, -1)
            y = linear(x, w, None, "q8_0", strategy, activations=kind)
            in_f32 = kind == "int16" and strategy != "gemv"
            size = sum(p.abs() for p in oracle.rounded_parts(x, kind))
            assert bool(((y - want).abs() <= in_f32 * 4 * oracle.U * size).all()), m


@pytest.mark.parametrize(
    ("kind", "strategy"), [*(("int8", s) for s in STRATEGIES), ("int16", "gemv")]
)
@pytest.mark.parametrize("name", PACKED)
def test_integers_have_exact_sums(name: str, strategy: str | None, kind: str) -> None:
    """x of integers, 127 the largest of each block, is its own codes, or a 256th of them; W of
    integers is exact. Of int16, gemv alone adds the two parts as integers."""
    k, n = inputs.long_k(name), 19
    w = inputs.integer_weight(name, n, k)
    for m in (1, 3, 8, 20):
        x = torch.randint(-3, 4, (m, k), generator=inputs.generator(name, m)).float()
        x[:, ::BLOCK] = 127
        want = oracle.y64(x, oracle.spec(name, w, k)).float()
        assert float(want.abs().max()) < 2**23, "halves are exact in f32"
        assert torch.equal(linear(x, w, None, name, strategy, activations=kind), want), m


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", PACKED)
def test_results_are_within_the_bound(name: str, strategy: str | None, kind: str) -> None:
    """Every loop short, full and over: W of 1 to 100 rows, K of one block and of many. 1e5 beside
    numbers of 1, in the second row, costs the digits of its own 32 values."""
    block = formats.get(name).block_values
    for n, k in ((1, block), (3, 3 * block), (50, inputs.long_k(name)), (100, 2 * block)):
        w = random_weight(name, n, k)
        for m in ROWS if n == 50 else (1, 6, 18):
            x = activations(m, k)
            x[-1:, k // 2] = 1e5
            y = linear(x, w, None, name, strategy, activations=kind)
            check(y, linear_of_rounded(x, name, w, kind), f"{name} {strategy} M={m} N={n} K={k}")


@pytest.mark.parametrize("name", ALL_PACKED)
def test_every_format(name: str, kind: str) -> None:
    """Groups and scales of affine formats are variables of the kernels."""
    k = inputs.long_k(name)
    w = random_weight(name, 13, k)
    for m in (1, 6, 18):
        x = activations(m, k)
        check(linear(x, w, None, name, activations=kind), linear_of_rounded(x, name, w, kind), name)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
@pytest.mark.parametrize("name", PACKED)
def test_the_batch_changes_no_bit_of_a_row(name: str, strategy: str, kind: str) -> None:
    k = inputs.long_k(name)
    w, x = random_weight(name, 14, k), activations(40, k)
    alone = torch.cat([linear(r, w, None, name, strategy, activations=kind) for r in x.split(1)])
    for m in ROWS:
        assert torch.equal(linear(x[:m], w, None, name, strategy, activations=kind), alone[:m])


@pytest.mark.parametrize("name", ("q4_0", "q6_k", "affine4_g64"))
def test_threads_change_no_bit(name: str, kind: str) -> None:
    k = inputs.long_k(name)
    w, x = random_weight(name, 150, k), activations(300, k)  # a thread takes 62 rows of W or fewer
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        ys = [linear(x[:m], w, None, name, activations=kind) for m in (1, 2, 8, 30, 300)]
        results.append(torch.cat(ys))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_spoils_its_row_alone(
    bad: float, strategy: str | None, kind: str
) -> None:
    for name in ("q4_0", "q4_k", "affine8_g32"):
        k = inputs.long_k(name)
        w = random_weight(name, 14, k)
        for m in (1, 3, 8, 20):
            x = activations(m, k)
            clean = linear(x, w, None, name, strategy, activations=kind)
            x[m // 2, k // 2] = bad
            y = linear(x, w, None, name, strategy, activations=kind)
            others = [i for i in range(m) if i != m // 2]
            assert y[m // 2].isnan().all() and torch.equal(y[others], clean[others])


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_layouts_and_dtypes(dtype: torch.dtype, kind: str) -> None:
    """x is rounded from its own dtype; strides of x and W change no bit."""
    for name in ("q4_0", "q6_k", "affine5_g64"):
        k = inputs.long_k(name)
        packed = random_weight(name, 9, k)
        x = activations(6, k, dtype=dtype)
        want = linear(x, packed, None, name, activations=kind)
        assert want.dtype == dtype
        check(want, linear_of_rounded(x, name, packed, kind).store(dtype), name)
        columns_first = torch.full((k, 6), torch.nan, dtype=dtype).T.copy_(x)
        beside_nan = torch.full((8, k + 7), torch.nan, dtype=dtype)[1:-1, 3:-4].copy_(x)
        for view in (columns_first, beside_nan, x.view(2, 3, k)):
            y = linear(view, packed, None, name, activations=kind)
            assert torch.equal(y.reshape(6, 9), want)
        wide = torch.full((9, packed.shape[1] + 19), 255, dtype=torch.uint8)
        view = wide[:, 7 : 7 + packed.shape[1]].copy_(packed)
        assert torch.equal(linear(x, view, None, name, activations=kind), want)


def test_empty_products(kind: str) -> None:
    w, x = random_weight("q4_0", 5, 64), activations(3, 64)
    for y in (
        linear(x[:0], w, None, "q4_0", activations=kind),
        linear(x, w[:0], None, "q4_0", activations=kind),
    ):
        assert y.numel() == 0
    empty = linear(x[:, :0], w[:, :0], None, "q4_0", activations=kind)
    assert torch.equal(empty, torch.zeros(3, 5))


@pytest.mark.parametrize("name", EXACT)
def test_formats_without_integer_codes_are_exact(name: str, kind: str) -> None:
    """The result is that of exact activations, bit for bit."""
    k = 99 if name in formats.DTYPES else 512
    w, x = random_weight(name, 7, k), activations(5, k)
    assert torch.equal(linear(x, w, None, name, activations=kind), linear(x, w, None, name))
