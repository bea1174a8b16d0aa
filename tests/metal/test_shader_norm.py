"""Norms on the lockstep emulator, fused with the vector kernels and as passes; activations."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import activations, random_weight
from layer_oracle import normalized
from oracle import DTYPES, TINY, Value, check, gamma, spec
from shaders import execute, memory_of
from torch import Tensor

from torch_metalmm import _C, formats

pytestmark = pytest.mark.shaders

KERNELS = tuple(s for s in _C.strategies("linear") if _C.strategy(s)["takes_norm"])
# A format of each family, and of each way of the vector kernels through K.
KINDS = ("f32", "f16", "q4_0", "q8_0", "q4_k", "q6_k", "iq4_nl", "mxfp4", "affine4_g64")
EPS = 1e-5


def norm_linear(
    strategy: str,
    name: str,
    packed: Tensor,
    x: Tensor,
    weight: Tensor | None,
    offset: float = 0.0,
    *,
    gap: int = 0,
    bias: Tensor | None = None,
    c: Tensor | None = None,
) -> Tensor:
    """norm(x) Wᵀ + bias + c; `gap` values between rows of x, and before the weight of the norm."""
    (m, k), n = x.shape, packed.shape[0]
    norm = None if weight is None else memory_of(weight[None], offset=gap)
    buffers = {
        "x": memory_of(x, gap, gap),
        "norm": norm,
        "weight": packed,
        "y": torch.full((m, n), torch.nan, dtype=x.dtype),
        "bias": bias,
        "c": c,
    }
    return execute(
        "linear", buffers, m=m, n=n, k=k, format=name, strategy=strategy, norm=True,
        norm_weight=weight is not None, eps=EPS, offset=offset, bias=bias is not None,
        c=c is not None, beta=float(c is not None), x_stride=k + gap,
    )  # fmt: skip


def lengths(name: str) -> list[int]:
    """K of one block, of some, and so long that lanes loop, with a rest."""
    block = formats.get(name).block_values
    return [1, 7, 130, 2061] if block == 1 else [block, 3 * block, 2048 + block]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", KINDS)
def test_products_of_a_norm(name: str, kernel: str) -> None:
    """Tails of N and of K, rows at any alignment, with and without weight, offset and addends."""
    for i, k in enumerate(lengths(name)):
        n, m, dtype = (1, 5, 33, 18)[i], 1 + i % 3, DTYPES[i % 3]
        packed = random_weight(name, n, k)
        x, g = activations(m, k, dtype=dtype, seed=i), activations(k, dtype=dtype, seed="g")
        bias, c = activations(n, dtype=dtype, seed="b"), activations(m, n, dtype=dtype, seed="c")
        for weight, offset, gap in ((g, 0.0, 0), (None, 0.0, 3), (g, 1.0, 1)):
            want = normalized(x, weight, EPS, offset).dot(spec(name, packed, k), k + 8)
            y = norm_linear(kernel, name, packed, x, weight, offset, gap=gap)
            check(y, want.store(dtype), f"{kernel} {name} N={n} K={k}")
        y = norm_linear(kernel, name, packed, x, g, 1.0, bias=bias, c=c)
        want = want + Value.of(bias) + Value.of(c)
        check(y, want.store(dtype), f"{kernel} {name} N={n} K={k} with addends")


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_a_batch_are_those_of_gemv(name: str) -> None:
    """gemv_batched normalises every row as gemv does, to the bit, whatever its neighbours."""
    k = lengths(name)[-1]
    packed, g = random_weight(name, 6, k), activations(k, seed="g")
    for m, dtype in ((2, torch.float16), (5, torch.bfloat16), (17, torch.float32)):
        x = activations(m, k, dtype=dtype, seed=m) * 2.0 ** (torch.arange(m) % 5)[:, None]
        x, weight = x.to(dtype), g.to(dtype)
        alone = [norm_linear("gemv", name, packed, row, weight) for row in x.split(1)]
        for kernel in ("gemv_batched", "gemv", "gemv_wide_n"):
            y = norm_linear(kernel, name, packed, x, weight)
            assert torch.equal(y, torch.cat(alone)), (kernel, m)


@pytest.mark.parametrize("name", KINDS)
def test_gate_and_up_of_a_norm(name: str) -> None:
    k, n = lengths(name)[-1], 5
    gate, up = random_weight(name, n, k, seed="g"), random_weight(name, n, k, seed="u")
    for dtype in DTYPES:
        x = activations(2, k, dtype=dtype)
        g = (activations(k, seed="g") / 16).to(dtype)
        n_x = normalized(x, g, EPS)
        a, b = (n_x.dot(spec(name, w, k), k + 8) for w in (gate, up))
        y = torch.full((2, n), torch.nan, dtype=dtype)
        y = execute(
            "swiglu_up", {"x": x, "norm": g, "weight": gate, "weight2": up, "y": y},
            m=2, n=n, k=k, format=name, norm=True, norm_weight=True, eps=EPS,
        )  # fmt: skip
        check(y, (a.silu() * b).store(dtype), f"{name} {dtype}")


def test_the_sum_of_squares_does_not_overflow_half() -> None:
    """65504² is no f16, and neither is g x before the norm scales it."""
    packed = random_weight("q4_0", 3, 64)
    x, g = torch.full((1, 64), 65504.0).half(), torch.full((64,), 8.0).half()
    for kernel in KERNELS:
        want = normalized(x, g, EPS).dot(spec("q4_0", packed, 64), 72)
        check(norm_linear(kernel, "q4_0", packed, x, g), want.store(torch.float16), kernel)


# ---- passes


def row_norm(op: str, x: Tensor, gap: int, offset: int, **more: Tensor | None) -> dict[str, Tensor]:
    """y, and y2 of add_rms_norm; x has `gap` values between its rows and `offset` before."""
    m, k = x.shape
    empty = torch.full((m, k), torch.nan, dtype=x.dtype)
    buffers = {"x": memory_of(x, gap, offset), "y": empty, "y2": empty.clone(), **more}
    has_c = more.get("c") is not None
    execute(
        op, buffers, m=m, k=k, norm_weight=more["norm"] is not None, eps=EPS, offset=1.0,
        c=has_c, beta=float(has_c), x_stride=k + gap,
        **({"x2_stride": k} if op == "add_rms_norm" else {}),
    )  # fmt: skip
    return buffers


# Around 16 bytes, a vector for each of 512 threads, and more.
@pytest.mark.parametrize("k", [1, 3, 8, 15, 2048, 4095, 4104, 9001])
def test_rms_norm(k: int) -> None:
    for i, dtype in enumerate(DTYPES):
        m = 1 + i
        x, c = activations(m, k, dtype=dtype), activations(m, k, dtype=dtype, seed="c")
        g = activations(k, dtype=dtype, seed="g")
        for gap, offset in ((0, 0), (16, 8), (3, 1)):
            want = normalized(x, g, EPS, 1.0) + Value.of(c)
            y = row_norm("rms_norm", x, gap, offset, norm=g, c=c)["y"]
            check(y, want.store(dtype), f"K={k} {dtype}")
        y = row_norm("rms_norm", x, 0, 0, norm=None)["y"]
        check(y, normalized(x, None, EPS).store(dtype), f"K={k} {dtype} without weight")


@pytest.mark.parametrize("k", [1, 8, 4095, 4104])
def test_add_rms_norm(k: int) -> None:
    for dtype in DTYPES:
        x, x2 = activations(2, k, dtype=dtype), activations(2, k, dtype=dtype, seed="x2")
        g = activations(k, dtype=dtype, seed="g")
        for gap, offset in ((0, 0), (16, 8), (3, 1)):
            made = row_norm("add_rms_norm", x, gap, offset, x2=x2, norm=g)
            total = (x.float() + x2.float()).to(dtype)
            assert torch.equal(made["y2"], total)
            check(made["y"], normalized(total, g, EPS, 1.0).store(dtype), f"K={k} {dtype}")


# ---- activations


def act_mul(gate: Tensor, activation: str) -> Tensor:
    y = torch.full_like(gate, torch.nan)
    up = torch.ones_like(gate)
    return execute("act_mul", {"x": gate, "x2": up, "y": y}, n=len(gate), activation=activation)


def test_gelu_of_every_half() -> None:
    """Within (9 + x² / 2 + 2) u of the result, 2 u the error of exp; NaN of NaN alone."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    gate = bits.view(torch.float16).float()
    gate = torch.cat([gate[gate.isfinite()], torch.linspace(-14, 14, 20001)])
    y, x = act_mul(gate, "gelu").double(), gate.double()
    exact = x / 2 * torch.special.erfc(-x / math.sqrt(2))
    bound = gamma(11 + x.square() / 2).where(x.abs() < 14, 1.0) * exact.abs() + 16 * TINY
    assert ((y - exact).abs() <= bound).all()
    assert act_mul(torch.tensor([torch.nan]), "gelu").isnan().all()
    assert act_mul(torch.tensor([1e30, torch.inf, -1e30]), "gelu").tolist()[1:] == [torch.inf, 0]


def test_relu2_rounds_once() -> None:
    gate = torch.cat([activations(500), torch.tensor([0.0, -0.0, 1e-30, -1e30, torch.inf])])
    gate = torch.cat([gate, torch.tensor([-torch.inf, torch.nan])])
    y = act_mul(gate, "relu2")
    assert torch.equal(y[:-1], torch.relu(gate[:-1]).square())
    assert y[-1].isnan()
