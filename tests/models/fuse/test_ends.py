"""Numbers that a model applies to what its embedding and its head give, in the ops of these."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from layer_models import near
from torch import Tensor, nn

from bench.models.families import family
from torch_metalmm import activations_, fuse_, quantize_
from torch_metalmm.nn.awaiting import Awaiting, Waiting, caller
from torch_metalmm.nn.fused import owner_of

pytestmark = pytest.mark.filterwarnings("ignore")

# {family: (of the rows of its table, of its logits)}
APPLIED: dict[str, tuple[Any, Any]] = {
    "granite": (lambda y: y * 12.0, lambda y: y / 6.0),
    "falcon_h1": (lambda y: y * 5.6, lambda y: y * 0.02),
    "cohere2": (None, lambda y: y * 0.0625),
    "gemma2": (None, lambda y: torch.tanh(y / 30.0) * 30.0),
}
rms_norm = torch.ops.metalmm.rms_norm
OPTIONS = {"granite": {"embedding_multiplier": 12.0, "logits_scaling": 6.0}}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


def read(end: nn.Module, x: Tensor, function: Any = lambda y: y) -> Any:
    """function(end(x)), as the model's own forward calls the end."""
    owner = owner_of(end)
    if not isinstance(owner, Awaiting):
        return function(end(x))
    known = owner.reader
    owner.reader = Here()()
    try:
        return function(end(x))
    finally:
        owner.reader = known


class Here(nn.Module):
    """Who calls it."""

    def forward(self) -> Any:
        return caller()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
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
            rows = read(table, IDS, of_rows)
            assert type(rows) is Tensor and torch.equal(rows, of_rows(own_table(IDS)))
        got, want = read(head, x, of_logits), of_logits(own_head(x))
    assert type(got) is Tensor and got.dtype == dtype
    assert bool(
        ((got - want).abs().float() <= 4 * torch.finfo(dtype).eps * want.abs().float()).all()
    )


@pytest.mark.parametrize("kind", ["granite", "gemma2"])
def test_anything_else_is_given_the_own_result(kind: str) -> None:
    """Another number, another function, values, and a sum of what waits twice."""
    (_, own), (_, head) = map(ends, both(kind))
    x = hidden()
    with torch.no_grad():
        want = own(x)
        waiting = read(head, x)
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
            got, of_own = read(head, x, function), function(own(x))
            assert got == of_own if isinstance(got, list) else torch.equal(got, of_own)
            assert type(got) is not Waiting


def test_a_number_that_changes_later() -> None:
    model, fused = both("granite")
    pair = [copy.deepcopy(m) for m in (model, fused)]
    for each in pair:
        each.model.embedding_multiplier, each.config.logits_scaling = 2.0, 3.0
    with torch.no_grad():
        want, got = (each(IDS).logits for each in pair)
    assert near(got, want, 128, 28)


def test_where_the_own_forward_computes() -> None:
    """Gradients, traces, a bias, rounded activations, autocast."""
    model, fused = both("granite")
    x = hidden().requires_grad_()
    grads = [
        torch.autograd.grad(read(head, x, lambda y: y / 6.0).sum(), x)[0]
        for _, head in map(ends, both("granite"))
    ]
    assert torch.equal(*grads)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        got, want = compiled(IDS, use_cache=False).logits, model(IDS).logits
        assert near(got, want, 128, 28)
        with torch.autocast("cpu", torch.bfloat16):
            assert type(read(ends(fused)[1], hidden())) is Tensor
        for change in (
            lambda m: activations_(m, "int8"),
            lambda m: setattr(ends(m)[1], "bias", nn.Parameter(torch.ones(320), False)),
        ):
            pair = [copy.deepcopy(m) for m in (model, fused)]
            for each in pair:
                change(each)
            assert torch.equal(*(read(ends(each)[1], hidden()) for each in pair))
            assert type(read(ends(pair[1])[1], hidden())) is Tensor


def test_steps_that_no_op_has() -> None:
    """Two tanh of logits, a norm of them, a tanh of rows, a product behind their norm; a model that
    applies nothing."""
    _, fused = both("gemma2")
    table, head = ends(copy.deepcopy(fused))
    tanh, norm = ("tanh", 1.0), ("norm", 1e-6)
    wrong = ((head, (tanh, tanh)), (head, (norm,)), (table, (tanh,)), (table, (norm, ("mul", 2.0))))
    for end, steps in wrong:
        with pytest.raises(ValueError, match=r"steps: .*; allowed: products, of a head with one"):
            Awaiting(end).expect(steps)
    assert not any(isinstance(owner_of(end), Awaiting) for end in ends(both("llama")[1]))


def test_a_norm_of_rows_is_a_number_for_each() -> None:
    """Of the table as it is: copied, written in place, replaced. With a weight it is another."""
    model, fused = both("nanochat")
    norm = fused.model.norm
    assert owner_of(ends(fused)[0]).steps == (("norm", norm.eps),)
    pair = [copy.deepcopy(m) for m in (model, fused)]
    weight = torch.ones(128)
    bytes_of = pair[0].model.embed_tokens.weight.flip(0)
    for change in (
        lambda t: t.weight.copy_(bytes_of),
        lambda t: setattr(t, "weight", nn.Parameter(bytes_of.roll(1, 0), False)),
    ):
        for each in pair:
            with torch.no_grad():
                change(ends(each)[0])
        with torch.no_grad():
            rows, want = read(ends(pair[1])[0], IDS, norm), norm(ends(pair[0])[0](IDS))
            of_weight = read(ends(pair[1])[0], IDS, lambda y: rms_norm(y, weight, norm.eps))
        for got in (rows, of_weight):
            assert type(got) is Tensor and near(got, want, 128, 1)


def test_other_callers_are_given_values() -> None:
    """They may write to what the end has read, and read the result in another mode of torch."""
    (own_table, own_head), (table, head) = map(ends, both("granite"))
    x, ids = hidden(), IDS.clone()
    with torch.no_grad():
        y, rows = head(x), table(ids)
    assert type(y) is Tensor and type(rows) is Tensor
    x.zero_(), ids.fill_(1)
    with torch.no_grad():
        assert torch.equal(y, own_head(hidden())) and torch.equal(rows, own_table(IDS))
    assert not (y + 0).requires_grad
    zeros = {"weight": torch.zeros_like(head.weight)}
    with torch.no_grad():
        assert not torch.func.functional_call(head, zeros, (hidden(),)).any()


def test_a_gradient_that_a_hook_asks_for() -> None:
    """A soft prompt: the rows of the table are a leaf before the model multiplies them."""
    _, fused = both("granite")

    def asked(y: Tensor) -> tuple[Tensor, bool]:
        return y.requires_grad_(True), y.requires_grad

    rows, is_asked = read(ends(fused)[0], IDS, asked)
    assert is_asked and rows.requires_grad


FAULTS = (RuntimeError, torch.OutOfMemoryError, ArithmeticError, 1 + 2.0**-10)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_an_op_that_fails_or_differs_is_not_taken(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By more than its roundings: 2^-10, where logits are sums of 128 products in f32."""
    own = Awaiting.made

    def made(self: Awaiting, x: Tensor) -> Tensor:
        if isinstance(fault, float):
            return own(self, x) * fault
        raise fault("no such kernel")

    monkeypatch.setattr(Awaiting, "made", made)
    fused = fuse_(copy.deepcopy(both("granite")[0]), "swiglu")
    assert not any(isinstance(owner_of(end), Awaiting) for end in ends(fused))


def test_models_without_a_table_of_tokens() -> None:
    """Of images, of two towers, of sound: fuse_ leaves the ends that they do not have."""
    import transformers as t

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes["num_attention_heads"] = 2
    towers = {"text_config": sizes | {"vocab_size": 64}, "vision_config": sizes}
    towers["vision_config"] = sizes | {"image_size": 16, "patch_size": 8}
    models = [
        t.SegformerModel(t.SegformerConfig(hidden_sizes=[32, 64, 64, 64], depths=[1, 1, 1, 1])),
        t.CLIPModel(t.CLIPConfig(**towers)),
        t.ViTModel(t.ViTConfig(**sizes, image_size=16, patch_size=8)),
    ]
    for model in models:
        quantize_(model.eval(), "q8_0")
        assert fuse_(model) is model
