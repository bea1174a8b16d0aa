"""The ops on experts: products with the W that ids choose, gated and summed."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from expert_cases import (
    Experts,
    chosen,
    decoded,
    gated,
    halves,
    is_halved,
    products,
    rows,
    strategies_of,
    weighted,
    weights,
)
from inputs import activations, integer_weight
from oracle import DTYPES, KINDS, Value, check, rounded_activations

from torch_metalmm import _C, formats
from torch_metalmm.formats.activations import TOP_CODES

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules


def block_of(name: str) -> int:
    return max(formats.get(name).block_values, 32)


# ---- expert_linear


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_every_format(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """By choice, and weighted sums of them; with as few rows as decoding has, and in tiles."""
    s = Experts(experts=3, n=9, k=block_of(name) * 2, tokens=2, choices=2)
    packed = weights(name, s)
    w, ids, x = decoded(name, packed, s.k), chosen(s), rows(s, dtype)
    bias = activations(s.experts, s.n, dtype=dtype, seed="bias")
    scores = activations(s.tokens, s.choices, dtype=dtype, seed="scores")
    residual = activations(s.tokens, s.n, dtype=dtype, seed="residual")
    put = backend.put(x), backend.put(packed), backend.put(ids), backend.put(bias)
    for score, op in ((None, "expert_linear"), (scores, "expert_down")):
        for strategy in strategies_of(backend, op):
            halved = is_halved(backend, s, dtype, strategy)
            want = products(x, w, ids, bias, halved)
            want = want if score is None else weighted(want, score)
            y = ops.expert_linear(*put, name, backend.put(score), strategy=strategy)
            assert y.dtype == dtype and y.is_contiguous()
            check(y, want.store(dtype), f"{name} {strategy} {op}")
            if score is None:
                continue
            own = backend.put(score), {"strategy": strategy, "residual": backend.put(residual)}
            y, want = ops.expert_linear(*put, name, own[0], **own[1]), want + Value.of(residual)
            check(y, want.store(dtype), f"{name} {strategy} {op} residual")


@pytest.mark.parametrize("apart", [False, True], ids=["of tokens", "of choices"])
@pytest.mark.parametrize(
    ("experts", "tokens", "choices"),
    [(1, 1, 1), (4, 1, 4), (7, 1, 3), (40, 3, 20), (5, 6, 1), (2, 19, 2), (3, 40, 2), (64, 2, 6)],
)
def test_every_shape(
    experts: int, tokens: int, choices: int, apart: bool, backend: Backend
) -> None:
    """One expert and many, one choice and more than simdgroups; an expert without a row."""
    s = Experts(experts, n=13, k=96, tokens=tokens, choices=choices)
    packed, ids = weights("q4_0", s), chosen(s)
    w = decoded("q4_0", packed, s.k)
    for dtype in (torch.float32, torch.float16):
        x = rows(s, dtype, apart)
        scores = activations(tokens, choices, seed="scores")
        put = backend.put(x), backend.put(packed), backend.put(ids), None, "q4_0"
        want = products(x, w, ids, None, is_halved(backend, s, dtype))
        check(ops.expert_linear(*put), want.store(dtype), f"{s}")
        y = ops.expert_linear(*put, backend.put(scores))
        check(y, weighted(want, scores).store(dtype), f"{s} scores")


@pytest.mark.quick
@pytest.mark.parametrize("name", KINDS)
def test_a_one_hot_row_is_a_column_of_its_expert(name: str, backend: Backend) -> None:
    """Exactly, whatever the strategy; twice the column where an expert is chosen twice."""
    s = Experts(experts=4, n=6, k=block_of(name), tokens=3, choices=2)
    packed = weights(name, s)
    w = decoded(name, packed, s.k)
    x = torch.zeros(s.tokens, s.k)
    at = [0, s.k // 2 + 1, s.k - 1]
    x[range(3), at] = torch.tensor([1.0, -2.0, 4.0])
    ids = torch.tensor([[3, 3], [0, 2], [1, 0]])
    want = torch.stack([w[ids[t], :, k] * x[t, k] for t, k in enumerate(at)])
    put = backend.put(x), backend.put(packed), backend.put(ids), None, name
    for op, score in (("expert_linear", None), ("expert_down", torch.full((3, 2), 0.5))):
        expected = want if score is None else (want * 0.5).sum(1)
        for strategy in strategies_of(backend, op):
            y = ops.expert_linear(*put, backend.put(score), strategy=strategy)
            assert torch.equal(y.cpu(), expected), (op, strategy)


def test_integers_are_exact(backend: Backend) -> None:
    """Bias and scores too: every sum is a whole number of halves."""
    s = Experts(experts=3, n=7, k=512, tokens=5, choices=3)
    packed = integer_weight("q4_0", s.experts * s.n, s.k).view(s.experts, s.n, -1)
    x = torch.randint(-4, 5, (s.tokens, s.k)).float()
    ids, bias = chosen(s), torch.randint(-9, 9, (s.experts, s.n)).float()
    scores = torch.randint(-3, 4, (s.tokens, s.choices)).float()
    w = decoded("q4_0", packed, s.k)
    y = torch.einsum("tk,tcnk->tcn", x.double(), w.double()[ids]) + bias.double()[ids]
    put = [backend.put(t) for t in (x, packed, ids, bias)]
    for op, score in (("expert_linear", None), ("expert_down", scores)):
        want = y if score is None else (y * score[..., None].double()).sum(1)
        for strategy in strategies_of(backend, op):
            got = ops.expert_linear(*put, "q4_0", backend.put(score), strategy=strategy)
            assert torch.equal(got.cpu().double(), want), (op, strategy)


def test_scores_and_bias_of_other_dtypes(backend: Backend) -> None:
    """Added and multiplied in f32, then one rounding."""
    s = Experts(experts=4, n=8, k=64, tokens=3, choices=2)
    packed, ids = weights("q4_0", s), chosen(s)
    w = decoded("q4_0", packed, s.k)
    for dtype in DTYPES:
        x = rows(s, dtype)
        for other in DTYPES:
            bias = activations(s.experts, s.n, dtype=other, seed="bias")
            scores = activations(s.tokens, s.choices, dtype=other, seed="scores")
            halved = is_halved(backend, s, dtype)
            y = ops.expert_linear(
                *(backend.put(t) for t in (x, packed, ids, bias)), "q4_0", backend.put(scores)
            )
            want = weighted(products(x, w, ids, bias, halved), scores)
            check(y, want.store(dtype), f"{dtype} {other}")


def test_rows_do_not_depend_on_each_other(backend: Backend) -> None:
    """A token of a batch has the bits of the token alone, where both take the same way."""
    s = Experts(experts=5, n=11, k=160, tokens=6, choices=3)
    put = [backend.put(t) for t in (rows(s, torch.float32), weights("q5_1", s), chosen(s))]
    scores = backend.put(activations(s.tokens, s.choices, seed="scores"))
    strategies = ("gemv",) if not backend.chip() else ("expert_down", "expert_gemm")
    for strategy in strategies:
        y = ops.expert_linear(*put, None, "q5_1", scores, strategy=strategy)
        alone = [
            ops.expert_linear(
                put[0][t : t + 1], put[1], put[2][t : t + 1], None, "q5_1", scores[t : t + 1],
                strategy=strategy,
            )
            for t in range(s.tokens)
        ]  # fmt: skip
        assert torch.equal(y, torch.cat(alone)), strategy


def test_views(backend: Backend) -> None:
    """x, ids and W of any strides but W's last; experts and rows that begin inside a tensor."""
    s = Experts(experts=4, n=6, k=64, tokens=3, choices=2)
    big = weights("q4_0", Experts(7, 9, s.k, 1, 1))
    packed = big[2:6, 1:7]
    wide = activations(s.k + 5, s.tokens + 1).T
    x = wide[1:, 2 : 2 + s.k]
    ids = chosen(Experts(4, 6, 64, s.choices, s.tokens)).T
    w = decoded("q4_0", packed.contiguous(), s.k)
    y = ops.expert_linear(
        backend.put_view(x), backend.put_view(packed), backend.put_view(ids), None, "q4_0"
    )
    check(y, products(x, w, ids).store(torch.float32), "views")
    reversed_rows = packed.flip(1)
    y = ops.expert_linear(
        backend.put(x), backend.put_view(reversed_rows), backend.put(ids.int()), None, "q4_0"
    )
    check(y, products(x, w.flip(1), ids).store(torch.float32), "int32 ids")


def test_dense_weights(backend: Backend) -> None:
    s = Experts(experts=3, n=5, k=40, tokens=2, choices=2)
    x, ids = rows(s, torch.float32), chosen(s)
    for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")):
        w = activations(s.experts, s.n, s.k, dtype=dtype, seed="w")
        want = products(x, w.float(), ids).store(torch.float32)
        for weight in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
            y = ops.expert_linear(
                backend.put(x), backend.put_view(weight), backend.put(ids), None, name
            )
            check(y, want, name)


@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_is_chosen(tokens: int, choices: int, backend: Backend) -> None:
    s = Experts(experts=2, n=4, k=32, tokens=tokens, choices=choices)
    w, ids, x = (backend.put(t) for t in (weights("q4_0", s), chosen(s), rows(s, torch.float32)))
    scores = backend.put(torch.ones(tokens, choices))
    assert ops.expert_linear(x, w, ids, None, "q4_0").shape == (tokens, choices, 4)
    assert torch.equal(
        ops.expert_linear(x, w, ids, None, "q4_0", scores).cpu(), torch.zeros(tokens, 4)
    )
    assert ops.expert_swiglu(x, w, ids, None, "q4_0").shape == (tokens, choices, 2)
    assert ops.expert_linear(x, w[:0], ids, None, "q4_0").shape == (tokens, choices, 4)
    assert ops.expert_linear(x, w[:, :0], ids, None, "q4_0").shape == (tokens, choices, 0)
    assert ops.expert_swiglu(x, w[:, :0], ids, None, "q4_0").shape == (tokens, choices, 0)


def test_k_of_zero(backend: Backend) -> None:
    x, ids, bias = torch.zeros(2, 0), torch.tensor([[0, 1], [2, 2]]), activations(3, 4)
    for name, w in (("f32", torch.zeros(3, 4, 0)), ("q4_0", torch.zeros(3, 4, 0).byte())):
        put = [backend.put(t) for t in (x, w, ids, bias)]
        for strategy in strategies_of(backend, "expert_linear"):
            y = ops.expert_linear(*put, name, strategy=strategy)
            assert torch.equal(y.cpu(), bias[ids])


# ---- expert_swiglu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_gate_and_up(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Gate first, alternating with up, and in tensors of their own."""
    s = Experts(experts=3, n=10, k=block_of(name) * 2, tokens=2, choices=2)
    packed = weights(name, s)
    w, ids = decoded(name, packed, s.k), chosen(s)
    size = 2.0 ** round(float(torch.log2(2 / w.norm(dim=2).mean())))
    x = (size * rows(s, torch.float32)).to(dtype)
    bias = activations(s.experts, s.n, dtype=dtype, seed="bias")
    put = [backend.put(t) for t in (x, packed, ids, bias)]
    for strategy in strategies_of(backend, "expert_up"):
        both = products(x, w, ids, bias, is_halved(backend, s, dtype, strategy))
        for interleaved in (False, True):
            want = gated(*halves(both, interleaved), "silu").store(dtype)
            y = ops.expert_swiglu(*put, name, "silu", interleaved, strategy=strategy)
            assert y.dtype == dtype and y.is_contiguous()
            check(y, want, f"{name} {strategy} interleaved={interleaved}")
        gate, up = (backend.put(part.contiguous()) for part in packed.chunk(2, 1))
        y = ops.expert_swiglu(put[0], gate, put[2], put[3], name, up_weight=up, strategy=strategy)
        check(y, gated(*halves(both, False), "silu").store(dtype), f"{name} up_weight")


@pytest.mark.parametrize("activation", [*_C.activations(), "swiglu_oai"])
def test_activations_and_limits(activation: str, backend: Backend) -> None:
    s = Experts(experts=3, n=8, k=64, tokens=4, choices=2)
    packed, ids = weights("q4_0", s), chosen(s)
    w, x = decoded("q4_0", packed, s.k), rows(s, torch.float32)
    bias = 3 * activations(s.experts, s.n, seed="bias")
    for limit in (None, 1.25):
        alpha = 1.702 if activation == "swiglu_oai" else 1.0
        for strategy in strategies_of(backend, "expert_up"):
            both = products(x, w, ids, bias)
            y = ops.expert_swiglu(
                *(backend.put(t) for t in (x, packed, ids, bias)), "q4_0", activation, True,
                limit=limit, alpha=alpha, strategy=strategy,
            )  # fmt: skip
            want = gated(*halves(both, True), activation, limit, alpha)
            check(y, want.store(torch.float32), f"{activation} {limit} {strategy}")


def test_a_limit_keeps_nan(backend: Backend) -> None:
    """As torch.clamp does."""
    w = torch.ones(1, 2, 1)
    x, ids = torch.tensor([[torch.nan], [torch.inf], [-1e30]]), torch.zeros(3, 1, dtype=torch.long)
    for strategy in strategies_of(backend, "expert_up"):
        y = ops.expert_swiglu(
            *(backend.put(t) for t in (x, w, ids)), None, "f32", "swiglu_oai", limit=7.0,
            strategy=strategy,
        ).flatten().cpu()  # fmt: skip
        assert y[0].isnan() and y[1] == pytest.approx(7 / (1 + 2.718281828**-7) * 8)
        assert y[2] == 0, y


# ---- int8, and ids


@pytest.mark.parametrize("kind", TOP_CODES)
def test_rounded_activations(kind: str, backend: Backend) -> None:
    """On the CPU what x is rounded to is multiplied; elsewhere they are refused."""
    s = Experts(experts=3, n=6, k=64, tokens=3, choices=2)
    x, packed, ids = rows(s, torch.float32), weights("q4_0", s), chosen(s)
    put = [backend.put(t) for t in (x, packed, ids)]
    if backend.chip():
        for op in (ops.expert_linear, ops.expert_swiglu):
            with pytest.raises(ValueError, match=f"activations: '{kind}'"):
                op(*put, None, "q4_0", activations=kind)
        return
    w = decoded("q4_0", packed, s.k)
    want = products(rounded_activations(x, kind).float(), w, ids)
    check(ops.expert_linear(*put, None, "q4_0", activations=kind), want, "linear")
    both = gated(*halves(want, False), "silu")
    check(ops.expert_swiglu(*put, None, "q4_0", activations=kind), both, "swiglu")


def test_ids_outside_are_refused_where_the_host_has_them(backend: Backend) -> None:
    s = Experts(experts=3, n=4, k=32, tokens=2, choices=2)
    x, packed = backend.put(rows(s, torch.float32)), backend.put(weights("q4_0", s))
    for bad in (-1, 3, 2**62, -(2**62)):
        ids = torch.tensor([[0, 1], [bad, 2]])
        calls = (
            lambda ids: ops.expert_linear(x, packed, ids, None, "q4_0"),
            lambda ids: ops.expert_swiglu(x, packed, ids, None, "q4_0"),
            lambda ids: ops.expert_input_grad(x[:, None, :4], packed, ids[:, :1], "q4_0", 32),
        )
        for call in calls:
            if backend.device == "cpu":
                with pytest.raises(IndexError, match=f"ids: {bad} is out of range; weight has 3"):
                    call(ids)
            else:
                nearest = call(backend.put(ids.clamp(0, 2)))
                assert torch.equal(call(backend.put(ids)), nearest)
    with pytest.raises(IndexError, match="weight has 0 experts"):
        ops.expert_linear(x, packed[:0], backend.put(ids), None, "q4_0")
