"""A mixer of positions in our ops: the part of a fused layer between norm and output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .again import computed
from .exact import MOST, is_exact
from .heads import Ops, projected
from .recipe import Delta, Mixer, Norm, Ssm


def mixed(
    r: Mixer, ops: Ops, pre: Norm | None, x: Tensor, kwargs: dict[str, Any], row: Tensor | None
) -> tuple[Tensor, Norm | None]:
    """The input [batch, length, values] of the mixer's output layer for pre(x), and the norm that
    is still to be applied to it. row: see projected."""
    mask = kwargs.get(r.mask)  # type: ignore[arg-type]
    if mask is not None:  # rows of padding become zeros, as in the layer
        if pre is not None:
            x, pre = ops.rms_norm(x, pre.weight(), pre.eps, pre.offset), None
        x, row = (x * mask[:, :, None]).to(x.dtype), None
    parts, cache = _projected(r, ops, pre, x, row), kwargs.get(r.cache)
    if isinstance(r, Delta):
        return _of_rule(r, ops, parts, cache), None
    if isinstance(r, Ssm):
        return _scanned(r, ops, parts, cache, mask)
    c = parts.pop(r.outer)  # type: ignore[attr-defined]
    b, y = parts
    y = _convolved(r, ops, b * y, cache, None)
    return c * y, None


def _of_rule(r: Delta, ops: Ops, parts: list[Tensor], cache: Any) -> Tensor:
    qkv, gate, *ab = parts
    a, b = reversed(ab) if r.b_first else ab
    y = _convolved(r, ops, qkv, cache, "silu")
    own, n = r.attention._parameters, r.norm
    rates = [own[name] for name in r.rates]
    y = computed(
        lambda state, *rows: ops.gated_delta(*rows, *rates, state),
        (y, a, b),
        _state(r, qkv, cache, (r.heads, r.dk, r.dv)),
    )
    y = ops.rms_norm(y, n.weight(), n.eps, n.offset, gate=gate.view(y.shape))
    return y.flatten(2)


def _scanned(
    r: Ssm, ops: Ops, parts: list[Tensor], cache: Any, mask: Tensor | None
) -> tuple[Tensor, Norm | None]:
    gate, xbc, dt = parts
    own, n = r.attention._parameters, r.norm
    is_short = xbc.shape[1] == 1 or (is_exact() and xbc.shape[1] <= MOST)
    is_step = is_short and cache is not None and _layer(r, cache).has_previous_state[0]
    least, most = r.limits[is_step]
    y = _convolved(r, ops, xbc, cache, "silu")
    if mask is not None:
        y = (y * mask[:, :, None]).to(y.dtype)
    rates = [own[name] for name in r.rates]
    gates = () if r.gate_last else (gate,)

    def scan(state: Tensor, y: Tensor, dt: Tensor, *gates: Tensor) -> Tensor:
        gate = gates[0] if gates else None
        return ops.ssm_scan(y, dt, *rates, state, gate, least, most)

    y = computed(scan, (y, dt, *gates), _state(r, xbc, cache, (r.heads, r.p, r.n)))
    if n is None or (n.groups == 1 and not r.gate_last):
        return y, n
    by_group: Any = y.unflatten(-1, (n.groups, -1))  # type: ignore[no-untyped-call]
    weight = n.weight()
    weight = weight if weight is None else weight.view(n.groups, -1)
    last = gate.reshape(by_group.shape) if r.gate_last else None
    return ops.rms_norm(by_group, weight, n.eps, n.offset, gate=last).flatten(2), None


def _layer(r: Mixer, cache: Any) -> Any:
    return cache.layers[r.attention.layer_idx]


def _convolved(r: Mixer, ops: Ops, x: Tensor, cache: Any, activation: str | None) -> Tensor:
    """By the convolution of the mixer on its state, zeros before a first row."""
    conv = r.conv._parameters
    weight: Any = conv["weight"]
    taps = weight.shape[2]
    if cache is None:
        state = x.new_zeros(x.shape[0], x.shape[2], taps)
    else:
        layer = _layer(r, cache)
        if not layer.is_conv_states_initialized[0]:
            layer.lazy_initialization(conv_states=x.new_empty(x.shape[0], x.shape[2], taps))
        layer.has_previous_state[0] = True
        state = layer.conv_states[0]
    kernel, bias = weight[:, 0], conv["bias"]
    return computed(
        lambda state, rows: ops.causal_conv(rows, kernel, bias, state, activation), (x,), state
    )


def _state(r: Mixer, x: Tensor, cache: Any, sizes: tuple[int, ...]) -> Tensor:
    """The state of the rule, zeros before a first row x."""
    shape = (x.shape[0], *sizes)
    if cache is None:
        return x.new_zeros(shape, dtype=torch.float32)
    layer = _layer(r, cache)
    if not layer.is_recurrent_states_initialized[0]:
        layer.lazy_initialization(recurrent_states=x.new_empty(shape, dtype=torch.float32))
    return layer.recurrent_states[0]


def is_recording(r: Mixer, kwargs: dict[str, Any]) -> bool:
    """Whether the cache keeps more inputs than a step needs, to go back."""
    cache = kwargs.get(r.cache)
    return cache is not None and cache.is_recording_past(r.attention.layer_idx)


def _projected(r: Mixer, ops: Ops, pre: Norm | None, x: Tensor, row: Tensor | None) -> list[Tensor]:
    """The parts that the mixer computes with."""
    found: list[Tensor] = []
    for part in projected(r, ops, pre, x, row):
        sizes: list[int] = []
        while sum(sizes) < part.shape[-1]:
            sizes.append(r.sizes[len(found) + len(sizes)])
        found += torch.split(part, sizes, -1)
    return found
