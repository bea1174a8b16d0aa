"""Gradients of activations, bias and c against float64; weights are frozen and stay packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Backend, leaf
from inputs import activations, random_weight
from oracle import DTYPES, KINDS, Value, check, spec
from torch import Tensor, nn
from torch.autograd import forward_ad

from torch_metalmm import formats

ops = torch.ops.metalmm


def grad_of(y: Tensor, inputs: list[Tensor], g: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, inputs, g.to(y.device)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.formats
def test_dx_is_grad_times_the_weight(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """dx = g W in the dtype of x, the bias's gradient the sum of g in its own, for each M."""
    k = formats.get(name).block_values * 2
    packed = random_weight(name, 70, k)
    values, w = spec(name, packed, k), backend.put(packed)
    for shape in ((70,), (1, 70), (2, 5, 70), (33, 70), (0, 70)):
        x = leaf(activations(*shape[:-1], k, dtype=dtype), backend)
        bias = leaf(activations(70, seed="bias"), backend)
        g = activations(*shape, dtype=dtype, seed="g")
        dx, db = grad_of(ops.linear(x, w, bias, name), [x, bias], g)
        assert dx.dtype == dtype and db.dtype == torch.float32
        check(dx, Value.of(g).dot(values.T).store(dtype), f"dx {name} {shape}")
        rows = g.reshape(-1, 70)
        total = Value.of(rows.T).dot(torch.ones(1, len(rows)))
        check(db[:, None], total, f"db {name} {shape}")


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_layouts_of_the_gradient(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """Gradients arrive expanded (from sum), strided, transposed; after any strategy of a CPU."""
    k = backend.k(name)
    packed = random_weight(name, 9, k)
    values, w = spec(name, packed, k), backend.put(packed)
    x = leaf(activations(4, 3, k, dtype=dtype), backend)
    for strategy in (None, *(() if backend.is_slow else backend.strategies)):
        (dx,) = torch.autograd.grad(ops.linear(x, w, None, name, strategy).sum(), x)
        check(dx, Value.of(torch.ones(4, 3, 9)).dot(values.T), "sum")
    g = activations(9, 3, 4, seed="g").permute(2, 1, 0)
    (dx,) = torch.autograd.grad(ops.linear(x, w, None, name), x, backend.put_view(g))
    check(dx, Value.of(g).dot(values.T), "permuted")
    strided = backend.put_view(activations(k, 4).T).detach().requires_grad_()
    (dx,) = torch.autograd.grad(ops.linear(strided, w, None, name).sum(), strided)
    check(dx, Value.of(torch.ones(4, 9)).dot(values.T), "x transposed")


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_double_backward(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """The gradient of dx = g W with respect to g is the product with W, and so on."""
    k = formats.get(name).block_values * 3
    packed = random_weight(name, 9, k)
    values, w = spec(name, packed, k), backend.put(packed)
    x, g = (leaf(activations(5, n, dtype=dtype, seed=n), backend) for n in (k, 9))
    (dx,) = torch.autograd.grad(ops.linear(x, w, None, name), x, g, create_graph=True)
    h = activations(5, k, seed="h")
    (dg,) = torch.autograd.grad(dx, g, backend.put(h), create_graph=True)
    check(dg, Value.of(h).dot(values), "dg")
    third = leaf(h, backend)
    (dg,) = torch.autograd.grad(ops.linear_input_grad(g, w, name, k), g, third, create_graph=True)
    (dh,) = torch.autograd.grad(dg.sum(), third)
    check(dh, Value.of(torch.ones(5, 9)).dot(values.T), "dh")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_gradient_of_swiglu(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """dx = (g u silu'(a)) G + (g silu(a)) U, a = x Gᵀ, u = x Uᵀ."""
    k = formats.get(name).block_values * 2
    gate, up = random_weight(name, 9, k), random_weight("q8_0" if k > 2 else "f32", 9, k, seed=1)
    other = "q8_0" if k > 2 else "f32"
    values, values_up = spec(name, gate, k), spec(other, up, k)
    x, g = activations(2, 3, k, dtype=dtype) / 4, activations(2, 3, 9, dtype=dtype, seed="g")
    moved = leaf(x, backend)
    y = ops.swiglu(moved, backend.put(gate), backend.put(up), name, other)
    (dx,) = grad_of(y, [moved], g)
    assert dx.dtype == dtype
    a, u, g64 = Value.of(x).dot(values), Value.of(x).dot(values_up), Value.of(g)
    want = ((g64 * u) * a.silu_slope()).dot(values.T) + (g64 * a.silu()).dot(values_up.T)
    check(dx, want.store(dtype), name)
    # The formula above is itself a claim: autograd of the composition in float64 decides.
    x64 = x.double().requires_grad_()
    y64 = nn.functional.silu(x64 @ values.double().T) * (x64 @ values_up.double().T)
    (reference,) = torch.autograd.grad(y64, x64, g.double())
    assert ((reference - want.exact).abs() <= want.error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_swiglu_linear(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """With h = g W: dgate = h u silu'(gate), dup = h silu(gate), dbias = sum of g."""
    k = formats.get(name).block_values * 2
    packed = random_weight(name, 9, k)
    values = spec(name, packed, k)
    gate, up = activations(2, 3, k, dtype=dtype), activations(2, 3, k, dtype=dtype, seed="up")
    g = activations(2, 3, 9, dtype=dtype, seed="g")
    inputs = [leaf(gate, backend), leaf(up, backend), leaf(torch.zeros(9), backend)]
    y = ops.swiglu_linear(*inputs[:2], backend.put(packed), inputs[2], name)
    dgate, dup, db = grad_of(y, inputs, g)
    assert dgate.dtype == dup.dtype == dtype
    h = Value.of(g).dot(values.T)
    want_gate = ((h * Value.of(up)) * Value.of(gate).silu_slope()).store(dtype)
    want_up = (h * Value.of(gate).silu()).store(dtype)
    check(dgate, want_gate, f"dgate {name}")
    check(dup, want_up, f"dup {name}")
    check(db[:, None], Value.of(g.view(6, 9).T).dot(torch.ones(1, 6)), f"db {name}")
    leaves = [gate.double().requires_grad_(), up.double().requires_grad_()]
    y64 = (nn.functional.silu(leaves[0]) * leaves[1]) @ values.double().T
    reference = torch.autograd.grad(y64, leaves, g.double())
    for a, b in zip(reference, (want_gate, want_up), strict=True):
        assert ((a - b.exact).abs() <= b.error).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_gemm_and_gemv(dtype: torch.dtype, backend: Backend) -> None:
    """dx = alpha g W and dc = beta g, each in its own dtype; with beta = 0, dc = 0."""
    packed = random_weight("q5_0", 9, 96)
    values, w = spec("q5_0", packed, 96), backend.put(packed)
    for alpha, beta in ((1.0, 1.0), (-0.5, 3.0), (2.0, 0.0)):
        x = leaf(activations(4, 96, dtype=dtype), backend)
        c = leaf(activations(4, 9, seed="c"), backend)
        g = activations(4, 9, dtype=dtype, seed="g")
        want = (Value.of(g) * alpha).store(dtype).dot(values.T).store(dtype)
        dx, dc = grad_of(ops.gemm(x, w, "q5_0", c, alpha, beta), [x, c], g)
        assert dx.dtype == dtype and dc.dtype == torch.float32
        check(dx, want, f"gemm {alpha} {beta}")
        check(dc, (Value.of(g) * beta).store(dtype), f"gemm dc {alpha} {beta}")
        row, row_c = leaf(x[1], backend), leaf(c[1], backend)
        y = ops.gemv(row, w, "q5_0", row_c, alpha, beta)
        drow, drow_c = grad_of(y, [row, row_c], g[1])
        check(drow, Value(want.exact[1], want.error[1]), f"gemv {alpha} {beta}")
        assert torch.equal(drow_c, dc[1])


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_forward_mode_is_refused_by_name(mode: Callable[[], Any], backend: Backend) -> None:
    """Also without gradients, where the tangent would be dropped and count as zero."""
    w = backend.put(random_weight("q8_0", 32, 32))
    x, y = (backend.put(activations(*shape)) for shape in ((3, 32), (32,)))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda t: ops.linear(t, w, None, "q8_0"),
        "linear_input_grad": lambda t: ops.linear_input_grad(t, w, "q8_0", 32),
        "swiglu": lambda t: ops.swiglu(t, w, w, "q8_0", "q8_0"),
        "swiglu_linear": lambda t: ops.swiglu_linear(x, t, w, None, "q8_0"),
        "gemm": lambda t: ops.gemm(x, w, "q8_0", t, 1.0, 1.0),
    }
    for name, call in calls.items():
        with mode(), pytest.raises(NotImplementedError, match=f"metalmm.{name}: .*jvp"):
            torch.func.jvp(call, (x,), (x,))
        error = pytest.raises(NotImplementedError, match=f"metalmm.{name}: .*dual tensors")
        with forward_ad.dual_level(), mode(), error:
            call(forward_ad.make_dual(x, x))
    for name, of in (
        ("linear", lambda t: ops.linear(x, w, t, "q8_0")),
        ("gemv", lambda t: ops.gemv(t, w, "q8_0")),
    ):
        with mode(), pytest.raises(NotImplementedError, match=f"metalmm.{name}: .*jvp"):
            torch.func.jacfwd(of)(y)
