"""Random calls of every op: values within their bounds, and what its fake says of the results."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from backends import Backend
from drawing import Call
from drawn_calls import DRAWS, drawn
from expert_oracle import strategies_of
from oracle import Value, check
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from wanted import WANTED

pytestmark = pytest.mark.schedules


def test_every_op_is_called() -> None:
    """The tables of calls and of results name every op; beside each is what computes its shape."""
    schemas = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("metalmm::")}
    named = {f"metalmm::{op}" for op in DRAWS}
    assert schemas == named | {name.replace("::", "::_") + "_shape" for name in named}
    assert DRAWS.keys() == WANTED.keys()


def written(op: str) -> list[str]:
    """The arguments that the op writes."""
    schema = getattr(torch.ops.metalmm, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def calls(op: str, backend: Backend, count: int, first: int = 0) -> Iterator[tuple[str, Call, Call]]:
    """What each is, a call with operands of its own on the CPU, and one on the engine's device."""
    how = {"strategies": partial(strategies_of, backend), "most": 300 if backend.is_slow else 1100}
    for number in range(first, first + count):
        call = drawn(op, number, **how)
        yield f"{op} {number}: {call}", call, drawn(op, number, **how).put(backend.put_view)


@pytest.mark.quick
@pytest.mark.isa
@pytest.mark.parametrize("op", DRAWS)
def test_random_calls(op: str, backend: Backend) -> None:
    """No input changes but those that the op writes, and no result shares memory with one."""
    for what, call, put in calls(op, backend, 12 if backend.is_slow else 99):
        results = put.run()
        after = put.tensors()
        got = [*results, *(after[n] for n in written(op))]
        for y, want in zip(got, WANTED[op](backend, **call.given), strict=True):
            if isinstance(want, Value):
                check(y, want, what)
            else:
                assert y.shape == want.shape and y.dtype == want.dtype, what
                assert torch.equal(y.cpu(), want), what
        for name, t in call.tensors().items():
            same = torch.equal(after[name].cpu().nan_to_num(7), t.nan_to_num(7))
            assert same or name in written(op), (name, what)
        memory = {t.untyped_storage().data_ptr() for t in after.values() if t.numel()}
        assert not memory & {y.untyped_storage().data_ptr() for y in results if y.numel()}, what
        as_of_its_fake(put, results, what)


def as_of_its_fake(call: Call, results: tuple[Tensor, ...], what: str) -> None:
    """Strides too, also of dimensions of size 1: compiled code relies on each."""
    with FakeTensorMode() as mode:
        fakes = call.put(mode.from_tensor).run()
    for y, fake in zip(results, fakes, strict=True):
        for attribute in ("shape", "dtype", "device", "stride", "storage_offset"):
            a, b = getattr(y, attribute), getattr(fake, attribute)
            assert (a() if callable(a) else a) == (b() if callable(b) else b), (attribute, what)
        assert y.stride() == torch.empty(y.shape).stride(), what
