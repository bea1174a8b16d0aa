"""Bad arguments: the error names the argument, what was given and what is allowed.

Fake and meta tensors get the same errors, so that a bad call fails when it is traced.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backends import Backend
from cache_calls import CACHE_CASES
from error_cases import CASES as BASE
from error_cases import Case, K, N, arguments, ops
from expert_calls import EXPERT_CASES
from layer_error_cases import LAYER_CASES
from op_calls import named, op_calls
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_metalmm import _C, formats

CASES = BASE | LAYER_CASES | CACHE_CASES | EXPERT_CASES


def expect(case: Case, t: Any) -> str:
    """The first line of the error, which says what the case asks for."""
    with pytest.raises(case.error) as caught:
        case.call(t)
    assert type(caught.value) is case.error
    message = str(caught.value).splitlines()[0]
    pattern = f"^({case.argument}).*?({case.given}).*({case.allowed})"
    assert re.search(pattern, message), f"{pattern!r} not in {message!r}"
    return message


@pytest.mark.parametrize("label", CASES)
def test_bad_arguments(label: str, backend: Backend) -> None:
    """Of tensors, also where a gradient is recorded, of fakes, in the same words, and on meta."""
    put = {k: backend.put(v) for k, v in arguments().items()}
    t, case = SimpleNamespace(**put), CASES[label]
    if case.nearest and backend.device != "cpu":
        nearest = backend.put(torch.tensor(case.nearest))
        assert torch.equal(case.call(t), ops.embedding(nearest, t.w, "q4_0"))
        return
    said = expect(case, t)
    recorded = SimpleNamespace(**put | {"x": put["x"].clone().requires_grad_()})
    with pytest.raises(case.error, match=f"^{case.argument}|requires grad, but .* has no gradient"):
        case.call(recorded)
    if not case.data:
        with FakeTensorMode() as mode:
            fakes = SimpleNamespace(**{k: mode.from_tensor(v) for k, v in put.items()})
            assert expect(case, fakes) == said
        if case.argument != "strategy":  # which belongs to an engine, and meta is none
            expect(case, SimpleNamespace(**{k: v.to("meta") for k, v in put.items()}))


@pytest.mark.parametrize("axis", [-1, 3])
def test_an_axis_is_a_row_of_the_positions(axis: int, backend: Backend) -> None:
    """A device is not waited for to see one: it takes the nearest."""
    positions, freq = torch.arange(6).view(3, 1, 2), torch.ones(4)
    given = [backend.put(t) for t in (positions, freq, torch.tensor([0, 1, axis, 2]))]
    if backend.device == "cpu":
        with pytest.raises(IndexError, match=f"axes: {axis} is out of range; positions has 3 rows"):
            ops.rope_tables(*given)
    else:
        nearest = backend.put(torch.tensor([0, 1, min(max(axis, 0), 2), 2]))
        assert torch.equal(ops.rope_tables(*given)[0], ops.rope_tables(*given[:2], nearest)[0])


LARGEST_K = 2**48


@pytest.mark.parametrize("k", [LARGEST_K + 32, 2**62, 2**62 + 1, 2**63 - 32])
@pytest.mark.parametrize("name", ["f32", "q4_0", "affine4_g32"])
@pytest.mark.parametrize("fake", [False, True])
def test_k_beyond_what_64_bits_count_in_bytes(k: int, name: str, fake: bool) -> None:
    """Rows of so many values are an error by name, and none has bytes that overflowed."""
    with FakeTensorMode() if fake else nullcontext():
        none = torch.empty(0, 36, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"^weight: K = {k}; at most {LARGEST_K}$"):
            ops.dequantize(none, name, k)
        wide = torch.empty(0, min(k, 2**62), dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"^weight: rows of .* at most {LARGEST_K}$"):
            ops.dequantize(wide, name)
    with pytest.raises(ValueError, match="^k: "):
        _C.plan(n=1, k=k // 256 * 256, format=name, chip="m1")


def test_the_largest_k() -> None:
    rows = torch.empty(0, formats.get("q4_0").row_bytes(LARGEST_K), dtype=torch.uint8)
    assert ops.dequantize(rows, "q4_0").shape == (0, LARGEST_K)


@pytest.mark.parametrize("sizes", [{"m": 2**62}, {"n": 2**62}, {"m": 2**32, "n": 2**31}])
@pytest.mark.parametrize("forced", [None, "gemm_naive", "split_reduce"])
def test_plans_of_sizes_beyond_32_bits(sizes: dict[str, int], forced: str | None) -> None:
    with pytest.raises(ValueError, match="^(m|n|grid|threads|shape): .* does not fit (32|64) bits"):
        _C.plan(**{"m": 2, "n": 2, "k": 256, "format": "q4_k", "chip": "m1"} | sizes,
                strategy=forced)  # fmt: skip
    for name in ("x_stride", "y_stride", "w_stride", "w2_stride"):
        with pytest.raises(ValueError, match=f"^stride: {2**62}; must be 0 to {2**56}"):
            _C.plan(**{"m": 2, "n": 2, "k": 256, "format": "q4_k", "chip": "m1", name: 2**62})


def test_names_are_taken_in_any_case(backend: Backend) -> None:
    t = SimpleNamespace(**{k: backend.put(v) for k, v in arguments().items()})
    for strategy in ("gemv", "gemm"):
        want = ops.linear(t.x, t.w, None, "q4_0", strategy)
        assert torch.equal(ops.linear(t.x, t.w, None, "Q4_0", strategy.upper()), want)
    assert torch.equal(ops.probe(t.x, t.x, "ADD"), ops.probe(t.x, t.x, "add"))
    want = ops.dequantize(t.wide, "affine2_g32", 128)
    assert torch.equal(ops.dequantize(t.wide, "Affine2_G32", 128), want)
    with FakeTensorMode() as mode:
        assert ops.dequantize(mode.from_tensor(t.w), "Q4_0").shape == (N, K)


CALLS = op_calls(torch.float32)
PACKED = ("weight", "gate_weight", "up_weight", "shared_weight")
FROZEN = {
    f"{label}: {name}": (call[0], named(call), name)
    for label, call in CALLS.items()
    for name in PACKED
    if isinstance(w := named(call).get(name), Tensor) and w.dtype == torch.uint8
}


@pytest.mark.parametrize("label", FROZEN)
@pytest.mark.parametrize("fake", [False, True])
def test_a_weight_that_requires_grad(label: str, fake: bool, backend: Backend) -> None:
    """No op returns a result through which the gradient would be lost."""
    op, given, name = FROZEN[label]
    put = {k: backend.put(v) if isinstance(v, Tensor) else v for k, v in given.items()}
    put[name] = put[name].float()
    with FakeTensorMode() as mode:
        if fake:
            put = {k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in put.items()}
    with mode if fake else nullcontext():
        put[name].requires_grad_()
        with pytest.raises(ValueError, match=rf"{name}: requires grad, .* pass {name}.detach\(\)"):
            op(**put)


def of_linear(t: Any) -> Any:
    return ops.linear(t.x, t.w, t.bias, "q4_0")


def of_embedding(t: Any) -> Any:
    return ops.embedding(t.ids, t.w, "q4_0")


MIXED = {
    "x": (of_linear, lambda t: ops.swiglu_linear(t.x, t.x, t.w, None, "q4_0")),
    "w": (of_linear, of_embedding, lambda t: ops.gemm(t.x, t.w, "q4_0")),
    "bias": (of_linear,),
    "c": (lambda t: ops.gemm(t.x, t.w, "q4_0", t.c),),
    "ids": (of_embedding,),
}


@pytest.mark.parametrize("one", MIXED)
def test_tensors_of_two_devices(one: str, backend: Backend) -> None:
    """One argument on meta is an error that names both devices, not a result without data."""
    put = {k: backend.put(v) for k, v in arguments().items()}
    t = SimpleNamespace(**put | {one: put[one].to("meta")})
    for call in MIXED[one]:
        with pytest.raises(ValueError, match=r"^\w+: is on .*must be on one device") as caught:
            call(t)
        assert "meta" in str(caught.value) and backend.device in str(caught.value)
