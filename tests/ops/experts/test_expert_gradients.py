"""Gradients through the ops on experts, and torch.compile of them."""

from __future__ import annotations

import pytest
import torch
from backends import Backend, leaf
from expert_cases import (
    Experts,
    chosen,
    decoded,
    gated,
    halves,
    products,
    rows,
    weighted,
    weights,
)
from gradients import same_gradients
from inputs import activations
from oracle import DTYPES, U, Value, check
from torch import Tensor

ops = torch.ops.metalmm

SIZES = Experts(experts=4, n=6, k=64, tokens=5, choices=3)


def linear64(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor, scores: Tensor | None) -> Tensor:
    y = products(x, w, ids, bias)
    return (y if scores is None else weighted(y, scores)).exact


def swiglu64(x: Tensor, w: Tensor, ids: Tensor, bias: Tensor) -> Tensor:
    both = halves(products(x, w, ids, bias), interleaved=True)
    return gated(*both, "swiglu_oai", 2.0, 1.702).exact


def compare(got: list[Tensor], want: list[Tensor], terms: int, what: str) -> None:
    """Within `terms` roundings of f32 of the largest value, and that of the dtype."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        size = b.abs().max().expand_as(b)
        limit = Value(b, terms * U * size).store(a.dtype)
        check(a, Value(b, limit.error + limit.error.max()), f"{what}, {i}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_gradients_of_a_product(
    dtype: torch.dtype, apart: bool, scored: bool, backend: Backend
) -> None:
    """Of x, bias and scores; each in its own dtype, in sums of f32."""
    packed, ids = weights("q4_0", SIZES), chosen(SIZES)
    w = decoded("q4_0", packed, SIZES.k).double()
    given = [rows(SIZES, dtype, apart), activations(4, 6, seed="bias")]
    given += [activations(5, 3, dtype=dtype, seed="scores")] if scored else []
    mine = [leaf(t, backend) for t in given]
    exact = [t.double().requires_grad_() for t in given]
    y = ops.expert_linear(
        mine[0], backend.put(packed), backend.put(ids), mine[1], "q4_0", *mine[2:]
    )
    want = linear64(exact[0], w, ids, exact[1], exact[2] if scored else None)
    g = activations(*want.shape, dtype=dtype, seed="g")
    got = torch.autograd.grad(y, mine, backend.put(g))
    assert [t.dtype for t in got] == [t.dtype for t in given]
    # Terms of a sum: at most T C products of N, K or E.
    compare(list(got), list(torch.autograd.grad(want, exact, g.double())), 15 * 64, "linear")


def test_first_and_second_derivatives(backend: Backend) -> None:
    packed, ids = weights("q4_0", SIZES), chosen(SIZES)
    w = decoded("q4_0", packed, SIZES.k).double()
    x, scores = rows(SIZES, torch.float32), activations(5, 3, seed="scores")
    put, none = (backend.put(packed), backend.put(ids)), torch.zeros(4, 6, dtype=torch.float64)
    same_gradients(
        lambda x, s: ops.expert_linear(x, *put, None, "q4_0", s),
        lambda x, s: linear64(x, w, ids, none, s),
        [x, scores],
        backend,
    )
    oai = ("q4_0", "swiglu_oai", True)
    same_gradients(
        lambda x, b: ops.expert_swiglu(x, *put, b, *oai, limit=2.0, alpha=1.702),
        lambda x, b: swiglu64(x, w, ids, b),
        [x / 8, activations(4, 6, seed="bias")],
        backend,
    )


def test_autocast(backend: Backend) -> None:
    """x is lowered, the rest is not."""
    device = torch.device(backend.device).type
    packed, ids = backend.put(weights("q4_0", SIZES)), backend.put(chosen(SIZES))
    x, scores = backend.put(rows(SIZES, torch.float32)), backend.put(torch.ones(5, 3))
    with torch.autocast(device, torch.bfloat16):
        y = ops.expert_linear(x, packed, ids, None, "q4_0", scores)
        z = ops.expert_swiglu(x, packed, ids, None, "q4_0")
    assert torch.equal(y, ops.expert_linear(x.bfloat16(), packed, ids, None, "q4_0", scores))
    assert torch.equal(z, ops.expert_swiglu(x.bfloat16(), packed, ids, None, "q4_0"))


def test_compiled(backend: Backend) -> None:
    """One graph, forward and backward, of any number of tokens."""
    torch._dynamo.reset()
    packed, scores = backend.put(weights("q4_0", SIZES)), activations(9, 3, seed="scores")

    def layer(x: Tensor, ids: Tensor, s: Tensor) -> Tensor:
        h = ops.expert_swiglu(x, packed, ids, None, "q4_0", "silu")
        h = torch.nn.functional.pad(h, (0, 61))
        return ops.expert_linear(h, packed, ids, None, "q4_0", s)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 5, 9):
        sizes = Experts(4, 6, 64, tokens, 3)
        ids, s = backend.put(chosen(sizes)), backend.put(scores[:tokens])
        x, x2 = (leaf(rows(sizes, torch.float32), backend) for _ in range(2))
        y, want = compiled(x, ids, s), layer(x2, ids, s)
        compare([y], [want.detach().cpu().double()], 15 * 64, "compiled")
        y.sum().backward()
        want.sum().backward()
        compare([x.grad], [x2.grad.cpu().double()], 15 * 64, "compiled")


def test_a_strategy_is_checked_where_a_gradient_is_recorded(backend: Backend) -> None:
    packed, ids = backend.put(weights("q4_0", SIZES)), backend.put(chosen(SIZES))
    x = leaf(rows(SIZES, torch.float32, False), backend)
    with pytest.raises(ValueError, match="strategy: unknown 'nope'"):
        ops.expert_swiglu(x, packed, ids, None, "q4_0", strategy="nope")
