"""Modules that are gated MLPs, down(act(gate(x)) * up(x)): found by running them.

Numbers of the module may multiply the gate and the result, and say which part of normal values is
to be cut off a row of the gate.
"""

from __future__ import annotations

from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.fused import FusedMLP, GatedMLP, Roles, plain, unhooked
from ...nn.gate import ACTIVATIONS
from ...nn.sharded import ColumnsLinear
from .runs import evaluating, normal, numbers_of


class _Way(NamedTuple):
    """A gated MLP that a module may compute."""

    roles: Roles
    activation: str
    gate_scale: float = 1.0
    scale: float = 1.0
    cut: float = 0.0


def gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The MLP if the module computes one, None otherwise."""
    layers = {n: c for n, c in module._modules.items() if isinstance(c, QuantLinear)}
    others = (c for n, c in module._modules.items() if c is not None and n not in layers)
    if len(layers) not in (2, 3) or not all(plain(layer) for layer in layers.values()):
        return None
    if module._parameters or module._buffers or any(_is_more(c) for c in others):
        return None
    if not unhooked(module) or any(hasattr(FusedMLP, name) for name in module._modules):
        return None
    ways = [_Way(*way) for way in product(_candidates(layers), ACTIVATIONS)]
    if not ways:
        return None
    found = numbers_of(module)
    numbers = product((1.0, *found), (1.0, *found), (0.0, *_cuts(found)))
    candidates = [way._replace(gate_scale=g, scale=s, cut=c) for g, s, c in numbers for way in ways]
    with evaluating(module):
        candidates = _computed(module, candidates)
        module.train()  # some have a dropout
        always = _computed(module, candidates)
    for c in always or candidates:
        return GatedMLP(module, c.roles, c.activation, not always, *c[2:])
    return None


def _cuts(numbers: list[float]) -> list[float]:
    """Standard deviations from the mean below which these parts of normal values are."""
    icdf: Any = torch.distributions.Normal(0.0, 1.0).icdf
    parts = torch.tensor(numbers, dtype=torch.float32, device="cpu")
    return [float(icdf(p)) for p in parts if 0 < p < 1]


def _is_more(module: nn.Module) -> bool:
    """Whether the module may be more than an activation function or a dropout."""
    return bool(module._parameters or module._buffers or module._modules)


def _candidates(layers: dict[str, QuantLinear]) -> list[Roles]:
    """The roles that fit the shapes; gate and up have no bias."""
    found: list[Roles] = []
    for names in permutations(layers):
        gate, down = layers[names[0]], layers[names[-1]]
        if gate.bias is not None or any(type(layers[n]) is ColumnsLinear for n in names[:-1]):
            continue
        if len(names) == 2:
            if gate.out_features == 2 * down.in_features:
                found += [Roles(names[0], None, names[1], first) for first in (True, False)]
            continue
        up = layers[names[1]]
        sizes = (gate.in_features, gate.out_features)
        if up.bias is None and sizes == (up.in_features, up.out_features) == (
            up.in_features,
            down.in_features,
        ):
            found.append(Roles(*names))
    return found


def _computed(module: Any, candidates: list[_Way]) -> list[_Way]:
    """The candidates that give, bit for bit, what the module gives.

    If the module is one of them, both are the same ops in the same order. The inputs include large
    numbers, because some modules clamp.
    """
    layer = module._modules[candidates[0].roles.gate] if candidates else None
    if layer is None:
        return []
    x = normal(2, layer.in_features).to(layer.weight.device)
    with torch.inference_mode():
        for scale in (1.0, 1000.0):
            given = x * scale
            try:
                got = module(given)
            except Exception:
                return []  # the module takes other arguments
            if not isinstance(got, Tensor) or not torch.equal(given, x * scale):
                return []  # the module writes its input, too
            outputs: dict[str, Tensor] = {}
            candidates = [c for c in candidates if torch.equal(_of(module, c, given, outputs), got)]
    return candidates


def _of(module: Any, way: _Way, x: Tensor, outputs: dict[str, Tensor]) -> Tensor:
    """The candidate's result for x; `outputs` keeps the results of the layers that take x."""
    layers, roles = module._modules, way.roles
    for name in (roles.gate, roles.up):
        if name is not None and name not in outputs:
            outputs[name] = layers[name](x)
    a = outputs[roles.gate]
    if roles.up is None:
        a, b = a.chunk(2, dim=-1) if roles.gate_first else reversed(a.chunk(2, dim=-1))
    else:
        b = outputs[roles.up]
    if way.cut:
        mean, std = a.mean(-1, keepdim=True), a.std(-1, keepdim=True, correction=0)
        a = torch.relu(a - (mean + std * way.cut))
    a = a if way.gate_scale == 1 else a * way.gate_scale
    y: Tensor = layers[roles.down](ACTIVATIONS[way.activation](a) * b)
    return y if way.scale == 1 else y * way.scale
