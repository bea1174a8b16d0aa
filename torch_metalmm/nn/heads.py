"""Attention in our ops: the part of a fused layer between its norm and its output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .activations import KINDS
from .exact import as_one_row
from .fused import LinearPart
from .recipe import Heads, Mixer, Norm
from .step import Held

_OTHERS = ("rope", "rope_append", "attention", "causal_conv", "gated_delta", "ssm_scan")


class Ops:
    """Our ops as functions. direct: without the Python frame by which torch.compile knows them."""

    def __init__(self, direct: bool, activations: str | None) -> None:
        self.activations = activations
        for name in ("linear", "norm_linear", "swiglu", "swiglu_linear"):
            op = getattr(torch.ops.metalmm, name).default
            op = op._op if direct else op
            setattr(self, name, partial(op, activations=activations) if activations else op)
        for name in (*_OTHERS, "rms_norm", "gemm"):
            op = getattr(torch.ops.metalmm, name).default
            setattr(self, name, op._op if direct else op)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


TRACED, DIRECT = ({kind: Ops(d, kind) for kind in (None, *KINDS)} for d in (False, True))


def attended(
    r: Heads,
    ops: Ops,
    pre: Norm | None,
    x: Tensor,
    kwargs: dict[str, Any],
    held: Held,
    row: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The result [batch, length, values] of the heads for pre(x), and, for one row, the gate whose
    sigmoid is still to multiply each value, in the output's product; else None. row: see
    projected."""
    qkv, v, gate = _projected(r, ops, pre, x, row)
    cache, mask = kwargs.get(r.cache), kwargs.get(r.mask)  # type: ignore[arg-type]
    a = None
    given = (qkv, held.cos, held.sin, r.heads, r.kv_heads)
    # A query without a mask may see what is behind it.
    sees_later = x.shape[1] > 1 and mask is None and not getattr(r.attention, "is_causal", True)
    if held.options is not None and cache is not None and not sees_later:
        if r.kv_heads:
            a = _appended(r, ops, x, given, v, held, kwargs, mask)
        elif (room := getattr(_of_others(r, kwargs), "room", None)) is not None:
            q = ops.rope(*given, interleaved=r.interleaved, **_norms(r, x))[0]
            a = _over(r, ops, held.grown(q), room, held.options, mask)
    if a is None:
        a = _attended(r, ops, x, given, v, held, kwargs, mask)
    batch, length, _ = x.shape
    if gate is None:
        return a.reshape(batch, length, -1), None
    if r.gate == "values" and as_one_row(x):
        return a.reshape(batch, length, -1), gate
    gate = torch.sigmoid(gate)
    if r.gate == "heads":
        gate, a = gate[..., None], a.reshape(batch, length, r.heads, -1)
    else:
        a = a.reshape(batch, length, -1)
    return (a * gate).flatten(2), None


def _appended(
    r: Heads,
    ops: Ops,
    x: Tensor,
    given: tuple[Any, ...],
    v: Tensor | None,
    held: Held,
    kwargs: dict[str, Any],
    mask: Tensor | None,
) -> Tensor | None:
    """Rotation, cache and attention in two ops; None if that is not what the layer calls.

    given: qkv, cos, sin and the heads, as rope takes them.
    """
    cache = kwargs[r.cache]
    find = getattr(cache, "room", None)
    room = None if find is None else find(number(r), x, r.kv_heads, r.head_size, mask is not None)
    if room is None:
        return None
    written = (room.new_keys, room.new_values, room.slots, *room.formats)
    q = ops.rope_append(*given, *written, v=v, interleaved=r.interleaved, **_norms(r, x))
    if r.shared is not None:
        kwargs[r.shared[0]][r.shared[1]] = cache.stored(number(r), room, x.shape[1])
    return _over(r, ops, held.grown(q), room, held.options, mask)


def _over(r: Heads, ops: Ops, q: Tensor, room: Any, options: Any, mask: Tensor | None) -> Tensor:
    """Attention of q [B, heads, S, D] over the rows of a room of a cache."""
    if mask is not None and mask.shape[2] != q.shape[2]:
        mask = mask.expand(-1, -1, q.shape[2], -1)
    if r.attend.own:
        options = {**options, "sinks": r.attention._parameters[r.attend.own["s_aux"]]}
    if room.window:
        options = {**options, "window": room.window}
    if room.pages is not None:
        options = {**options, "pages": room.pages}
    given = (q, room.keys, room.values, *room.formats, room.length)
    return ops.attention(*given, mask=mask, causal=mask is None, **options)


def _of_others(r: Heads, kwargs: dict[str, Any]) -> Any:
    """k and v of the layer that this one shares them with."""
    return kwargs[r.shared[0]][r.shared[1]]  # type: ignore[index]


def _attended(
    r: Heads,
    ops: Ops,
    x: Tensor,
    given: tuple[Any, ...],
    v: Tensor | None,
    held: Held,
    kwargs: dict[str, Any],
    mask: Tensor | None,
) -> Any:
    """Rotation, then cache and attention as the layer calls them."""
    direct = held.direct
    q, k, v = ops.rope(*given, v=v, interleaved=r.interleaved, **_norms(r, x))
    q = held.grown(q)
    cache = kwargs.get(r.cache)
    if not r.kv_heads:
        k, v = _of_others(r, kwargs)
    elif cache is not None:
        told = {}
        if r.told is not None:
            names, constants = r.told
            told["kwargs"] = constants | {n: kwargs[n] for n in names if n in kwargs}
        k, v = cache.update(k, v, number(r), **told)
    if r.shared is not None and r.kv_heads:
        kwargs[r.shared[0]][r.shared[1]] = k, v
    if direct is not None and x.shape[1] == 1 and mask is None:
        return F.scaled_dot_product_attention(q, k, v, **direct)
    attend = r.attend
    passed = {name: kwargs[name] for name in attend.passed if name in kwargs}
    for name, parameter in attend.own.items():
        passed[name] = r.attention._parameters[parameter]
    return held.function(r.attention, q, k, v, mask, **attend.constants, **passed)[0]


def number(r: Heads) -> Any:
    """The layer's in the cache."""
    return r.attention.layer_idx if r.number is None else r.number


def _projected(
    r: Heads, ops: Ops, pre: Norm | None, x: Tensor, row: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(qkv, None, gate), or (q and k, v, gate)."""
    qk, *rest = projected(r, ops, pre, x, row)
    size = (r.heads + r.kv_heads) * r.head_size
    while qk.shape[-1] < size:
        qk, *rest = torch.cat((qk, rest[0]), -1), *rest[1:]
    if not (rest or r.v_is_k or r.gate):
        return qk, None, None
    if (behind := qk.shape[-1] - size) > 0:
        qk, *rest = *torch.split(qk, [size, behind], -1), *rest
    v, gate = rest[0] if rest else None, None
    if len(rest) > 1:
        v = torch.cat(rest, -1)
    if r.v_is_k:
        v, gate = qk[..., r.heads * r.head_size :], v
    elif r.gate and v is not None:
        of_v = r.kv_heads * r.head_size
        v, gate = torch.split(v, [of_v, v.shape[-1] - of_v], -1)
    return qk, v if r.kv_heads else None, gate


def projected(
    r: Heads | Mixer, ops: Ops, pre: Norm | None, x: Tensor, row: Tensor | None
) -> list[Tensor]:
    """The projections' results for pre(x). row: these results, scaled, where the layer has them."""
    if row is not None:
        return r.arranged([row])
    each = zip(r.projections, r.factors_of(x, r.projections), strict=True)
    return r.arranged([projection(ops, pre, x, layer, factors) for layer, factors in each])


def projection(ops: Ops, pre: Norm | None, x: Tensor, layer: Any, factors: Tensor | None) -> Tensor:
    """The layer's result for pre(x), times the factors."""
    if isinstance(layer, LinearPart):
        weight, bias = layer.weight, layer.bias
    else:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    if factors is not None and pre is not None and bias is None:
        given = (pre.weight(), pre.eps, pre.offset, weight, None, layer.format)
        y: Tensor = ops.norm_linear(x, *given, factors=factors)
        return y
    y = normed(ops, pre, x, weight, layer.format, bias)
    return y if factors is None else y * factors


def _norms(r: Heads, x: Tensor) -> dict[str, Any]:
    """The arguments of rope that normalise; all norms have one eps."""
    found: dict[str, Any] = {}
    if r.value_norm is not None:
        found = {"v_norm": True, "eps": r.value_norm.eps}
    if r.qk_norms is not None:
        of_q, of_k = r.qk_norms
        found |= {"q_norm": of_q.factors(x), "eps": of_q.eps, "offset": of_q.offset}
        if r.kv_heads:
            found["k_norm"] = of_k.factors(x)
    return found


def normed(
    ops: Ops, norm: Norm | None, x: Tensor, weight: Tensor, format: str, bias: Tensor | None = None
) -> Tensor:
    if norm is None:
        return ops.linear(x, weight, bias, format)
    return ops.norm_linear(x, norm.weight(), norm.eps, norm.offset, weight, bias, format)
