"""MPS tensors without a device: fake ones, which have its name and its dispatch keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_metalmm import QuantEmbedding, QuantLinear

ops = torch.ops.metalmm


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def linear(dtype: torch.dtype | None = None) -> QuantLinear:
    return QuantLinear(64, 8, True, "q4_0", "mps", dtype)


def on_mps(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, device="mps", dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layers(dtype: torch.dtype) -> None:
    """Packed bytes live on the device; results are there, in the dtype of x."""
    table = QuantEmbedding(10, 64, "q4_0", device="mps", dtype=dtype)
    hidden = table(on_mps(2, 3, dtype=torch.int64))
    y = linear(dtype)(hidden)
    for t, shape in ((hidden, (2, 3, 64)), (y, (2, 3, 8))):
        assert (t.device.type, t.dtype, tuple(t.shape)) == ("mps", dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    with torch.autocast("mps", dtype):
        assert linear()(on_mps(2, 64)).dtype == dtype


def test_operands_on_two_devices() -> None:
    """The message names one of them and both devices."""
    w, x, bias = linear().weight, on_mps(1, 64), on_mps(8)
    calls = {
        "weight: is on mps:0, the activations on cpu": lambda: ops.linear(
            x.new_zeros(1, 64, device="cpu"), w, bias, "q4_0"
        ),
        "weight: is on cpu, the activations on mps:0": lambda: ops.linear(
            x, w.new_zeros(8, 36, device="cpu"), bias, "q4_0"
        ),
        "bias: is on cpu, the activations on mps:0": lambda: ops.linear(
            x, w, bias.new_zeros(8, device="cpu"), "q4_0"
        ),
        "up_weight: is on cpu": lambda: ops.swiglu(
            x, w, w.new_zeros(8, 36, device="cpu"), "q4_0", "q4_0"
        ),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=f"{message}.*must be on one device"):
            call()


@pytest.mark.parametrize("op", ["linear", "swiglu", "swiglu_linear", "gemv", "gemm"])
def test_gradients_and_autocast_are_registered(op: str) -> None:
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for key in ("AutogradMPS", "AutocastMPS"):
        assert computed(f"metalmm::{op}", key), key
