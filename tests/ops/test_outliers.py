"""A large x at a weight near 0: engines keep the bound of their kind (oracle.py)."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from inputs import activations
from inputs import random_weight as random_packed
from oracle import APART, BIASES, SUBNORMALS, Value, check, linear_apart, spec

from torch_metalmm import testing

ops = torch.ops.metalmm

OUTLIER = 1e5
N, K = 64, 512


def problem(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x f32 [2, K] with an outlier at the weight that is smallest beside its block's, and W."""
    packed = random_packed(name, N, K, "outlier")
    w = spec(name, packed, K).abs()
    near_zero = int((w / w.mean(1, keepdim=True)).min(0).values.argmin())
    x = activations(2, K, seed=name)
    x[:, near_zero] = OUTLIER
    return x, packed


@pytest.mark.parametrize("dtype", [torch.float32], ids=str)
@pytest.mark.formats
def test_every_kernel(
    name: str, dtype: torch.dtype, backend: Backend, strategy: str | None
) -> None:
    """Formats that are summed apart round d q x and m x apart, others only w x."""
    x, packed = problem(name)
    if name in APART:
        want = linear_apart(x, name, packed)
    else:
        want = Value.of(x).dot(spec(name, packed, K), K + 8).store(dtype)
    y = ops.linear(backend.put(x), backend.put(packed), None, name, strategy=strategy)
    check(y, want, f"{name} {strategy}")


@pytest.mark.isa
@pytest.mark.parametrize("scale", [2.0**-96, 2.0**108])
@pytest.mark.parametrize("name", ["q4_0", "q8_0", "q4_k", "q6_k", "iq4_xs", "mxfp4"])
def test_small_and_large_x(name: str, scale: float) -> None:
    """Instruction sets that scale sums of codes and x lose nothing from 2^-102 to 2^115."""
    x = activations(2, K, seed=name)
    packed = random_packed(name, N, K, "range")
    want = Value.of(x * scale).dot(spec(name, packed, K), K + 8).store(torch.float32)
    y = ops.linear(x * scale, packed, None, name)
    assert y.isfinite().all() and y.any()
    check(y, want, name)


@pytest.mark.parametrize("name", [*BIASES, *SUBNORMALS])
def test_codes_with_a_bias(name: str) -> None:
    """Every group and dtype of scales: one of a struct may be exact where another is not."""
    x, packed = problem(name)
    with testing.emulated(checked=True):
        y = ops.linear(x, packed, None, name)
    check(y, linear_apart(x, name, packed), name)
