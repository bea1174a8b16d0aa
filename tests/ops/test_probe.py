"""The probes: element-wise results are the correctly rounded ones, dot keeps its bound."""

from __future__ import annotations

import operator

import pytest
import torch
from backends import Backend

SIZES = (0, 1, 3, 255, 256, 1023, 1024, 1025, 5000)
ELEMENTWISE = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def operands(n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    x, x2 = (torch.randn(n + 1, generator=g).to(dtype)[1:] for _ in range(2))
    return x, x2  # one element into their memory


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ELEMENTWISE)
def test_elementwise_rounds_once(op: str, dtype: torch.dtype, backend: Backend) -> None:
    for n in SIZES:
        x, x2 = operands(n, dtype)
        got = torch.ops.metalmm.probe(backend.put_view(x), backend.put_view(x2), op).cpu()
        # f32 rounds the exact result; rounding that to half or bfloat is what every engine does.
        want = ELEMENTWISE[op](x.double(), x2.double()).float().to(dtype)
        assert torch.equal(got, want), n


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dot_is_within_its_bound(dtype: torch.dtype, backend: Backend) -> None:
    for n in SIZES:
        x, x2 = operands(n, dtype)
        got = torch.ops.metalmm.probe(backend.put_view(x), backend.put_view(x2), "dot").cpu()
        want = torch.dot(x.double(), x2.double())
        # n products and additions in any order, one rounding of the result.
        bound = (n + 1) * 2.0**-24 * torch.dot(x.double().abs(), x2.double().abs())
        bound += torch.finfo(dtype).eps / 2 * (want.abs() + bound)
        assert (got.double() - want).abs() <= bound, n


def test_a_gradient_is_refused(backend: Backend) -> None:
    x = backend.put(torch.ones(3)).requires_grad_()
    with pytest.raises(ValueError, match="x: requires grad, but probe has no gradient"):
        torch.ops.metalmm.probe(x, x, "add")
