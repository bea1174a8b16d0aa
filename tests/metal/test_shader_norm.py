"""Norms fused with each vector kernel, on the lockstep emulator; activations."""

from __future__ import annotations

import math

import pytest
import torch
from backends import compiled_dtype
from inputs import activations, random_weight
from layer_oracle import normalized
from oracle import TINY, Value, check, gamma, spec
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
        n, m, dtype = (1, 5, 33, 18)[i], 1 + i % 3, compiled_dtype(name, kernel)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gate_and_up_of_halves(dtype: torch.dtype) -> None:
    """As of f32 of the same values."""
    gate, up = (activations(1, 1000, seed=name)[0].to(dtype) for name in ("gate", "up"))
    y = [torch.full_like(gate, torch.nan) for _ in range(2)]
    for rounded in (False, True):
        x, x2 = (t if rounded else t.float() for t in (gate, up))
        execute("act_mul", {"x": x, "x2": x2, "y": y[rounded]}, n=1000, rounded=rounded)
    assert torch.equal(*y) and y[0].isfinite().all()


def test_relu2_rounds_once() -> None:
    gate = torch.cat([activations(500), torch.tensor([0.0, -0.0, 1e-30, -1e30, torch.inf])])
    gate = torch.cat([gate, torch.tensor([-torch.inf, torch.nan])])
    y = act_mul(gate, "relu2")
    assert torch.equal(y[:-1], torch.relu(gate[:-1]).square())
    assert y[-1].isnan()
