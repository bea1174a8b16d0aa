"""linear and gemm by torch's own matmul, forced: several panels, what joins them, and tracing."""

from __future__ import annotations

import pytest
import torch
from backends import Backend
from oracle import DTYPES, check, generator, integer_weight, linear, random_weight, spec, y64
from oracle import activations as random_x

from torch_metalmm import _C

ops = torch.ops.metalmm
# More than a panel of any engine in f32, and no whole number of them.
N, K = 4100, 4096


def test_several_panels(backend: Backend) -> None:
    """Every row of W is multiplied, and once: integers, whose sums are exact, at every edge that a
    panel may have."""
    if chip := backend.chip():
        sizes = {"m": 3, "n": N, "k": K, "format": "q4_0", "dtype": "f32", "chip": chip}
        assert _C.plan(**sizes, strategy="dense")["dense"]["panels"] == 2
    packed = integer_weight("q4_0", N, K)
    w = backend.put(packed)
    x = torch.randint(-4, 5, (3, K), generator=generator("dense")).float()
    edges = torch.tensor([n for n in range(N) if n % 16 in (0, 15) or n > N - 8])
    want = y64(x, spec("q4_0", packed[edges], K)).float()
    bias, c = torch.arange(N).float(), torch.arange(3.0)[:, None] - torch.arange(N)
    y = ops.linear(backend.put(x), w, None, "q4_0", "dense")
    assert y.is_contiguous() and torch.equal(y.cpu()[:, edges], want)
    y = ops.linear(backend.put(x), w, backend.put(bias), "q4_0", "dense", backend.put(c)).cpu()
    assert torch.equal(y[:, edges], want + (bias + c)[:, edges])
    y = ops.gemm(backend.put(x), w, "q4_0", backend.put(c), 0.5, -2.0, "dense").cpu()
    assert torch.equal(y[:, edges], want / 2 - 2 * c[:, edges])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_addends_of_any_dtype(dtype: torch.dtype, backend: Backend) -> None:
    """What joins the product is added in f32, whatever its dtype, and the result has that of x."""
    packed, x = random_weight("q5_1", 9, 96), random_x(7, 96, dtype=dtype)
    for other in DTYPES:
        bias = 100 * random_x(9, dtype=other, seed="bias")
        y = ops.linear(backend.put(x), backend.put(packed), backend.put(bias), "q5_1", "dense")
        assert y.dtype == dtype
        want = linear(x, spec("q5_1", packed, 96), bias, halved=dtype)
        check(y, want, f"bias {other}")


def test_autocast_reaches_the_op_and_not_what_it_calls(backend: Backend) -> None:
    """x is lowered once, by the op; the matmul inside takes it as it is."""
    if backend.device == "mps":
        pytest.skip("autocast of f32 on mps is f16 only")
    packed, x = backend.put(random_weight("q4_0", 9, 64)), backend.put(random_x(33, 64))
    lowered = ops.linear(x.bfloat16(), packed, None, "q4_0", "dense")
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = ops.linear(x, packed, None, "q4_0", "dense")
    assert y.dtype == torch.bfloat16 and torch.equal(y, lowered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_traced(dtype: torch.dtype, backend: Backend) -> None:
    """opcheck; a compiled graph has the bits of the call, with leading dimensions and a bias."""
    w = backend.put(random_weight("q4_k", 21, 512))
    x = backend.put(random_x(2, 17, 512, dtype=dtype)).requires_grad_()
    bias = backend.put(random_x(21, dtype=dtype))
    arguments = (x, w, bias, "q4_k", "dense")
    torch.library.opcheck(ops.linear.default, arguments)
    compiled = torch.compile(
        lambda x: ops.linear(x, w, bias, "q4_k", "dense"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), ops.linear(*arguments))
