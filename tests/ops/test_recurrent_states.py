"""The states that recurrent ops write: prompts in steps, views, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import test_recurrent
import torch
from backends import Backend
from torch import Tensor

ops = torch.ops.metalmm
pytestmark = pytest.mark.schedules

OPS = {
    "gated_delta": (ops.gated_delta, test_recurrent.delta_operands),
    "ssm_scan": (ops.ssm_scan, test_recurrent.ssm_operands),
    "causal_conv": (ops.causal_conv, test_recurrent.conv_operands),
}
SCANS = tuple(OPS)[:2]  # whose states are [sequences, heads, ...]


# {op: sizes of a prompt, and the positions of its parts}; causal_conv takes 32 of them at a time.
PROMPTS = dict.fromkeys(SCANS, ((2, 5, 1, 2, 48, 20), [1] * 5))
PROMPTS |= {"causal_conv": ((2, 70, 12, 4, 4), [1, 32, 1, 34, 2])}
View = Callable[[Tensor], Tensor]
# {op: sizes of a step, and views of two memories as its state}: one begins between 16 bytes, one
# has gaps.
STEPS: dict[str, tuple[tuple[int, ...], tuple[tuple[tuple[int, ...], View], ...]]] = dict.fromkeys(
    SCANS,
    (
        (2, 2, 1, 2, 16, 8),
        (
            ((513,), lambda t: t[1:].view(2, 2, 16, 8)),
            ((2, 3, 16, 12), lambda t: t[:, 1:, :, 3:11]),
        ),
    ),
)
STEPS["causal_conv"] = (
    (2, 3, 12, 4, 4),
    (((97,), lambda t: t[1:].view(2, 12, 4)), ((2, 13, 9), lambda t: t[:, 1:, 2:6])),
)


def put_operands(op: str, shape: tuple[int, ...], backend: Backend) -> dict[str, Tensor]:
    dtype = torch.float16 if op == "causal_conv" else torch.float32
    return {n: backend.put(t) for n, t in OPS[op][1](shape, dtype).items()}


@pytest.mark.parametrize("op", OPS)
def test_a_prompt_is_its_parts(op: str, backend: Backend) -> None:
    """Bit for bit; of no positions and of no sequences the state is left alone."""
    call, (shape, parts) = OPS[op][0], PROMPTS[op]
    given = put_operands(op, shape, backend)
    whole = given.pop("state")
    rows = {n: given.pop(n) for n, t in [*given.items()] if isinstance(t, Tensor) and t.dim() == 3}
    state = whole.clone()
    y = call(**rows, **given, state=whole)
    split = zip(*(t.split(parts, 1) for t in rows.values()), strict=True)
    ys = [call(**dict(zip(rows, part, strict=True)), **given, state=state) for part in split]
    assert torch.equal(torch.cat(ys, 1), y) and torch.equal(state, whole)
    none = {n: t[:, :0] for n, t in rows.items()}
    assert call(**none, **given, state=state).shape == y[:, :0].shape
    none = {n: t[:0] for n, t in rows.items()}
    assert call(**none, **given, state=state[:0]).shape == y[:0].shape
    assert torch.equal(state, whole)


@pytest.mark.parametrize("op", OPS)
def test_a_state_that_is_a_view(op: str, backend: Backend) -> None:
    """Its neighbours in memory stay."""
    call, (shape, views) = OPS[op][0], STEPS[op]
    given = put_operands(op, shape, backend)
    state = given.pop("state")
    for size, view in views:
        put = backend.put(torch.ones(size, dtype=state.dtype))
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
