"""fuse_ on layers of one input: what they compute, and how everything is undone and saved."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from conftest import Backend, leaf
from fuse_cases import Attention, Gated, K, Model, decoded, fused
from oracle import DTYPES, Value, activations, check, spec
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_metalmm import QuantLinear, formats, fuse_, quantize_, unfuse_
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
    assert not module.merged_a_b_c._held


class Calls(TorchDispatchMode):
    """The shapes of the weights that linear is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f is torch.ops.metalmm.linear.default:
            self.weights.append(tuple(args[1].shape))
        return f(*args, **(kwargs or {}))


ROW_BYTES = formats.get("q4_k").row_bytes(K)
WHOLE = (48 + 16 + 24, ROW_BYTES)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_one_op_computes_for_all(mode: Any) -> None:
    module = fused(Attention())
    with mode(), Calls() as calls:
        module(activations(3, K))
        module(activations(1, K))
    assert calls.weights == [WHOLE] * 2


def test_parts_called_alone_hold_nothing() -> None:
    """Neither results, which a refilled x would make stale, nor x."""
    module = fused(Attention())
    x = activations(3, K)
    want = [oracle.linear(x, decoded(getattr(module, n))) for n in "abc"]
    with Calls() as calls:
        for name in "abcbaa":
            check(getattr(module, name)(x), want["abc".index(name)], name)
    assert calls.weights == [(n, ROW_BYTES) for n in (48, 16, 24, 16, 48, 48)]
    assert not module.merged_a_b_c._held


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("refill", ["copy_", "data", "numpy"])
def test_an_input_that_is_filled_again_is_computed_again(refill: str, mode: Any) -> None:
    module, plain = fused(Attention()), Attention()
    with mode():
        x, new = activations(2, K), activations(2, K, seed=1)
        module.a(x), module.b(x)
        if refill == "copy_":
            x.copy_(new)
        elif refill == "data":
            x.data.copy_(new)
        else:
            x.numpy()[:] = new.numpy()
        assert all(map(torch.equal, module(x), plain(new)))
        assert torch.equal(module.c(x), plain.c(new))


class Shaped(Attention):
    def forward(self, x: Tensor, shape: tuple[int, ...] = (-1, 16)) -> tuple[Tensor, ...]:
        first, second = self.a(x), self.b(x).view(*shape)
        return first, second, self.c(x)


def test_nothing_outlives_a_forward_that_fails() -> None:
    module = fused(Shaped())
    x = activations(1, K)
    seen = weakref.ref(x)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="shape"):
            module(x, (7,))
        assert not module.merged_a_b_c._held
        x.copy_(activations(1, K, seed=1))
        assert torch.equal(module.c(x), Attention().c(x))
    del x
    gc.collect()
    assert seen() is None


class Flat(Attention):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.a(x), self.b(x)
        return first, second.view(x.shape[0], -1), self.c(x)


def test_layers_whose_strides_matter_stay() -> None:
    """A part's output for several rows is a slice, of which that view cannot be made."""
    module = fused(Flat())
    assert type(module.b) is QuantLinear and not hasattr(module, "merged_a_b_c")
    assert all(map(torch.equal, module(activations(2, 3, K)), Flat()(activations(2, 3, K))))


def test_gradients_are_those_of_the_layers_in_any_mode() -> None:
    """An in-place op on one output would be an error in the backward of another."""

    class InPlace(Attention):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = self.a(x), self.b(x), self.c(x)
            k = k * k
            q.mul_(2)
            return q, k, v.detach()

    module, plain = fused(InPlace()), InPlace()
    assert type(module.merged_a_b_c) is MergedLinear
    x = activations(2, K).requires_grad_()
    grads = [torch.autograd.grad(sum(y.sum() for y in m(x)), x)[0] for m in (module, plain)]
    assert torch.equal(*grads)
    with torch.no_grad():
        module.a(x)
    assert module.b(x).requires_grad


def write(m: nn.Module, args: Any, y: Any = None) -> None:
    args[0].add_(1)


def test_hooks_and_replaced_parts_are_computed_alone() -> None:
    """They may write x, also where no version would tell."""
    with torch.inference_mode():
        for hook in ("forward", "pre", "global", "method", "wrapped"):
            module, plain, handles = fused(Attention()), Attention(), []
            for m in (module, plain):
                if hook == "forward":
                    handles.append(m.a.register_forward_hook(write))
                elif hook == "pre":
                    handles.append(m.b.register_forward_pre_hook(write))
                elif hook == "wrapped":
                    m.a = nn.Sequential(nn.ReLU(inplace=True), m.a)
                elif hook == "method":
                    m.forward = partial(changing, m)
            if hook == "global":
                handles.append(nn.modules.module.register_module_forward_hook(write))
            try:
                got, want = (m(activations(2, K)) for m in (module, plain))
            finally:
                for handle in handles:
                    handle.remove()
            assert all(map(torch.equal, got, want)), hook


def test_a_replaced_layer_of_another_format_between_two_parts_is_seen() -> None:
    formats = ("q4_k", "q8_0", "q4_k")
    module, plain = fused(Attention(formats)), Attention(formats)
    assert module.merged_a_c.beside == ("b",)
    for m in (module, plain):
        m.b = nn.Sequential(nn.ReLU(inplace=True), m.b)
    with torch.inference_mode():
        assert all(map(torch.equal, module(activations(2, K)), plain(activations(2, K))))


def test_a_hook_in_a_compiled_forward_is_computed_alone() -> None:
    torch._dynamo.reset()
    module, plain = fused(Attention()), Attention()
    for hooked in (False, True):
        if hooked:
            for m in (module, plain):
                m.a.register_forward_hook(write)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            got, want = compiled(activations(2, K)), plain(activations(2, K))
        assert all(map(torch.equal, got, want)), hooked
        torch._dynamo.reset()


def changing(m: Attention, x: Tensor) -> list[Tensor]:
    out = []
    for layer in (m.a, m.b, m.c):
        out.append(layer(x))
        x.data.add_(1)
    return out


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
