"""The states that recurrent ops write: prompts in steps, views, what is refused, compiled calls."""

from __future__ import annotations

import pytest
import test_recurrent
import test_ssm_scan
import torch
from backends import Backend
from torch import Tensor

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules

OPS = {
    "gated_delta": (ops.gated_delta, test_recurrent.operands),
    "ssm_scan": (ops.ssm_scan, test_ssm_scan.operands),
    "causal_conv": (ops.causal_conv, test_recurrent.conv_operands),
}
SCANS = tuple(OPS)[:2]  # whose states are [sequences, heads, ...]


def put_operands(op: str, shape: tuple[int, ...], backend: Backend) -> dict[str, Tensor]:
    return {n: backend.put(t) for n, t in OPS[op][1](shape, torch.float32).items()}


@pytest.mark.parametrize("op", SCANS)
def test_a_prompt_is_its_steps(op: str, backend: Backend) -> None:
    """Bit for bit; of no positions and of no sequences the state is left alone."""
    call, given = OPS[op][0], put_operands(op, (2, 5, 1, 2, 48, 20), backend)
    whole = given.pop("state")
    rest = {n: given.pop(n) for n, t in [*given.items()] if t.dim() == 1}
    state = whole.clone()
    y = call(**given, **rest, state=whole)
    steps = [
        call(**{n: t[:, i : i + 1] for n, t in given.items()}, **rest, state=state)
        for i in range(5)
    ]
    assert torch.equal(torch.cat(steps, 1), y) and torch.equal(state, whole)
    none = {n: t[:, :0] for n, t in given.items()}
    assert call(**none, **rest, state=state).shape == y[:, :0].shape
    none = {n: t[:0] for n, t in given.items()}
    assert call(**none, **rest, state=state[:0]).shape == y[:0].shape
    assert torch.equal(state, whole)


@pytest.mark.parametrize("op", SCANS)
def test_a_state_that_is_a_view(op: str, backend: Backend) -> None:
    """One that begins between 16 bytes, and one with gaps, whose neighbours stay."""
    call, given = OPS[op][0], put_operands(op, (2, 2, 1, 2, 16, 8), backend)
    state = given.pop("state")
    for memory, view in (
        (torch.ones(513), lambda t: t[1:].view(2, 2, 16, 8)),
        (torch.ones(2, 3, 16, 12), lambda t: t[:, 1:, :, 3:11]),
    ):
        put = backend.put(memory)
        view(put).copy_(state)
        want, outside = state.clone(), put.clone()
        y = call(**given, state=want)
        assert torch.equal(call(**given, state=view(put)), y)
        assert torch.equal(view(put), want)
        view(outside).copy_(want)
        assert torch.equal(put, outside)


@pytest.mark.parametrize(
    ("op", "shape", "names"),
    [
        ("gated_delta", (2, 2, 1, 2, 16, 8), ("a",)),
        ("ssm_scan", (2, 2, 1, 2, 16, 8), ("dt", "gate")),
        ("causal_conv", (2, 2, 6, 3, 3), ("x",)),
    ],
)
def test_refused_for_their_memory(
    op: str, shape: tuple[int, ...], names: tuple[str, ...], backend: Backend
) -> None:
    given = put_operands(op, shape, backend)
    state, before = given["state"], given["state"].clone()
    for name in names:
        inside = state.view(-1)[: given[name].numel()].view(given[name].shape)
        with pytest.raises(ValueError, match=f"{name}: shares memory with state"):
            OPS[op][0](**given | {name: inside})
    with pytest.raises(ValueError, match="state: .* its own place"):
        OPS[op][0](**given | {"state": state[:1].expand_as(state)})
    assert torch.equal(state, before)


@pytest.mark.parametrize("op", SCANS)
def test_a_compiled_step(op: str, backend: Backend) -> None:
    """What is compiled sees the state that it wrote."""
    given = put_operands(op, (1, 1, 1, 2, 16, 8), backend)
    state = given.pop("state")

    def step(state: Tensor) -> Tensor:
        y: Tensor = OPS[op][0](**given, state=state)
        return y.sum() + state.sum()

    torch._dynamo.reset()
    results = []
    for f in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        own = state.clone()
        results.append((f(own), f(own), own))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
