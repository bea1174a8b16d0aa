"""Numbers that a model applies to what its embedding and its head give, in the ops of these."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.models.families import family
from torch_metalmm import activations_, fuse_, unfuse_
from torch_metalmm.nn.awaiting import Awaiting, Waiting
from torch_metalmm.nn.fused import owner_of

pytestmark = pytest.mark.filterwarnings("ignore")

# {family: (of the rows of its table, of its logits)}
APPLIED: dict[str, tuple[Any, Any]] = {
    "granite": (lambda y: y * 12.0, lambda y: y / 6.0),
    "falcon_h1": (lambda y: y * 5.6, lambda y: y * 0.02),
    "cohere2": (None, lambda y: y * 0.0625),
    "gemma2": (None, lambda y: torch.tanh(y / 30.0) * 30.0),
}
OPTIONS = {"granite": {"embedding_multiplier": 12.0, "logits_scaling": 6.0}}
U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@functools.cache
def both(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The model, as it is and fused; no test changes them."""
    model = family(kind, **OPTIONS.get(kind, {})).to(dtype)
    return model, fuse_(copy.deepcopy(model), "swiglu")


def ends(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0)).to(dtype)


IDS = torch.tensor([[5, 0, 7]])


@pytest.mark.parametrize("dtype", U, ids=str)
@pytest.mark.parametrize("kind", APPLIED)
def test_one_op_computes_both(kind: str, dtype: torch.dtype) -> None:
    """Rows to the bit; logits with a rounding less for each number."""
    model, fused = both(kind, dtype)
    (table, head), (own_table, own_head) = ends(fused), ends(model)
    of_rows, of_logits = APPLIED[kind]
    assert isinstance(owner_of(table), Awaiting) == (of_rows is not None)
    x = hidden(dtype)
    with torch.no_grad():
        if of_rows is not None:
            rows = of_rows(table(IDS))
            assert type(rows) is Tensor and torch.equal(rows, of_rows(own_table(IDS)))
        got, want = of_logits(head(x)), of_logits(own_head(x))
    assert type(got) is Tensor and got.dtype == dtype
    assert bool(((got - want).abs().float() <= 8 * U[dtype] * want.abs().float()).all())


@pytest.mark.parametrize("kind", APPLIED)
def test_logits_and_what_unfuse_leaves(kind: str) -> None:
    model, fused = both(kind)
    for other in (fused, copy.deepcopy(fused)):  # which has a head of its own
        assert owner_of(ends(other)[1]).module is ends(other)[1]
        with torch.no_grad():
            got, want = other(IDS).logits, model(IDS).logits
        assert type(got) is Tensor
        assert (got - want).norm() <= 2 * 2 * 14 * 256**0.5 * 2.0**-24 * want.norm()
    unfused = unfuse_(copy.deepcopy(fused))
    assert not any("forward" in vars(end) for end in ends(unfused))
    assert torch.equal(unfused(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["granite", "gemma2"])
def test_anything_else_is_given_the_own_result(kind: str) -> None:
    """Another number, another function, values, and a sum of what waits twice."""
    (_, own), (_, head) = map(ends, both(kind))
    x = hidden()
    with torch.no_grad():
        want = own(x)
        waiting = head(x)
        assert type(waiting) is Waiting and waiting.shape == want.shape and waiting.known is None
        assert (waiting.dtype, waiting.device, waiting.dim()) == (want.dtype, want.device, 3)
        for function in (
            lambda y: y * 0.3,
            lambda y: y / 6.5,
            lambda y: y / 30.0 / 6.0,
            lambda y: (y / 30.0).tanh() * 29.0,
            lambda y: y + y,
            lambda y: y[:, -1].tolist(),
            lambda y: torch.ops.aten.exp.default(y),
            lambda y: y.mul_(6.0).sum(),
            lambda y: (y.argmax(-1), y / 6.0)[1],
            lambda y: y * y,
        ):
            got, of_own = function(head(x)), function(own(x))
            assert got == of_own if isinstance(got, list) else torch.equal(got, of_own)
            assert type(got) is not Waiting


def test_a_number_that_changes_later() -> None:
    model, fused = both("granite")
    pair = [copy.deepcopy(m) for m in (model, fused)]
    for each in pair:
        each.model.embedding_multiplier, each.config.logits_scaling = 2.0, 3.0
    with torch.no_grad():
        want, got = (each(IDS).logits for each in pair)
    assert (got - want).norm() <= 2 * 2 * 14 * 128**0.5 * 2.0**-24 * want.norm()


def test_where_the_own_forward_computes() -> None:
    """Gradients, traces, a bias, rounded activations, autocast."""
    model, fused = both("granite")
    x = hidden().requires_grad_()
    grads = [
        torch.autograd.grad((head(x) / 6.0).sum(), x)[0] for _, head in map(ends, both("granite"))
    ]
    assert torch.equal(*grads)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got, want = compiled(IDS, use_cache=False).logits, model(IDS).logits
        assert (got - want).norm() <= 2 * 2 * 14 * 128**0.5 * 2.0**-24 * want.norm()
        with torch.autocast("cpu", torch.bfloat16):
            assert type(ends(fused)[1](hidden())) is Tensor
        for change in (
            lambda m: activations_(m, "int8"),
            lambda m: setattr(ends(m)[1], "bias", nn.Parameter(torch.ones(320), False)),
        ):
            pair = [copy.deepcopy(m) for m in (model, fused)]
            for each in pair:
                change(each)
            assert torch.equal(*(ends(each)[1](hidden()) for each in pair))
            assert type(ends(pair[1])[1](hidden())) is Tensor


def test_steps_that_no_op_has() -> None:
    """Two tanh of logits, a tanh of rows; a model that applies nothing."""
    _, fused = both("gemma2")
    table, head = ends(copy.deepcopy(fused))
    tanh = ("tanh", 1.0)
    for end, steps in ((head, (tanh, tanh)), (table, (tanh,))):
        with pytest.raises(ValueError, match=r"steps: .*; allowed: products, of a head with one"):
            Awaiting(end).expect(steps)
    assert not any(isinstance(owner_of(end), Awaiting) for end in ends(both("llama")[1]))
