"""Mixing by a selective state space: the modules that make the operands of ssm_scan."""

from __future__ import annotations

import copy
from itertools import permutations, product
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.recipe import Limits, Norm
from .norms import as_norm
from .observe import Call, Seen, copy_of
from .runs import Unknown

_conv = torch.ops.metalmm.causal_conv.default
_scan = torch.ops.metalmm.ssm_scan.default
_rms_norm = torch.ops.metalmm.rms_norm.default
_FAR = 30.0  # softplus of -30 is no step; e^-30 of _LARGE is large
_LARGE = 1e30
_NOTHING = 1e-6
_NEAR = 0.01  # more than a rounding to bf16


def vectors_of(module: nn.Module, heads: int) -> list[str]:
    """The names of the parameters that have a value for each head."""
    own = module._parameters.items()
    return [name for name, p in own if p is not None and p.shape == (heads,)]


def ssm_of(
    module: nn.Module,
    conv: nn.Module,
    runs: list[Seen],
    inner: list[Call],
    calls: list[Call],
    ends: tuple[Tensor, Any],
) -> tuple[list[Tensor], dict[str, Any]] | None:
    """(where the parts of Ssm are in the projections' results, its other fields).

    ends: what the output's layer is given, and the cache's layer behind the first run.
    """
    given, layer = ends
    if not layer.is_recurrent_states_initialized[0]:
        return None
    conv_state, state = layer.conv_states[0], layer.recurrent_states[0]
    _, heads, p, n = state.shape
    vectors, channels = vectors_of(module, heads), conv_state.shape[1]
    if len(vectors) != 3:
        return None
    norm, gate_last = _norm_of(inner, heads * p)
    plain, weight = torch.cat([c.out for c in calls], -1), conv._parameters["weight"]
    size = plain.shape[-1]
    own = [b.flatten() for b in module._buffers.values() if b is not None and b.numel() == size]
    ways_in = product((None, *own), _places(size, (heads * p, channels, heads)))
    for factors, places in ways_in:
        row = plain if factors is None else plain * factors
        gate, xbc, dt = (row[..., t] for t in places)
        last = min(xbc.shape[1], conv_state.shape[2])
        if not torch.equal(xbc.mT[..., -last:], conv_state[..., -last:]):
            continue
        zeros = torch.zeros_like(conv_state)
        y = _conv(xbc, weight[:, 0], conv._parameters["bias"], zeros, "silu")  # type: ignore[index]
        ways: list[tuple[float, tuple[str, ...]]] = []
        for names in permutations(vectors):
            of_heads = [module._parameters[name] for name in names]
            z = None if gate_last else gate
            out = _scan(y, dt, *of_heads, torch.zeros_like(state), z)
            out = out if norm is None else _normed(norm, out, gate if gate_last else None)
            ways.append((float((out - given).norm()), names))
        _, names = min(ways)
        fields: dict[str, Any] = {"factors": factors, "gate_last": gate_last}
        fields |= {"rates": names, "heads": heads, "p": p, "n": n, "norm": norm}
        limits = tuple(_limits(module, runs[1], names, length) for length in (2, 1))
        return places, fields | {"limits": limits}
    return None


def _norm_of(inner: list[Call], size: int) -> tuple[Norm | None, bool]:
    """(the norm that takes a gate, too, whether it is multiplied by the gate behind it)."""
    gated = [c for c in inner if len(c.inputs) == 2]
    if not gated:
        return None, False
    module = gated[0].module
    numbers = {v for v in vars(module).values() if type(v) is int and v > 0 and size % v == 0}
    for groups in sorted({1, *numbers, *(size // v for v in numbers)}):
        for first in (True, False):
            norm = as_norm(module, size, gated=True, groups=groups, gate_first=first)
            if norm is not None:
                return norm, not first
    raise Unknown("a gated norm of another kind")


def _normed(norm: Norm, y: Tensor, gate: Tensor | None) -> Tensor:
    weight, rows = norm.weight(), y.reshape(*y.shape[:-1], norm.groups, -1)
    weight = weight if weight is None else weight.view(norm.groups, -1)
    gate = gate if gate is None else gate.reshape(rows.shape)
    out: Tensor = _rms_norm(rows, weight, norm.eps, norm.offset, gate=gate)
    return out.flatten(-2)


def _places(size: int, sizes: tuple[int, ...]) -> list[list[Tensor]]:
    """The places of gate, inputs of the convolution and dt in a row: in any order."""
    found = []
    for order in permutations(range(3)):
        if sum(sizes) != size:
            break
        parts = torch.split(torch.arange(size), [sizes[i] for i in order])
        found.append([parts[order.index(i)] for i in range(3)])
    return found


def _limits(module: nn.Module, seen: Seen, rates: tuple[str, ...], length: int) -> Limits:
    """The limits of dt that the module applies to so many positions behind a prompt."""
    shortest, longest = (_dt(module, seen, rates, b, length) for b in (-_FAR, _FAR / length))
    pairs = [v for v in vars(module).values() if isinstance(v, tuple | list)]
    numbers = [n for pair in pairs for n in pair if isinstance(n, float) and 0 < n < inf]
    least, most = (
        next((n for n in numbers if abs(dt - n) <= _NEAR * n), None) for dt in (shortest, longest)
    )
    if least is None and shortest > _NOTHING:
        raise Unknown("a step of another kind")
    if most is None and longest < _FAR / length * (1 - _NEAR):
        raise Unknown("a step of another kind")
    return least or 0.0, most


def _dt(module: nn.Module, seen: Seen, rates: tuple[str, ...], bias: float, length: int) -> float:
    """The step that the module makes of dt_bias where its input is 0.

    A state so large that nothing counts beside it decays by e^-dt at each position.
    """
    probe = copy.copy(module)
    vectors = {name: torch.zeros_like(module._parameters[name]) for name in rates}  # type: ignore[arg-type]
    vectors[rates[1]] += bias
    probe.__dict__["_parameters"] = {**module._parameters, **vectors}
    own, call = copy_of(seen.before), seen.of(module)
    layer = own.layers[module.layer_idx]
    layer.recurrent_states[0].fill_(_LARGE)
    kwargs = {n: own if hasattr(v, "update_conv_state") else v for n, v in call.kwargs.items()}
    probe(call.x.new_zeros(call.x.shape[0], length, call.x.shape[2]), **kwargs)
    decays = layer.recurrent_states[0].cpu().double() / _LARGE
    dts = decays.log() / -length
    if not bool((dts.max() - dts.min()).abs() <= _NEAR * dts.mean().abs() + _NOTHING):
        raise Unknown("a decay of another kind")
    return float(dts.mean())
