"""A mixer of the gated delta rule in our ops: the part of a fused layer between norm and output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .heads import Ops, projection
from .recipe import Delta, Norm


def mixed(r: Delta, ops: Ops, pre: Norm | None, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """What the mixer gives its output's layer [batch, length, heads dv] for pre(x)."""
    mask = kwargs.get(r.mask)  # type: ignore[arg-type]
    if mask is not None:  # of padding, of which the layer makes zeros
        if pre is not None:
            x, pre = ops.rms_norm(x, pre.weight(), pre.eps, pre.offset), None
        x = (x * mask[:, :, None]).to(x.dtype)
    qkv, gate, *rates = _projected(r, ops, pre, x)
    a, b = reversed(rates) if r.b_first else rates
    conv_state, state = states(r, qkv, kwargs.get(r.cache))
    conv, own = r.conv._parameters, r.attention._parameters
    weight: Any = conv["weight"]
    y = ops.causal_conv(qkv, weight[:, 0], conv["bias"], conv_state, "silu")
    y = ops.gated_delta(y, a, b, *(own[name] for name in r.rates), state)
    n = r.norm
    y = ops.rms_norm(y, n.weight(), n.eps, n.offset, gate=gate.view(y.shape))
    found: Tensor = y.flatten(2)
    return found


def is_recording(r: Delta, kwargs: dict[str, Any]) -> bool:
    """Whether the cache keeps more inputs than a step needs, to go back."""
    cache = kwargs.get(r.cache)
    return cache is not None and cache.is_recording_past(r.attention.layer_idx)


def states(r: Delta, x: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
    """The states of the convolution and of the rule, zeros before a first row x."""
    shape = (x.shape[0], r.heads, r.dk, r.dv)
    taps: int = r.conv._parameters["weight"].shape[2]  # type: ignore[union-attr]
    if cache is None:
        return x.new_zeros(x.shape[0], x.shape[2], taps), x.new_zeros(shape, dtype=torch.float32)
    layer = cache.layers[r.attention.layer_idx]
    if not layer.is_conv_states_initialized[0]:
        layer.lazy_initialization(conv_states=x.new_empty(x.shape[0], x.shape[2], taps))
    if not layer.is_recurrent_states_initialized[0]:
        layer.lazy_initialization(recurrent_states=x.new_empty(shape, dtype=torch.float32))
    layer.has_previous_state[0] = True
    return layer.conv_states[0], layer.recurrent_states[0]


def _projected(r: Delta, ops: Ops, pre: Norm | None, x: Tensor) -> list[Tensor]:
    """The inputs of the convolution, the gate, and the two rates of each head."""
    parts = [projection(ops, pre, x, layer) for layer in r.projections]
    order = r.index(x.device)
    if order is not None:
        row = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        parts = [row.index_select(-1, order)]
    found: list[Tensor] = []
    for part in parts:
        sizes: list[int] = []
        while sum(sizes) < part.shape[-1]:
            sizes.append(r.sizes[len(found) + len(sizes)])
        found += torch.split(part, sizes, -1)
    return found
