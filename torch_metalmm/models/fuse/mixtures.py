"""Modules that mix experts which a router of ours chooses: their parts, found by their kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import formats
from ...nn import QuantLinear
from ...nn.experts import QuantExperts
from ...nn.fused import FusedMLP, owner_of, plain, unhooked
from ...nn.heads import TRACED
from ...nn.mixture import Mixture
from ...nn.router import FusedRouter
from .observe import Call


@torch.no_grad()
def mixture_of(call: Call, x: Tensor) -> Mixture | None:
    """The mixture that makes the call's result of x; None: it is none, or another one."""
    module = call.module
    children = [c for c in module.children() if any(True for _ in c.parameters())]
    routers = [f for c in children if isinstance(f := owner_of(c), FusedRouter)]
    experts = [c for c in children if type(c) is QuantExperts]
    mlps = [c.gated for c in children if isinstance(c, FusedMLP)]
    shared = [mlp for mlp in mlps if mlp.gate_scale == mlp.scale == 1 and not mlp.cut]
    gates = [c for c in children if _is_gate(c)]
    parts: tuple[list[Any], ...] = (routers, experts, shared, gates)
    if len(call.inputs) != 1 or call.inputs[0] is not x or call.kwargs:
        return None
    if sum(map(len, parts)) != len(children) or not routers or not experts:
        return None
    if max(map(len, parts)) > 1 or len(gates) > len(shared):
        return None
    router = routers[0].router
    given = None
    if router.choice_bias == "":  # the module's, for the router to take
        own: dict[str, Any] = {**module._parameters, **module._buffers}
        names = [n for n, t in own.items() if t is not None and t.dim() == 1]
        if len(names) != 1:
            return None
        given = names[0]
    mlp, gate = (of[0] if of else None for of in parts[2:])
    found = Mixture(module, router, given, experts[0], mlp, gate)
    y = found.of(TRACED[None], x, None)
    # Another rule differs by more than rounding; confirm.py tells rounding from other errors.
    near = isinstance(call.out, Tensor) and call.out.shape == y.shape
    return found if near and (y - call.out).norm() <= 0.1 * call.out.norm() else None


def _is_gate(child: nn.Module) -> bool:
    """Whether the child is a linear layer of one result that the op computes."""
    if type(child) is nn.Linear:
        is_known = child.weight.dtype in formats.DTYPE_NAMES and child.bias is None
        return is_known and child.out_features == 1 and unhooked(child)
    return type(child) is QuantLinear and child.out_features == 1 and plain(child)
