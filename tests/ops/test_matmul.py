"""Products within the derived bound, for every shape, layout and place in memory."""

from __future__ import annotations

import math
from functools import cache, partial
from itertools import product

import oracle
import pytest
import torch
from backends import Backend, around
from hypothesis import given, settings
from hypothesis import strategies as st
from inputs import activations, generator, integer_weight, random_weight
from oracle import DTYPES, FORMATS, Value, check, spec, y64

from torch_metalmm import _C, formats

ops = torch.ops.metalmm

MS = (0, 1, 2, 3, 4, 7, 8, 16, 17, 33, 130)
NS = (1, 3, 31, 33, 257)
# Each M once and each N twice, the largest of one with small ones of the other.
DIAGONAL = [(m, NS[-i % len(NS)]) for i, m in enumerate(MS)]


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_every_shape(name: str, dtype: torch.dtype, backend: Backend, strategy: str | None) -> None:
    """Every M and N; the rows are the last of the largest, so that no two shapes start alike.

    A slow engine takes one shape a case, another for each format, dtype and strategy; instructions
    that another run forces take each M once, each N twice.
    """
    k = backend.k(name)
    packed = random_weight(name, NS[-1], k)
    x = activations(MS[-1], k, dtype=dtype)
    values = spec(name, packed, k)
    want = cache(partial(oracle.linear, x, values, None))
    w, x = backend.put(packed), backend.put(x)
    worst = 0.0
    case = FORMATS.index(name) + DTYPES.index(dtype) + (None, *backend.strategies).index(strategy)
    one = DIAGONAL[1 + case % (len(DIAGONAL) - 1)]  # the first has no rows
    every = product(MS, NS) if _C.cpu_isa() == _C.cpu_isas()[0] else DIAGONAL
    for m, n in (one,) if backend.is_slow else every:
        y = ops.linear(x[MS[-1] - m :], w[NS[-1] - n :], None, name, strategy)
        assert y.dtype == dtype
        part = slice(MS[-1] - m, None), slice(NS[-1] - n, None)
        of_all = want(backend.halves(strategy, dtype, name, (m, n, k)))
        expected = Value(of_all.exact[part], of_all.error[part])
        worst = max(worst, check(y, expected, f"{name} M={m} N={n}"))
    assert worst > 0  # the comparison saw rounding: it compares two computations


@pytest.mark.isa
@pytest.mark.formats
def test_every_k(name: str, backend: Backend, strategy: str | None) -> None:
    """One block, a few, and around the edges of the loops over K; any K for dense formats. A slow
    engine takes every second K, the others with the next format."""
    block = formats.get(name).block_values
    ks = {block, 2 * block, 3 * block, 5 * block}
    ks |= {k for edge in backend.edges(strategy).k for k in around(edge) if block == 1}
    ks |= {1, 7, 33, 100} if block == 1 else {512, 512 + block, 1024, 1024 + block}
    turn = FORMATS.index(name) % 2
    for i, k in enumerate(sorted(ks)[turn::2] if backend.is_slow else sorted(ks)):
        packed = random_weight(name, 14, k, seed=k)
        dtype = backend.dtype(name, strategy) if backend.is_slow else DTYPES[i % 3]
        x = activations(9, k, dtype=dtype, seed=k)
        halved = backend.halves(strategy, dtype, name, (9, 14, k))
        want = oracle.linear(x, spec(name, packed, k), halved=halved)
        y = ops.linear(backend.put(x), backend.put(packed), None, name, strategy)
        check(y, want, f"{name} K={k} {x.dtype}")


@pytest.mark.isa
@pytest.mark.formats
def test_around_the_edges_of_the_tiles(name: str, backend: Backend, strategy: str | None) -> None:
    """M and N one below, at, one above and twice above every edge of the engine's loops; a slow
    engine takes another N with each M."""
    edges = backend.edges(strategy)
    ms = sorted({m for edge in edges.m for m in around(edge)})
    ns = sorted({n for edge in edges.n for n in around(edge)})
    k = 2 * formats.get(name).block_values + (37 if formats.get(name).block_values == 1 else 0)
    packed, dtype = random_weight(name, ns[-1], k), backend.dtype(name, strategy)
    x = activations(ms[-1], k, dtype=dtype)
    want = cache(partial(oracle.linear, x, spec(name, packed, k), None))
    w, x = backend.put(packed), backend.put(x)
    every = max(len(ms), len(ns)) if backend.is_slow else len(ms)
    for i in range(every):
        m = ms[i % len(ms)]
        for n in (ns[i % len(ns)],) if backend.is_slow else ns[i % 3 :: 3]:
            of_all = want(backend.halves(strategy, dtype, name, (m, n, k)))
            expected = Value(of_all.exact[:m, :n], of_all.error[:m, :n])
            check(ops.linear(x[:m], w[:n], None, name, strategy), expected, f"M={m} N={n}")


@pytest.mark.formats
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 2.0**100),
        (torch.float32, 2.0**-100),
        (torch.bfloat16, 2.0**100),
        (torch.bfloat16, 2.0**17),
        (torch.float16, 2.0**-14),
    ],
    ids=str,
)
def test_range_of_x(
    name: str, dtype: torch.dtype, scale: float, backend: Backend, strategy: str | None
) -> None:
    """x far from 1: beyond the range of f16 where the dtype of x allows, and f16 subnormals."""
    k = backend.k(name)
    packed = random_weight(name, 5, k)
    x = (activations(10, k) * scale).to(dtype)
    y = ops.linear(backend.put(x), backend.put(packed), None, name, strategy)
    halved = backend.halves(strategy, dtype, name, (10, 5, k))
    check(y, oracle.linear(x, spec(name, packed, k), halved=halved), f"{name} {dtype} {scale:g}")


def test_f16_results_overflow_to_infinity(backend: Backend, strategy: str | None) -> None:
    """A sum beyond 65504 is Inf in f16, with its sign, and no intermediate is."""
    names, turn = ("f16", "q8_0", "q6_k"), (None, *backend.strategies).index(strategy) % 3
    for name in names[turn : turn + 1] if backend.is_slow else names:
        overflow(name, backend, strategy)


def overflow(name: str, backend: Backend, strategy: str | None) -> None:
    k = backend.k(name)
    packed = random_weight(name, 5, k)
    w = spec(name, packed, k)
    # y[i, i] = scale sum |w[i]| is at least twice 65504; elsewhere the signs are random.
    scale = 2.0 ** math.ceil(math.log2(2 * 65504 / float(w.abs().sum(1).min())))
    x = scale * torch.sign(w).half()
    x[1] *= -1
    x[2:, 1::2] *= -1
    y = ops.linear(backend.put(x), backend.put(packed), None, name, strategy).cpu()
    assert y[0, 0] == torch.inf and y[1, 1] == -torch.inf
    want = oracle.linear(x, w, halved=backend.halves(strategy, x.dtype, name, (5, 5, k)))
    inside = want.exact.abs() + want.error < 65504
    assert inside.any() and y[inside].isfinite().all()
    assert ((y[inside].double() - want.exact[inside]).abs() <= want.error[inside]).all()


@pytest.mark.formats
def test_nothing_to_multiply(name: str, backend: Backend, strategy: str | None) -> None:
    """M = 0, N = 0 and K = 0, with leading dims; K = 0 gives the bias."""
    k = formats.get(name).block_values
    w, dtype = backend.put(random_weight(name, 3, k)), backend.dtype(name, strategy)
    x = backend.put(torch.ones(2, 3, k, dtype=dtype))
    bias = backend.put(torch.tensor([1.0, -2.0, 3.0], dtype=dtype))
    for rows in (x[0, :0], x[:0, :2], x[:, :0]):
        y = ops.linear(rows, w, bias, name, strategy)
        assert y.shape == (*rows.shape[:-1], 3)
    for rows in (x[0, :2], x[0, 0], x, x[0, :0]):
        y = ops.linear(rows, w[:0], bias[:0], name, strategy)
        assert y.shape == (*rows.shape[:-1], 0)
    nothing = x[0, :2, :0]
    for b, want in ((None, torch.zeros(3)), (bias, bias.cpu())):
        y = ops.linear(nothing, w[:, :0], b, name, strategy).cpu()
        assert torch.equal(y, want.to(dtype).expand(2, 3))


def test_several_panels_of_torch_s_matmul(backend: Backend) -> None:
    """Every row of W is multiplied, and once: integers, whose sums are exact, at every edge that a
    panel may have."""
    n, k = 8200, 4096  # more than a panel of any engine in f32, and no whole number of them
    if chip := backend.chip():
        sizes = {"m": 3, "n": n, "k": k, "format": "q4_0", "dtype": "f32", "chip": chip}
        assert _C.plan(**sizes, strategy="dense")["dense"]["panels"] == 2
    packed = integer_weight("q4_0", n, k)
    w = backend.put(packed)
    x = torch.randint(-4, 5, (3, k), generator=generator("dense")).float()
    edges = torch.tensor([i for i in range(n) if i % 16 in (0, 15) or i > n - 8])
    want = y64(x, spec("q4_0", packed[edges], k)).float()
    bias, c = torch.arange(n).float(), torch.arange(3.0)[:, None] - torch.arange(n)
    y = ops.linear(backend.put(x), w, None, "q4_0", "dense")
    assert y.is_contiguous() and torch.equal(y.cpu()[:, edges], want)
    y = ops.linear(backend.put(x), w, backend.put(bias), "q4_0", "dense", backend.put(c)).cpu()
    assert torch.equal(y[:, edges], want + (bias + c)[:, edges])


@st.composite
def calls(draw: st.DrawFn, many: tuple[int, ...]) -> dict[str, object]:
    name = draw(st.sampled_from(FORMATS))
    block = formats.get(name).block_values
    return {
        "name": name,
        "m": draw(st.one_of(st.integers(0, 40), st.sampled_from(many))),
        "n": draw(st.integers(0, 110)),
        "k": block * draw(st.integers(0, 700 if block == 1 else 1400 // block)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(st.sampled_from((None, *DTYPES))),
        "offset": draw(st.integers(0, 16)),
        "pad": draw(st.integers(0, 20)),
        "choice": draw(st.integers(0, 100)),
        "threads": draw(st.sampled_from((1, 1, 1, 1, 1, 1, 2))),
    }


def test_random_calls(backend: Backend) -> None:
    """Any shape, dtype, bias, strategy, and place of the weight in memory of 0xFF."""
    many = (33, 64, 65) if backend.is_slow else (255, 256, 257, 300)

    @settings(max_examples=40 if backend.is_slow else 300)
    @given(call=calls(many))
    def within_the_bound(call: dict[str, object]) -> None:
        check_call(backend, call)

    within_the_bound()


def check_call(backend: Backend, call: dict[str, object]) -> None:
    """A call of linear is within its bound."""
    name, m, n, k = str(call["name"]), int(call["m"]), int(call["n"]), int(call["k"])
    packed, x = random_weight(name, n, k), activations(m, k, dtype=call["dtype"])
    offset, pad, size = int(call["offset"]), int(call["pad"]), packed.shape[1]
    memory = torch.full((offset + n * (size + pad) + 16,), 255, dtype=torch.uint8)
    w = memory[offset : offset + n * (size + pad)].view(n, size + pad)[:, :size]
    w.copy_(packed)
    bias = None if call["bias"] is None else activations(n, dtype=call["bias"], seed="b")
    strategies = (None, *backend.strategies)
    strategy = strategies[int(call["choice"]) % len(strategies)]
    put = None if bias is None else backend.put(bias)
    torch.set_num_threads(int(call["threads"]))
    y = ops.linear(backend.put(x), backend.put_view(w), put, name, strategy)
    halved = backend.halves(strategy, x.dtype, name, (m, n, k))
    check(y, oracle.linear(x, spec(name, packed, k), bias, halved), f"{call}")
