"""torch.compile and torch.export see one op per layer, no graph break, and change no value."""

from __future__ import annotations

import copy

import pytest
import torch
from backends import Backend, leaf
from inputs import activations, random_weight
from oracle import DTYPES, Value, check, spec
from torch import Tensor, nn

from torch_metalmm import QuantLinear

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ops = torch.ops.metalmm


@pytest.fixture
def fresh_dynamo():
    """No compiled code, and no limit reached, from another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = QuantLinear.from_linear(nn.Linear(256, 48), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["q4_0", "q6_k", "affine4_g64", "bf16"])
def test_a_compiled_layer_equals_eager(name: str, dtype: torch.dtype, backend: Backend) -> None:
    """fullgraph: no break. The compiled layer calls the same op, so the bits are those of eager."""
    layer = Layer(name).to(backend.device)
    x = backend.put(activations(5, 256, dtype=dtype))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    assert torch.equal(compiled(x + 1), layer(x + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_of_a_compiled_layer(dtype: torch.dtype, backend: Backend) -> None:
    """Gradients under compile are those of eager, and within the bound of float64."""
    packed = random_weight("q5_1", 48, 96)
    layer = QuantLinear.from_packed(backend.put(packed), 96, "q5_1")

    def f(x: Tensor) -> Tensor:
        return layer(x)

    x, g = leaf(activations(6, 96, dtype=dtype), backend), activations(6, 48, dtype=dtype, seed="g")
    (eager,) = torch.autograd.grad(f(x), x, backend.put(g))
    (dx,) = torch.autograd.grad(torch.compile(f, fullgraph=True)(x), x, backend.put(g))
    assert torch.equal(dx, eager)
    check(dx, Value.of(g).dot(spec("q5_1", packed, 96).T).store(dtype), "compiled dx")


def test_autocast_compiles(backend: Backend) -> None:
    """Autocast inside a compiled function casts as it does in eager."""
    layer = Layer("q8_0").to(backend.device)

    def f(x: Tensor) -> Tensor:
        with torch.autocast(backend.device, torch.bfloat16):
            return layer.linear(x)

    x = backend.put(activations(4, 256))
    y = torch.compile(f, fullgraph=True)(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, f(x))


def test_a_copy_of_a_compiled_layer_is_its_own(backend: Backend) -> None:
    """Two layers of one class and different formats do not share a graph."""
    a, b = Layer("q4_0").to(backend.device), Layer("affine2_g32").to(backend.device)
    x = backend.put(activations(3, 256))
    for layer in (a, b, copy.deepcopy(a)):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), layer(x))


def test_autocast_reaches_torch_s_matmul_once(backend: Backend) -> None:
    """x is lowered once, by the op; the matmul inside takes it as it is."""
    if backend.device == "mps":
        pytest.skip("autocast of f32 on mps is f16 only")
    packed, x = backend.put(random_weight("q4_0", 9, 64)), backend.put(activations(33, 64))
    lowered = ops.linear(x.bfloat16(), packed, None, "q4_0", "dense")
    with torch.autocast(backend.device, dtype=torch.bfloat16):
        y = ops.linear(x, packed, None, "q4_0", "dense")
    assert y.dtype == torch.bfloat16 and torch.equal(y, lowered)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_s_matmul_is_traced(dtype: torch.dtype, backend: Backend) -> None:
    """opcheck; a compiled graph has the bits of the call, with leading dimensions and a bias."""
    w = backend.put(random_weight("q4_k", 21, 512))
    x = backend.put(activations(2, 17, 512, dtype=dtype)).requires_grad_()
    bias = backend.put(activations(21, dtype=dtype))
    arguments = (x, w, bias, "q4_k", "dense")
    torch.library.opcheck(ops.linear.default, arguments)
    compiled = torch.compile(
        lambda x: ops.linear(x, w, bias, "q4_k", "dense"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), ops.linear(*arguments))
