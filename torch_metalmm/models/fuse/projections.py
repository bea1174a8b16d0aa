"""Which packed layers make q, k and v, and what is done to q and k before attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from ...nn import QuantLinear
from ...nn.fused import LinearPart, MergedLinear
from ...nn.recipe import Norm, tables
from .norms import as_norm
from .observe import Call, Seen
from .runs import Unknown

_rope = torch.ops.metalmm.rope.default
_rms_norm = torch.ops.metalmm.rms_norm.default

# (what is done to cos and sin, whether pairs are rotated)
_ROTATIONS = (("whole", False), ("whole", True), ("halves", True), ("none", False))
# A rotation of another kind, or none, is as far off as q and k are large.
_NEAR = 2.0**-4


def projections_of(
    inner: list[Call], x: Tensor, seen: Seen, angles: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """The recipe's fields of that name, and those about heads. x: what the layers are given."""
    q = seen.attentions[0].args[1]
    k, v = seen.updates[0].args[:2]
    (batch, heads, length, size), kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape != (batch, kv_heads, length, size):
        raise Unknown("q, k and v of several sizes")
    calls = [c for c in inner if isinstance(c.module, QuantLinear) and c.inputs[0] is x]
    for layers, outs in _orders(calls, heads * size, kv_heads * size):
        if not torch.equal(outs[2].reshape(batch, length, kv_heads, size), v.transpose(1, 2)):
            continue
        norms = [_norm_of(inner, out, size) for out in outs[:2]]
        if (norms[0] is None) != (norms[1] is None):
            continue
        of_heads = norms[0] is not None and norms[0][1]
        pair = None if norms[0] is None or norms[1] is None else (norms[0][0], norms[1][0])
        found = {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_size": size,
            "projections": _merged(layers),
            "head_norms": pair if of_heads else None,
            "whole_norms": None if of_heads else pair,
        }
        rotation = _rotation(found, outs, angles, q, k)
        if rotation is not None:
            return {**found, "angles": rotation[0], "interleaved": rotation[1]}
    raise Unknown("q, k and v that are made in another way")


def _orders(
    calls: list[Call], q_size: int, k_size: int
) -> Iterator[tuple[tuple[Any, ...], tuple[Tensor, ...]]]:
    """Layers that may give q, k and v, in this order, and q, k and v as they gave them."""
    sizes = (q_size, k_size, k_size)
    if len(calls) == 1 and calls[0].out.shape[-1] == sum(sizes):
        yield (calls[0].module,), calls[0].out.split(sizes, -1)
    if len(calls) == 3:
        for order in permutations(calls):
            outs = tuple(c.out for c in order)
            if tuple(out.shape[-1] for out in outs) == sizes:
                yield tuple(c.module for c in order), outs


def _merged(layers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The layers, merged where fuse_ has merged them in this order."""
    merged = getattr(layers[0], "merged", None)
    if not isinstance(merged, MergedLinear):
        return layers
    count = len(merged.originals)
    parts = all(isinstance(p, LinearPart) and p.merged is merged for p in layers[:count])
    if not parts or [p.index for p in layers[:count]] != list(range(count)) or count < 2:
        return layers
    return (merged, *layers[count:])


def _norm_of(inner: list[Call], out: Tensor, size: int) -> tuple[Norm, bool] | None:
    """The norm of `out`, and whether it is one of each head."""
    batch, length, n = out.shape
    heads = out.reshape(batch, length, n // size, size)
    forms = (out, heads, heads.transpose(1, 2))
    for call in inner:
        if isinstance(call.module, QuantLinear) or len(call.inputs) != 1:
            continue
        given = call.inputs[0]
        if any(given.shape == form.shape and torch.equal(given, form) for form in forms):
            norm = as_norm(call.module, given.shape[-1])
            if norm is None:
                raise Unknown("q or k is given to a module that is no RMS norm")
            return norm, given.dim() == 4
    return None


def _rotation(
    found: dict[str, Any],
    outs: tuple[Tensor, ...],
    angles: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
) -> tuple[str, bool] | None:
    """The rotation that makes q and k of what the layers gave, None if there is none of ours."""
    weights: tuple[Any, ...] = (None, None, 0.0, 0.0)
    if found["head_norms"] is not None:
        of_q, of_k = found["head_norms"]
        if (of_q.eps, of_q.offset) != (of_k.eps, of_k.offset):
            raise Unknown("norms of q and k with other numbers")
        weights = (of_q.weight(), of_k.weight(), of_q.eps, of_q.offset)
    parts = list(outs)
    for i, norm in enumerate(found["whole_norms"] or ()):
        parts[i] = _rms_norm(parts[i], norm.weight(), norm.eps, norm.offset)
    heads, size = (found["heads"], found["kv_heads"]), found["head_size"]
    for form, pairs in _ROTATIONS:
        cos, sin = tables(form, *angles)
        if cos.shape[-1] > size or cos.shape[-1] % 2:
            continue
        got = _rope(torch.cat(parts, -1), cos, sin, *heads, None, *weights, pairs)
        if all((a - b).norm() <= _NEAR * b.norm() for a, b in zip(got, (q, k), strict=False)):
            return form, pairs
    return None
