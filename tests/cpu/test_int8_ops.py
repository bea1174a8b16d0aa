"""activations= of every op that takes it: what it computes, differentiates and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inputs
import oracle
import pytest
import torch
from backends import CPU, SELECTED, Backend
from inputs import activations, random_weight
from oracle import Value, check, linear_of_rounded, spec
from torch import Tensor

from torch_metalmm.formats.activations import TOP_CODES

ops = torch.ops.metalmm
N, K = 7, 256


def calls() -> dict[str, Callable[..., Tensor]]:
    """{op: op(x, w, activations=...)}, W in q4_k."""
    ones = torch.ones(K)
    return {
        "linear": lambda x, w, **a: ops.linear(x, w, None, "q4_k", **a),
        "norm_linear": lambda x, w, **a: ops.norm_linear(
            x, ones.to(x.device), 1e-5, 0.0, w, None, "q4_k", **a
        ),
        "swiglu": lambda x, w, **a: ops.swiglu(x, w, w.flip(0), "q4_k", "q4_k", **a),
        "swiglu_linear": lambda x, w, **a: ops.swiglu_linear(x, x.flip(0), w, None, "q4_k", **a),
    }


OPS = tuple(calls())
NATIVE = pytest.mark.skipif(CPU not in SELECTED, reason="the cpu engine was not asked for")
KINDS = pytest.mark.parametrize("kind", [pytest.param(k, marks=NATIVE) for k in TOP_CODES])


@pytest.mark.parametrize("op", OPS)
def test_other_engines_refuse(op: str, backend: Backend) -> None:
    x, w = backend.put(activations(3, K)), backend.put(random_weight("q4_k", N, K))
    if backend.name == "cpu":
        assert not torch.equal(calls()[op](x, w, activations="INT8"), calls()[op](x, w))
        return
    with pytest.raises(ValueError, match=r"^activations: 'int8' on \w+; only the native CPU"):
        calls()[op](x, w, activations="int8")


@pytest.mark.parametrize("op", OPS)
def test_unknown_names(op: str, backend: Backend) -> None:
    for device in (backend.device, "meta"):
        x, w = activations(3, K).to(device), random_weight("q4_k", N, K).to(device)
        with pytest.raises(ValueError, match=r"^activations: unknown 'int4'; allowed: int8, int16"):
            calls()[op](x, w, activations="int4")


@KINDS
@pytest.mark.parametrize("op", OPS)
def test_meta_takes_it(kind: str, op: str) -> None:
    x, w = activations(3, K).to("meta"), random_weight("q4_k", N, K).to("meta")
    assert calls()[op](x, w, activations=kind).shape == (3, N)


@NATIVE
@pytest.mark.parametrize("name", ("gemm_tiled", "gemm_naive", "split_reduce"))
def test_strategies_without_int8(name: str) -> None:
    x, w = activations(3, K), random_weight("q4_k", N, K)
    said = rf"^strategy: unknown '{name}' on cpu with rounded activations; allowed: gemv, gemv_b"
    with pytest.raises(ValueError, match=said):
        ops.linear(x, w, None, "q4_k", name, activations="int8")
    fakes = torch._subclasses.fake_tensor.FakeTensorMode()
    with fakes, pytest.raises(ValueError, match=said):
        args = fakes.from_tensor(x), fakes.from_tensor(w)
        ops.linear(*args, None, "q4_k", name, activations="int8")


@pytest.mark.covering
@KINDS
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_opcheck_of_int8(kind: str, op: str, dtype: torch.dtype, grad: bool) -> None:
    x, w = activations(3, K, dtype=dtype).requires_grad_(grad), random_weight("q4_k", N, K)
    args: dict[str, tuple[Any, ...]] = {
        "linear": (x, w, None, "q4_k"),
        "norm_linear": (x, None, 1e-5, 0.0, w, None, "q4_k"),
        "swiglu": (x, w, w, "q4_k", "q4_k"),
        "swiglu_linear": (x, x, w, None, "q4_k"),
    }
    torch.library.opcheck(getattr(ops, op).default, args[op], {"activations": kind})


@KINDS
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_bias_and_residual_are_added_unrounded(kind: str, dtype: torch.dtype) -> None:
    w, x = random_weight("q4_k", N, K), activations(5, K, dtype=dtype)
    bias, residual = activations(N, seed="bias"), activations(5, N, seed="residual")
    y = ops.linear(x, w, bias, "q4_k", None, residual, activations=kind)
    want = linear_of_rounded(x, "q4_k", w, kind) + Value.of(bias) + Value.of(residual)
    check(y, want.store(dtype), str(dtype))


@KINDS
def test_swiglu_of_int8(kind: str) -> None:
    """Gate and up take x rounded; a dense one of the two takes it as it is."""
    x = activations(5, K) / 8
    gate, up = random_weight("q4_k", N, K), random_weight("f32", N, K)
    rounded = linear_of_rounded(x, "q4_k", gate, kind).silu()
    y = ops.swiglu(x, gate, up, "q4_k", "f32", activations=kind)
    check(y, (rounded * Value.of(x).dot(spec("f32", up, K))).store(x.dtype), "dense up")
    y = ops.swiglu(x, gate, gate.flip(0), "q4_k", "q4_k", activations=kind)
    check(y, rounded * linear_of_rounded(x, "q4_k", gate.flip(0), kind), "packed up")


@KINDS
def test_swiglu_linear_rounds_the_hidden_values(kind: str) -> None:
    """relu2(gate) up of small integers is exact: what is rounded is that product."""
    generator, w = inputs.generator("hidden"), random_weight("q6_k", N, K)
    gate, up = (torch.randint(-9, 10, (5, K), generator=generator).float() for _ in range(2))
    y = ops.swiglu_linear(gate, up, w, None, "q6_k", "relu2", activations=kind)
    check(y, linear_of_rounded(gate.relu().square() * up, "q6_k", w, kind), "relu2")


@KINDS
def test_norm_linear_rounds_the_norm(kind: str) -> None:
    """Rows whose norm is themselves, exactly: of as many 1 as -1, with eps = 0."""
    x = torch.where(torch.rand(5, K, generator=inputs.generator("norm")) < 0.5, -1.0, 1.0)
    w, factors = random_weight("q6_k", N, K), activations(K, seed="factors")
    y = ops.norm_linear(x, factors, 0.0, 0.0, w, None, "q6_k", activations=kind)
    check(y, linear_of_rounded(x * factors, "q6_k", w, kind), "norm")


@KINDS
def test_the_gradient_is_that_of_exact_activations(kind: str) -> None:
    """Straight through: rounding is taken for the identity."""
    w, g = random_weight("q4_k", N, K), activations(3, N, seed="g")
    x = activations(3, K).requires_grad_()
    ops.linear(x, w, None, "q4_k", activations=kind).backward(g)
    assert x.grad is not None
    check(x.grad, oracle.linear(g, spec("q4_k", w, K).T), "gradient")


@KINDS
def test_autocast_rounds_its_own_dtype(kind: str) -> None:
    w, x = random_weight("q4_k", N, K), activations(3, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear(x, w, None, "q4_k", activations=kind)
    assert y.dtype == torch.bfloat16
    check(y, linear_of_rounded(x.bfloat16(), "q4_k", w, kind).store(torch.bfloat16), "autocast")


@KINDS
def test_compiled(kind: str) -> None:
    torch._dynamo.reset()
    w, x = random_weight("q4_k", N, K), activations(3, K)

    def double(x: Tensor) -> Tensor:
        return ops.linear(x, w, None, "q4_k", activations=kind) * 2

    assert torch.equal(torch.compile(double, fullgraph=True, backend="aot_eager")(x), double(x))
