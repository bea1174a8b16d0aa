"""Gradients of the ops between the matrix products, against float64 of what each is defined as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import recurrent_oracle
import torch
from backends import Backend, leaf
from gradients import same_gradients
from inputs import activations, random_weight
from layer_oracle import ACTIVATIONS, normalized, normed_heads, rotated
from oracle import U, Value, spec
from torch import Tensor

from torch_metalmm import _C

ops = torch.ops.metalmm
N, K, EPS = 9, 64, 1e-5


def norm64(x: Tensor, g: Tensor, offset: float) -> Tensor:
    return normalized(x, g, EPS, offset).exact


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
        lambda x, g, f, r: ops.norm_linear(x, g, EPS, 1.0, w, None, "q4_0", r, factors=f),
        lambda x, g, f, r: (norm64(x, g, 1.0) @ dense.T) * f + r,
        inputs,
        backend,
    )
    same_gradients(
        lambda x, c: ops.gemm(x, w, "q4_0", c, 0.5, 1.0, softcap=3.0),
        lambda x, c: 3 * torch.tanh((0.5 * x @ dense.T + c) / 3),
        [inputs[0][0], inputs[3][0]],
        backend,
    )
    same_gradients(
        lambda x, b, r: ops.linear(x, w, b, "q4_0", None, r),
        lambda x, b, r: x @ dense.T + b + r,
        [inputs[0], *inputs[2:]],
        backend,
    )


@pytest.mark.parametrize("activation", _C.activations())
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


@pytest.mark.parametrize("v_norm", [False, True])
@pytest.mark.parametrize("values", [16, 32])
def test_rope(values: int, v_norm: bool, backend: Backend) -> None:
    """2 heads of q, 1 of k and v, 16 values each, all rotated by halves; heads of q normalised,
    each or as one row, and v."""
    angle = activations(1, 3, 16, seed="angle")
    turn = angle.cos(), angle.sin()
    put, given = map(backend.put, turn), {"eps": EPS, "offset": 1.0, "v_norm": v_norm}
    cos, sin = put

    def exact(qkv: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (4, 16)).transpose(1, 2).split([2, 1, 1], 1)
        heads = normed_heads(q, g, EPS, 1.0), Value.of(k)
        v = normalized(v, None, EPS).exact if v_norm else v
        return *(rotated(t, *turn, False).exact for t in heads), v

    same_gradients(
        lambda qkv, g: ops.rope(qkv, cos, sin, 2, 1, q_norm=g, **given),
        exact,
        [activations(2, 3, 64), activations(values, seed="g")],
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


Given = Callable[..., list[Tensor]]


def recurrent_calls(
    each: Given, of: Any = ops
) -> dict[str, tuple[Callable[..., Any], list[Tensor], Any]]:
    """{op: (the op of operands and a state, the operands, sizes of the state)}; each(sizes ...)
    makes operands. of: what has the ops, or functions of their names."""
    s = 67  # more than the chunks in which a gradient is recorded have
    return {
        "gated_delta": (
            lambda *given: of.gated_delta(*given, 0.25),
            each((2, s, 24), (2, s, 2), (2, s, 2), (2,), (2,)),
            (2, 2, 8, 4),
        ),
        "ssm_scan": (
            lambda xbc, dt, a_log, dt_bias, d, gate, state: of.ssm_scan(
                xbc, dt, a_log, dt_bias, d, state, gate, 0.1, 1.5
            ),
            each((2, s, 24), (2, s, 2), (2,), (2,), (2,), (2, s, 8)),
            (2, 2, 4, 8),
        ),
        "causal_conv": (
            lambda x, weight, bias, state: of.causal_conv(x, weight, bias, state, "silu"),
            each((2, s, 6), (6, 3), (6,)),
            (2, 6, 3),
        ),
    }


OPS = ("gated_delta", "ssm_scan", "causal_conv")


@pytest.mark.parametrize("op", OPS)
def test_recurrent_ops(op: str, backend: Backend) -> None:
    """On a state of zeros."""
    each = lambda *sizes: [activations(*size, seed=size) for size in sizes]  # noqa: E731
    call, operands, sizes = recurrent_calls(each)[op]
    exact, zeros = recurrent_calls(each, recurrent_oracle)[op][0], torch.zeros(sizes)
    same_gradients(
        lambda *given: call(*given, backend.put(zeros.clone())),
        lambda *given: exact(*given, zeros.double())[0].exact,
        operands,
        backend,
    )


@pytest.mark.parametrize("op", OPS)
def test_a_recorded_recurrent_op_is_the_op(op: str, backend: Backend) -> None:
    """Of f16 rows, on a state that is not zero: y, to its rounding, and the state, which has no
    gradient; of no rows nothing; a state that requires grad is refused."""

    def each(*sizes: tuple[int, ...]) -> list[Tensor]:
        dtypes = (torch.float16 if len(size) == 3 else torch.float32 for size in sizes)
        return [
            backend.put(activations(*size, seed=size, dtype=dtype))
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]

    call, operands, sizes = recurrent_calls(each)[op]
    dtype = torch.float16 if op == "causal_conv" else torch.float32
    before = backend.put(activations(*sizes, seed="state", dtype=dtype))
    states = [before.clone() for _ in range(2)]
    want = call(*operands, states[0])
    y = call(operands[0].requires_grad_(), *operands[1:], states[1])
    assert y.requires_grad and not states[1].requires_grad
    assert y.dtype == torch.float16 and y.is_contiguous() and states[1]._version == 1
    for got, of, rounded in ((y, want, 2.0**-10), (states[1], states[0], 0.0)):
        error = float((got.detach().double() - of.double()).norm())
        assert error <= (rounded + 64 * K * U) * float(of.double().norm())
    none = [t[:, :0].detach().requires_grad_() if t.dim() == 3 else t for t in operands]
    assert call(*none, states[1]).shape[1] == 0 and states[1]._version == 1
    with pytest.raises(ValueError, match=f"state: requires grad, but {op} writes it"):
        call(*operands, before.requires_grad_())
