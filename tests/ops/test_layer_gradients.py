"""Gradients of the ops between the matrix products, against float64 of what each is defined as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from backends import Backend, leaf
from inputs import activations, random_weight
from layer_oracle import ACTIVATIONS
from oracle import U, spec
from torch import Tensor

ops = torch.ops.metalmm
N, K, EPS = 9, 64, 1e-5


def norm64(x: Tensor, g: Tensor, offset: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (g + offset)


def rope64(qkv: Tensor, cos: Tensor, sin: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """2 heads of q, 1 of k and v, 16 values each, all rotated by halves; q normalised."""
    heads = qkv.unflatten(-1, (4, 16)).transpose(1, 2)
    q, k, v = heads.split([2, 1, 1], 1)

    def turn(t: Tensor) -> Tensor:
        a, b = t.chunk(2, -1)
        return t * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]

    return turn(norm64(q, g, 1.0)), turn(k), v


def same_gradients(
    op: Callable[..., Any], reference: Callable[..., Any], inputs: list[Tensor], backend: Backend
) -> None:
    """First and second derivatives agree to the rounding of a few dozen sums of K terms."""
    moved = [leaf(t, backend) for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]

    def derivatives(f: Callable[..., Any], at: list[Tensor]) -> list[Tensor]:
        y = f(*at)
        outputs = y if isinstance(y, tuple) else (y,)
        total = sum((t * torch.cos(t.detach())).sum() for t in outputs)
        first = torch.autograd.grad(total, at, create_graph=True)
        norm = sum(d.square().sum() for d in first)
        is_curved = norm.requires_grad
        second = torch.autograd.grad(norm, at, allow_unused=True) if is_curved else ()
        return [*first, *(d for d in second if d is not None)]

    got, want = derivatives(op, moved), derivatives(reference, exact)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        error, size = (
            float(t.norm()) for t in (a.detach().cpu().double() - b.detach(), b.detach())
        )
        print(f"error / bound = {error / (64 * K * U * size + 1e-30):.3g}")
        assert error <= 64 * K * U * size


def test_norms(backend: Backend) -> None:
    x, g, r = activations(3, K), activations(K, seed="g"), activations(3, K, seed="r")
    same_gradients(
        lambda x, g, r: ops.rms_norm(x, g, EPS, 1.0, r),
        lambda x, g, r: norm64(x, g, 1.0) + r,
        [x, g, r],
        backend,
    )
    same_gradients(
        lambda x, g, r: ops.rms_norm(x, g, EPS, gate=r),
        lambda x, g, r: norm64(x, g, 0.0) * torch.nn.functional.silu(r),
        [x, g, r],
        backend,
    )
    same_gradients(
        lambda x, g, r: ops.add_rms_norm(x, r, g, EPS),
        lambda x, g, r: (norm64(x + r, g, 0.0), x + r),
        [x, g, r],
        backend,
    )


def test_norm_linear(backend: Backend) -> None:
    packed = random_weight("q4_0", N, K)
    w, dense = backend.put(packed), spec("q4_0", packed, K).double()
    inputs = [activations(2, 3, K), activations(K, seed="g"), activations(N, seed="bias")]
    inputs.append(activations(2, 3, N, seed="residual"))
    same_gradients(
        lambda x, g, b, r: ops.norm_linear(x, g, EPS, 1.0, w, b, "q4_0", r),
        lambda x, g, b, r: norm64(x, g, 1.0) @ dense.T + b + r,
        inputs,
        backend,
    )
    same_gradients(
        lambda x, b, r: ops.linear(x, w, b, "q4_0", None, r),
        lambda x, b, r: x @ dense.T + b + r,
        [inputs[0], *inputs[2:]],
        backend,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mlps(activation: str, backend: Backend) -> None:
    packed = [random_weight("q4_0", N, K, seed=i) for i in (0, 1)]
    w, act = [backend.put(p) for p in packed], ACTIVATIONS[activation]
    gate, up = (spec("q4_0", p, K).double() for p in packed)
    x, g = activations(3, K) / 4, activations(K, seed="g") / 4
    same_gradients(
        lambda x, g: ops.swiglu(x, *w, "q4_0", "q4_0", activation, g, EPS, 0.25),
        lambda x, g: act(norm64(x, g, 0.25) @ gate.T) * (norm64(x, g, 0.25) @ up.T),
        [x, g],
        backend,
    )
    same_gradients(
        lambda x: ops.swiglu(x, *w, "q4_0", "q4_0", activation, gate_scale=0.625),
        lambda x: act(0.625 * (x @ gate.T)) * (x @ up.T),
        [x],
        backend,
    )
    a, b, r = activations(3, K), activations(3, K, seed="b"), activations(3, N, seed="r")
    same_gradients(
        lambda a, b, r: ops.swiglu_linear(a, b, w[0], None, "q4_0", activation, r),
        lambda a, b, r: (act(a) * b) @ gate.T + r,
        [a, b, r],
        backend,
    )


def test_rope(backend: Backend) -> None:
    angle = activations(1, 3, 16, seed="angle")
    cos, sin = angle.cos(), angle.sin()
    put = (backend.put(cos), backend.put(sin))
    same_gradients(
        lambda qkv, g: ops.rope(qkv, *put, 2, 1, q_norm=g, eps=EPS, offset=1.0),
        lambda qkv, g: rope64(qkv, cos.double(), sin.double(), g),
        [activations(2, 3, 64), activations(16, seed="g")],
        backend,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_have_the_dtypes_of_their_inputs(dtype: torch.dtype, backend: Backend) -> None:
    w = backend.put(random_weight("q4_0", N, K))
    x, g = leaf(activations(3, K, dtype=dtype), backend), leaf(activations(K), backend)
    r = leaf(activations(3, N), backend)
    y = ops.norm_linear(x, g, EPS, 0.0, w, None, "q4_0", r)
    assert y.dtype == dtype
    grads = torch.autograd.grad(y.float().sum(), [x, g, r])
    assert [t.dtype for t in grads] == [dtype, torch.float32, torch.float32]
