"""What one part of merged layers computes for the others: who may take it, and for how long."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from fuse_cases import Attention, K, decoded, fused
from inputs import activations
from oracle import check
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_metalmm import formats
from torch_metalmm.nn.fused import MergedLinear


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
    """No results, which a refilled x would make stale, and no x."""
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


class Later(nn.Module):
    """An activation that begins to write another tensor one day."""

    victim: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.victim is not None:
            self.victim.add_(1)
        return x


class Between(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.act = Later()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.act(self.a(x)), self.b(x), self.c(x)


def test_a_child_that_writes_the_input_later_is_seen_by_its_version() -> None:
    outputs = []
    for module in (fused(Between()), Between()):
        with torch.no_grad():
            x = module.act.victim = activations(2, K)
            outputs.append(module(x))
    assert all(map(torch.equal, *outputs))


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
    """Hooks and replaced parts may write x, also where no version would tell."""
    with torch.inference_mode():
        for hook in ("forward", "pre", "global", "method", "wrapped"):
            module, plain, handles = fused(Attention()), Attention(), ExitStack()
            for m in (module, plain):
                if hook == "forward":
                    m.a.register_forward_hook(write)
                elif hook == "pre":
                    m.b.register_forward_pre_hook(write)
                elif hook == "wrapped":
                    m.a = nn.Sequential(nn.ReLU(inplace=True), m.a)
                elif hook == "method":
                    m.forward = partial(changing, m)
            if hook == "global":
                handles.enter_context(nn.modules.module.register_module_forward_hook(write))
            with handles:
                got, want = (m(activations(2, K)) for m in (module, plain))
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


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


def test_a_graph_that_breaks_between_two_parts_holds_nothing_afterwards() -> None:
    torch._dynamo.reset()
    module, plain = fused(Between()), Between()
    module.act = Broken()
    compiled = torch.compile(module, backend="eager")
    with torch.no_grad():
        x = activations(2, K)
        for seed in range(3):
            x.copy_(activations(2, K, seed=seed))
            assert all(map(torch.equal, compiled(x), plain(x))), seed
            assert not module.merged_a_b_c._held
    torch._dynamo.reset()


def changing(m: Attention, x: Tensor) -> list[Tensor]:
    out = []
    for layer in (m.a, m.b, m.c):
        out.append(layer(x))
        x.data.add_(1)
    return out


def test_parts_follow_the_tensor_not_its_value() -> None:
    module = fused(Attention())
    x, other = activations(3, K), activations(3, K, seed=1)
    module.a(x)
    check(module.b(other), oracle.linear(other, decoded(module.b)))
    check(module.c(x), oracle.linear(x, decoded(module.c)))


def test_threads_do_not_take_each_others_outputs() -> None:
    module = fused(Attention())
    inputs = [activations(2, K, seed=i) for i in range(4)]
    want = [[t.clone() for t in module(x)] for x in inputs]

    def agrees(i: int) -> bool:
        outputs = (module(inputs[i]) for _ in range(100))
        return all(all(map(torch.equal, got, want[i])) for got in outputs)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(agrees, range(4)))
