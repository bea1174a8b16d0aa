"""How a module mixes by the gated delta rule: its projections, convolution, rates and norm."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.recipe import Delta
from .norms import as_norm
from .observe import Call, Seen
from .projections import merged_of
from .runs import Unknown, one

_conv = torch.ops.metalmm.causal_conv.default
_delta = torch.ops.metalmm.gated_delta.default


def convolution_of(module: nn.Module) -> nn.Module | None:
    """The child that is a convolution of each channel, None if there is none."""
    weights = ((child, child._parameters.get("weight")) for child in module.children())
    return next((c for c, w in weights if w is not None and w.dim() == 3 and w.shape[1] == 1), None)


@torch.no_grad()
def delta_of(
    module: nn.Module, conv: nn.Module, runs: list[Seen], x: Tensor, out: Tensor
) -> tuple[Delta, QuantLinear]:
    """The rule of a module that makes `out` of x in the first run, and its output's linear layer.

    Unknown: it is not what Delta says.
    """
    inside = set(module.modules())
    inner = [c for c in runs[0].calls if c.module in inside and c.module is not module]
    o = one(c for c in inner if isinstance(c.module, QuantLinear) and c.out is out)
    gated = one(c for c in inner if len(c.inputs) == 2)
    given, gate = gated.inputs
    every = [n for n in runs[0].kwargs if all(n in s.kwargs for s in runs)]
    cache = one(n for n in every if all(hasattr(s.kwargs[n], "update_conv_state") for s in runs))
    layer = runs[1].before.layers[module.layer_idx]  # behind the prompt of the first run
    conv_state, state = layer.conv_states[0], layer.recurrent_states[0]
    _, heads, dk, dv = state.shape
    norm = as_norm(gated.module, dv, gated=True)
    calls = [c for c in inner if isinstance(c.module, QuantLinear) and c.inputs[0] is x]
    channels = conv_state.shape[1]
    sizes = (channels, heads * dv, heads, heads)
    if norm is None or layer.number_of_states != 1 or not calls:
        raise Unknown("a norm or states of another kind")
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
        for b_first, names in product((False, True), permutations(_vectors(module, heads))):
            a, b = reversed(rates) if b_first else rates
            after = torch.zeros_like(state)
            y = _delta(mixed, a, b, *(module._parameters[n] for n in names), after)
            ways.append((float((y.reshape(given.shape) - given).norm()), b_first, names))
        _, b_first, names = min(ways)
        order, straight = torch.cat(places), torch.arange(row.shape[-1])
        delta = Delta(
            attention=module,
            cache=cache,
            mask=_mask(module, runs),
            projections=merged_of([c.module for c in calls]),
            order=None if torch.equal(order, straight) else order,
            sizes=sizes,
            b_first=b_first,
            conv=conv,
            rates=names,
            heads=heads,
            dk=dk,
            dv=dv,
            norm=norm,
        )
        return delta, o.module
    raise Unknown("a rule of another kind")


def _vectors(module: nn.Module, heads: int) -> list[str]:
    """The names of the two parameters that have a value for each head."""
    found = [n for n, p in module._parameters.items() if p is not None and p.shape == (heads,)]
    if len(found) != 2:
        raise Unknown("other parameters than two of each head")
    return found


def _places(parts: list[int], sizes: tuple[int, ...], dk: int) -> Iterator[list[Tensor]]:
    """Where the inputs of the convolution, the gate and the rates may be in results of these sizes:
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
