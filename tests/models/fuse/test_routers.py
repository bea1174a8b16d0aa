"""Routers of experts in one op: which are found, and when their own forward computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import activations
from layer_models import family_pair
from torch import Tensor, nn

from bench.models.families import fused_family
from torch_metalmm.models.routers import fuse_routers
from torch_metalmm.nn.router import FusedRouter

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "glm4_moe", "minimax_m2")
NESTED = ("ernie4_5_moe", "afmoe")  # a table or a bias of a child; dense layers beside


def routers(model: nn.Module) -> list[Any]:
    found = (m.__dict__.get("forward") for m in model.modules())
    return [f.__self__.router.module for f in found if isinstance(_of(f), FusedRouter)]


def inputs(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """What a router of this kind is called with."""
    x = activations(1, 6, 128, dtype=dtype, seed=kind)
    bias = (activations(8, seed="choice"),) if kind in ("minimax_m2", "afmoe") else ()
    return (x if kind == "afmoe" else x[0], *bias)


def _of(forward: Any) -> Any:
    return getattr(forward, "__self__", None)


@pytest.mark.parametrize("kind", KINDS + NESTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_routers_of_families(kind: str, dtype: torch.dtype) -> None:
    """Weights in the router's own dtype, near those of its own forward; one router a layer."""
    model = fused_family(copy.deepcopy(family_pair(kind)[0]).to(dtype))
    dense = 1 if kind in NESTED else 0
    assert len(routers(model)) == model.config.num_hidden_layers - dense
    for module in routers(model):
        given = inputs(kind, dtype)
        if kind == "ernie4_5_moe":
            bias = module.moe_statics.e_score_correction_bias
            bias.data.copy_(0.1 * activations(*bias.shape, seed="choice"))
        with torch.no_grad():
            _, want, ids = type(module).forward(module, *given)
            logits, weights, chosen = module(*given)
        assert logits is None and weights.dtype == want.dtype
        a, b = chosen.argsort(-1), ids.argsort(-1)
        assert torch.equal(chosen.gather(1, a), ids.gather(1, b))
        error = (weights.gather(1, a) - want.gather(1, b)).abs().max()
        assert error <= 16 * torch.finfo(dtype).eps * want.abs().max()  # logits up to 8, rounded


class Parent(nn.Module):
    """Chooses two of four experts, whose results are numbers."""

    def __init__(self, choose: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.gate = Gate(choose)

    def forward(self, x: Tensor) -> Tensor:
        _, weights, ids = self.gate(x.reshape(-1, x.shape[-1]))
        return (x.reshape(-1, 1, x.shape[-1]) * ids[..., None] * weights[..., None]).sum(1)


class Gate(nn.Module):
    def __init__(self, choose: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(activations(4, 32, seed="gate"), requires_grad=False)
        self.bias = nn.Buffer(torch.zeros(4))
        self.factor, self.choose = 1.5, choose

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        return (logits, *self.choose(logits, self))


def top(logits: Tensor, gate: Any) -> Any:
    scores = logits.softmax(-1)
    ids = (scores + gate.bias).topk(2).indices
    return scores.gather(1, ids) * gate.factor, ids


OTHERS: dict[str, Callable[[Tensor, Any], Any]] = {
    "squares": lambda t, g: (top(t, g)[0].square(), top(t, g)[1]),
    "clamped": lambda t, g: top(t.clamp(-4, 4), g),
    "temperature": lambda t, g: top(t * 1.01, g),
    "lowest": lambda t, g: t.softmax(-1).topk(2, largest=False),
    "int32": lambda t, g: (top(t, g)[0], top(t, g)[1].int()),
}


def test_what_is_another_choice_stays() -> None:
    made = Parent(top).eval()
    fuse_routers(made)
    assert routers(made) == [made.gate]
    assert _of(made.gate.forward).router.choice_bias == "bias"  # also where it holds zeros
    for name, choose in OTHERS.items():
        made = Parent(choose).eval()
        fuse_routers(made)
        assert not routers(made), name


def test_when_the_routers_own_forward_computes() -> None:
    x = activations(2, 3, 32, seed="x")
    made = Parent(top).eval()
    fuse_routers(made)
    gate = made.gate

    def falls_back(x: Tensor = x) -> bool:
        return gate(x.reshape(-1, 32))[0] is not None

    with torch.no_grad():
        assert not falls_back()
        seen: list[Any] = []
        hook = gate.register_forward_hook(lambda m, a, out: seen.append(out[0]))
        assert falls_back() and seen[0] is not None
        hook.remove()
        gate.train()
        assert falls_back()
        gate.eval()
        with torch.autocast("cpu", torch.bfloat16):
            assert falls_back()
        gate.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 9.0]))  # is read at each call
        assert gate(x.reshape(-1, 32))[2].sort(-1).values.tolist() == [[1, 3]] * 6
        gate.factor = 2.0
        assert falls_back()
        gate.factor = 1.5
        assert not falls_back()
    assert falls_back(x.clone().requires_grad_())
    assert not falls_back()
    gate.weight.requires_grad_()
    assert falls_back()


@pytest.mark.parametrize("kind", NESTED)
def test_children_of_a_router_that_are_called(kind: str) -> None:
    """With a hook, a forward or a layer of another's they are, by the router's own forward."""
    model = copy.deepcopy(family_pair(kind)[1])
    module = routers(model)[-1]
    name, child = next(iter(module.named_children()))

    def falls_back() -> bool:
        with torch.no_grad():
            return module(*inputs(kind))[0] is not None

    assert not falls_back()
    handle = child.register_forward_hook(lambda m, a, out: 2 * out)
    assert falls_back()
    handle.remove()
    child.forward = type(child).forward.__get__(child)
    assert falls_back()
    del child.forward
    setattr(module, name, copy.deepcopy(child))
    assert falls_back()
    setattr(module, name, child)
    assert not falls_back()
    other = copy.deepcopy(model)
    module = routers(other)[-1]
    assert not falls_back()
