"""Where plan() gives products to torch's matmul, the ops keep their bounds: M5, emulated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from inputs import activations, random_weight, short_k
from layer_oracle import normalized
from oracle import DTYPES, KINDS, Value, check, spec

from torch_metalmm import _C
from torch_metalmm.testing import emulated

ops = torch.ops.metalmm
M, N, EPS = 96, 21, 1e-5


@pytest.fixture(autouse=True)
def _m5() -> Iterator[None]:
    with emulated(checked=True, chip="m5"):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_products_within_the_bound(name: str, dtype: torch.dtype) -> None:
    """linear, norm_linear and swiglu of 96 rows: of halves, W and products rounded to them."""
    k = short_k(name)
    label = str(dtype).removeprefix("torch.").replace("float", "f")
    plan = _C.plan(m=M, n=N, k=k, format=name, dtype=label, chip="m5")
    assert bool(plan["dense"]) == (dtype != torch.float32)
    halved = dtype if plan["dense"] else False
    gate, up = (random_weight(name, N, k, seed=i) for i in range(2))
    values = [spec(name, w, k) for w in (gate, up)]
    x, g = activations(M, k, dtype=dtype) / 8, activations(k, dtype=dtype, seed="g")
    bias = activations(N, dtype=dtype, seed="bias")
    product = Value.of(x).dot(values[0], halved=halved)
    check(ops.linear(x, gate, None, name), product.store(dtype), "linear")
    joined = (product + Value.of(bias)).store(dtype)
    check(ops.linear(x, gate, bias, name), joined, "linear with a bias")
    rows = normalized(x, g, EPS, 1.0).store(dtype)
    y = ops.norm_linear(x, g, EPS, 1.0, gate, None, name)
    check(y, rows.dot(values[0], halved=halved).store(dtype), "norm_linear")
    a, b = (Value.of(x).dot(w, halved=halved) for w in values)
    check(ops.swiglu(x, gate, up, name, name), (a.silu() * b).store(dtype), "swiglu")
