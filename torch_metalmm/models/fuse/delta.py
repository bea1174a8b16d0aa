"""Mixing by a convolution, and by the gated delta rule: the modules that make the operands."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.recipe import Delta, Heads, Mixer, Short, Ssm
from .norms import as_norm
from .observe import Call, Seen
from .runs import Unknown, numbers_of, one
from .ssm import ssm_of, vectors_of

_conv = torch.ops.metalmm.causal_conv.default
_rule = torch.ops.metalmm.gated_delta.default


@torch.no_grad()
def mixer_of(
    module: nn.Module, conv: nn.Module, runs: list[Seen], x: Tensor, out: Tensor
) -> tuple[Mixer, QuantLinear]:
    """The mixer of a module that makes `out` of x in the first run, and its output's linear layer.

    Unknown: it is not what a class of Mixer says.
    """
    inside = set(module.modules())
    inner = [c for c in runs[0].calls if c.module in inside and c.module is not module]
    o = one(c for c in inner if isinstance(c.module, QuantLinear) and c.out is out)
    every = [n for n in runs[0].kwargs if all(n in s.kwargs for s in runs)]
    cache = one(n for n in every if all(hasattr(s.kwargs[n], "update_conv_state") for s in runs))
    layer = runs[1].before.layers[module.layer_idx]  # behind the prompt of the first run
    calls, factor = _projecting(module, inner, x)
    if layer.number_of_states != 1 or not calls:
        raise Unknown("states of another kind")
    if (found := _delta(module, conv, inner, calls, layer)) is not None:
        kind: type[Mixer] = Delta
    elif (found := ssm_of(module, conv, runs, inner, calls, (o.inputs[0], layer))) is not None:
        kind = Ssm
    elif (found := _short(conv, o.inputs[0], calls, layer)) is not None:
        kind = Short
    else:
        raise Unknown("a mixer of another kind")
    parts, fields = found
    factors = fields.pop("factors", None)
    order = torch.cat(parts)
    straight = torch.equal(order, torch.arange(len(order)))
    own: dict[str, Any] = {
        "attention": module,
        "cache": cache,
        "mask": _mask(module, runs),
        "projections": tuple(c.module for c in calls),
        "order": None if straight else order,
        "factors": factors,
        "sizes": tuple(map(len, parts)),
        "conv": conv,
    }
    mixer = kind(**own, **fields)
    rescale(mixer, factor)
    return mixer, o.module


def _projecting(module: nn.Module, inner: list[Call], x: Tensor) -> tuple[list[Call], float]:
    """The calls of layers that are given x times a number of the module's, and that number."""
    calls = [c for c in inner if isinstance(c.module, QuantLinear) and c.inputs[0].shape == x.shape]
    for factor in (1.0, *numbers_of(module)):
        given = x if factor == 1 else x * factor
        found = [c for c in calls if c.inputs[0] is x or torch.equal(c.inputs[0], given)]
        if found:
            return found, factor
    return [], 1.0


def rescale(core: Heads | Mixer, factor: float) -> None:
    """Let the projections' results be those of x times a number."""
    if factor == 1:
        return
    if any(layer.bias is not None for layer in core.projections):
        raise Unknown("a bias of what is multiplied by a number")
    size = sum(layer.weight.shape[0] for layer in core.projections)
    core.factors = (torch.ones(size) if core.factors is None else core.factors) * factor


def _short(
    conv: nn.Module, given: Tensor, calls: list[Call], layer: Any
) -> tuple[list[Tensor], dict[str, Any]] | None:
    """(the parts of Short in the projections' results, its other fields)."""
    row, weight = torch.cat([c.out for c in calls], -1), conv._parameters["weight"]
    state, channels = layer.conv_states[0], layer.conv_states[0].shape[1]
    if row.shape[-1] != 3 * channels:
        return None
    parts = torch.split(torch.arange(3 * channels), channels)
    for outer in range(3):
        c, (b, y) = parts[outer], (p for i, p in enumerate(parts) if i != outer)
        x = row[..., b] * row[..., y]
        last = min(x.shape[1], state.shape[2])
        if not torch.equal(x.mT[..., -last:], state[..., -last:]):
            continue
        zeros = torch.zeros_like(state)
        got = row[..., c] * _conv(x, weight[:, 0], conv._parameters["bias"], zeros)  # type: ignore[index]
        if (got - given).norm() <= 0.1 * given.norm():
            return list(parts), {"outer": outer, "rates": (), "norm": None}
    return None


def _delta(
    module: nn.Module, conv: nn.Module, inner: list[Call], calls: list[Call], layer: Any
) -> tuple[list[Tensor], dict[str, Any]] | None:
    """(where the parts of Delta are in the projections' results, its other fields)."""
    gated = [c for c in inner if len(c.inputs) == 2]
    if len(gated) != 1 or not layer.is_recurrent_states_initialized[0]:
        return None
    given, gate = gated[0].inputs
    conv_state, state = layer.conv_states[0], layer.recurrent_states[0]
    _, heads, dk, dv = state.shape
    norm = as_norm(gated[0].module, dv, gated=True)
    channels = conv_state.shape[1]
    sizes = (channels, heads * dv, heads, heads)
    vectors = vectors_of(module, heads)
    if norm is None or len(vectors) != 2:
        return None
    row, weight = torch.cat([c.out for c in calls], -1), conv._parameters["weight"]
    for places in _places([c.out.shape[-1] for c in calls], sizes, dk):
        qkv, z, *rates = (row[..., t] for t in places)
        last = min(qkv.shape[1], conv_state.shape[2])
        if not torch.equal(z.reshape(gate.shape), gate):
            continue
        if not torch.equal(qkv.mT[..., -last:], conv_state[..., -last:]):
            continue
        zeros = torch.zeros_like(conv_state)
        mixed = _conv(qkv, weight[:, 0], conv._parameters["bias"], zeros, "silu")  # type: ignore[index]
        ways: list[tuple[float, bool, tuple[str, ...]]] = []
        for b_first, names in product((False, True), permutations(vectors)):
            a, b = reversed(rates) if b_first else rates
            after = torch.zeros_like(state)
            y = _rule(mixed, a, b, *(module._parameters[n] for n in names), after)
            ways.append((float((y.reshape(given.shape) - given).norm()), b_first, names))
        _, b_first, names = min(ways)
        fields = {"b_first": b_first, "rates": names, "heads": heads, "dk": dk, "dv": dv}
        return places, fields | {"norm": norm}
    return None


def _places(parts: list[int], sizes: tuple[int, ...], dk: int) -> Iterator[list[Tensor]]:
    """The places of the convolution's inputs, the gate and the rates in results of these sizes:
    one after the other, or the parts of a head of q and k together."""
    channels, values, heads, _ = sizes
    of = torch.split(torch.arange(sum(parts)), parts)
    for order in permutations(of):
        if tuple(map(len, order)) == sizes:
            yield list(order)
        if tuple(map(len, order)) == (channels + values, 2 * heads):
            key_heads = (channels - values) // (2 * dk)
            each = values // key_heads
            by_head = torch.split(order[0].view(key_heads, -1), [dk, dk, each, each], -1)
            *qkv, gate = (t.flatten() for t in by_head)
            one_of, other = order[1].view(key_heads, -1).chunk(2, -1)
            yield [torch.cat(qkv), gate, one_of.flatten(), other.flatten()]


def _mask(module: nn.Module, runs: list[Seen]) -> str | None:
    """The layer's argument that says which rows are of padding."""

    def given(seen: Seen) -> Iterator[str]:
        call: Call = one(c for c in seen.calls if c.module is module)
        for value in call.kwargs.values():
            if isinstance(value, Tensor) and value.shape == seen.x.shape[:2]:
                yield from (name for name, v in seen.kwargs.items() if v is value)

    names: set[Any] = {name for seen in runs for name in given(seen)}
    return one(names) if names else None
