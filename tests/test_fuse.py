"""fuse_ on layers of one input: what they compute, and how everything is undone and saved."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend, leaf
from fuse_cases import Attention, Gated, K, Model, decoded, fused
from oracle import DTYPES, Value, activations, check, spec
from torch import Tensor, nn

from torch_metalmm import QuantLinear, formats, fuse, fuse_, quantize_, unfuse_
from torch_metalmm.fused import LinearPart, MergedLinear, SwiGLU

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["q4_k", "affine4_g64", "bf16"])
def test_merged_layers_compute_what_they_did(
    format: str, dtype: torch.dtype, backend: Backend
) -> None:
    module = Attention((format,) * 3, bias=True)
    layers = [copy.deepcopy(layer) for layer in (module.a, module.b, module.c)]
    fused(module.to(backend.device))
    assert [type(m) for m in (module.a, module.b, module.c)] == [LinearPart] * 3
    assert type(module.out) is QuantLinear
    for shape in ((K,), (1, K), (2, 5, K), (0, K)):
        x = activations(*shape, dtype=dtype)
        for y, layer in zip(module(backend.put(x)), layers, strict=True):
            check(y, oracle.linear(x, decoded(layer), layer.bias), f"{format} {shape}")
    assert module.merged_a_b_c._held is None


def test_one_op_computes_for_all_in_any_order() -> None:
    module = fused(Attention())
    x = activations(3, K)
    want = [oracle.linear(x, decoded(getattr(module, n))) for n in "abc"]
    calls: list[tuple[int, ...]] = []
    real = torch.ops.metalmm.linear.default

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if f is real:
                calls.append(tuple(args[1].shape))
            return f(*args, **(kwargs or {}))

    with Count():
        for order in ("abc", "cab", "b", "b", "ba"):
            for name in order:
                check(getattr(module, name)(x), want["abc".index(name)], order)
    row_bytes = formats.get("q4_k").row_bytes(K)
    whole, rows = (48 + 16 + 24, row_bytes), (16, row_bytes)
    # A part asked for twice computes alone; the others' outputs keep waiting.
    assert calls == [whole, whole, whole, rows, rows]


def test_parts_follow_the_tensor_not_its_value() -> None:
    module = fused(Attention())
    x, other = activations(3, K), activations(3, K, seed=1)
    module.a(x)
    check(module.b(other), oracle.linear(other, decoded(module.b)))
    check(module.c(x), oracle.linear(x, decoded(module.c)))


def test_only_layers_of_one_format_are_merged() -> None:
    module = fused(Attention(("q4_k", "q6_k", "q4_k")))
    assert type(module.b) is QuantLinear and type(module.merged_a_c) is MergedLinear
    assert not any(
        isinstance(m, MergedLinear) for m in fused(Attention(("f16", "q6_k", "q8_0"))).modules()
    )


def test_gradients_of_merged_layers(backend: Backend) -> None:
    """Moved after they were merged."""
    module, x = fused(Attention()).to(backend.device), leaf(activations(3, K), backend)
    g = [activations(3, n, seed=n) for n in (48, 16, 24)]
    (dx,) = torch.autograd.grad(module(x), x, [backend.put(t) for t in g])
    weights = [decoded(getattr(module, n)) for n in "abc"]
    check(dx, Value.of(torch.cat(g, 1)).dot(torch.cat(weights).T))


def test_threads_do_not_take_each_others_outputs() -> None:
    module = fused(Attention())
    inputs = [activations(2, K, seed=i) for i in range(4)]
    want = [[t.clone() for t in module(x)] for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(100):
            if not all(map(torch.equal, module(inputs[i]), want[i])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


class Code(nn.Module):
    """Forwards to be read, never run: which of a, b, c have one input?"""

    def chained(self, x: Tensor) -> Any:
        return self.c(self.a(x) * self.b(x))

    def assigned_after(self, x: Tensor) -> Any:
        x = self.a(x) * self.b(x)
        return self.c(x)

    def assigned_between(self, x: Tensor) -> Any:
        y = self.a(x)
        x = x + 1
        return y, self.b(x)

    def changed_between(self, x: Tensor) -> Any:
        y = self.a(x)
        x.add_(1)
        return y, self.b(x)

    def added_between(self, x: Tensor) -> Any:
        y = self.a(x)
        x += 1
        return y, self.b(x)

    def used_twice(self, x: Tensor) -> Any:
        return self.a(x), self.b(x), self.c(x), self.a(x)

    def read_too(self, x: Tensor) -> Any:
        return self.a(x.to(self.a.weight.dtype)), self.b(x), self.c(x)

    def in_branches(self, x: Tensor, cross: Tensor | None) -> Any:
        q = self.a(x)
        if cross is None:
            k = self.b(x)
            k = k + 1
        else:
            k = self.c(x)
        return q, k

    def in_one_branch(self, x: Tensor, cross: Tensor | None) -> Any:
        y = cross if cross is not None else x
        if y is not None:
            k, v = self.b(y), self.c(y)
        return self.a(x), k, v

    def other_arguments(self, x: Tensor) -> Any:
        return self.a(x + 1), self.b(x, scale=2), self.c(x)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("chained", [["a", "b"]]),
        ("assigned_after", [["a", "b"]]),
        ("assigned_between", []),
        ("changed_between", []),
        ("added_between", []),
        ("used_twice", [["b", "c"]]),
        ("read_too", [["b", "c"]]),
        ("in_branches", []),
        ("in_one_branch", [["b", "c"]]),
        ("other_arguments", []),
    ],
)
def test_what_forward_is_read_to_say(name: str, groups: list[list[str]]) -> None:
    assert fuse._same_input(getattr(Code, name)) == groups


def test_a_forward_without_source_merges_nothing() -> None:
    scope: dict[str, Any] = {}
    exec("def forward(self, x): return self.a(x), self.b(x)", scope)
    assert fuse._same_input(scope["forward"]) == []
    assert fuse._same_input(nn.Module.forward) == []


# ---- undoing, saving, moving


def test_undoing_gives_the_modules_and_the_bytes_back_without_a_copy() -> None:
    model = Model()
    modules = dict(model.named_modules())
    state = {n: t.clone() for n, t in model.state_dict().items()}
    x = activations(2, K)
    y = model(x)
    weights = [weakref.ref(modules[f"attention.{n}"].weight) for n in "abc"]
    fuse_(model, "swiglu")
    assert [ref() for ref in weights] == [None] * 3  # the bytes exist once
    assert type(model.mlp) is SwiGLU and type(model.attention.a) is LinearPart
    merged = model.attention.merged_a_b_c.weight.data_ptr()
    unfuse_(model)
    assert dict(model.named_modules()) == modules
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert not any(p.requires_grad for p in model.parameters())
    layers = (model.attention.a, model.attention.b, model.attention.c)
    assert [t.weight.untyped_storage().data_ptr() for t in layers] == [merged] * 3
    assert torch.equal(model(x), y)
    assert fuse_(model, "swiglu") is model and type(model.mlp) is SwiGLU


def test_a_fused_model_keeps_its_state_dict() -> None:
    model, want = Model(), Model().state_dict()
    fuse_(model, "swiglu")
    state = model.state_dict()
    assert list(state) == list(want) and all(torch.equal(state[n], want[n]) for n in want)
    assert state._metadata["attention.a"]["format"] == "q4_k"
    # The bytes exist once, although the parameters have other names.
    total = sum(p.nbytes for p in model.parameters())
    assert total == sum(t.nbytes for t in want.values())
    other = {n: t.flip(0) for n, t in want.items()}
    for assign in (False, True):
        model.load_state_dict(other, assign=assign)
        assert all(torch.equal(t, other[n]) for n, t in model.state_dict().items())
        x = activations(2, K)
        check(
            model.attention(x)[1],
            oracle.linear(
                x, spec("q4_k", other["attention.b.weight"], K), other["attention.b.bias"]
            ),
        )
        model.load_state_dict(want)


def test_a_wrong_state_dict_is_refused_as_ever() -> None:
    model = fuse_(Model(), "swiglu")
    state = dict(model.state_dict())
    state["attention.b.weight"] = torch.zeros(16, 3, dtype=torch.uint8)
    del state["attention.c.bias"]
    with pytest.raises(
        RuntimeError, match=r"attention.b.weight must be uint8 \[16, 144\]"
    ) as error:
        model.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "attention.c.bias"' in str(error.value)


def test_moves_copies_and_pickles_stay_fused() -> None:
    model, x = fuse_(Model(), "swiglu"), activations(2, K)
    y = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), y)
        merged = other.attention.merged_a_b_c
        assert other.attention.b.merged is merged is not model.attention.merged_a_b_c
        assert type(unfuse_(other).mlp) is Gated and torch.equal(other(x), y)
    model.half()
    assert model.attention.a.bias.dtype == torch.float16 == model.mlp.three.bias.dtype
    assert torch.equal(model.attention.a.weight, Model().attention.a.weight)
    meta = copy.deepcopy(model).to("meta")
    assert meta.attention.c.weight.is_meta and meta.mlp.one.weight.is_meta
    assert unfuse_(meta).attention.a.weight.is_meta


def test_setting_or_packing_parts_is_refused() -> None:
    model = fuse_(Model(), "swiglu")
    with pytest.raises(ValueError, match="weight belongs to a fused layer.*unfuse_"):
        model.attention.a.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
    with pytest.raises(ValueError, match="merged layers; call unfuse_"):
        quantize_(model, "q4_0", progress=False)


def test_shared_and_trained_layers_stay() -> None:
    module = Attention(bias=True)
    model = nn.ModuleDict({"attention": module, "again": nn.ModuleList([module.a])})
    module.b.bias.requires_grad_()
    fuse_(model, "swiglu")
    assert all(type(m) is QuantLinear for m in (module.a, module.b, module.c))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="mlp_form: 'both'; allowed: None, 'swiglu', 'swiglu_li"):
        fuse_(Model(), "both")
    with pytest.raises(ValueError, match=r"attention.a.weight is on the meta device"):
        fuse_(Model().to("meta"))
