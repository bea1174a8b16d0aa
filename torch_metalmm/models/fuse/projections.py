"""The packed layers that make q, k, v and a gate, and the steps of q, k and v before attention."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...nn import QuantLinear
from ...nn.recipe import Norm
from ...nn.rotation import tables
from .norms import as_norm
from .observe import Call, Seen
from .runs import Unknown, numbers_of

_rope = torch.ops.metalmm.rope.default
_rms_norm = torch.ops.metalmm.rms_norm.default

# (what is done to cos and sin, whether pairs are rotated)
_ROTATIONS = (
    *(("whole", False), ("whole", True), ("halves", True)),
    *(("twice", False), ("back", False), ("none", False)),
)
# A rotation of another kind, or none, is as far off as q and k are large.
_NEAR = 2.0**-4


class _Places(NamedTuple):
    """The places of q, k, v and the gate in the results of the layers side by side."""

    q: Tensor
    k: Tensor
    v: Tensor | None  # None: v is k
    gate: Tensor


def projections_of(
    inner: list[Call],
    x: Tensor,
    seen: Seen,
    angles: tuple[Tensor, Tensor] | None,
    outputs: tuple[Tensor, Tensor],
    own: bool,
) -> dict[str, Any]:
    """The recipe's fields of that name, and those about heads. x: what the layers are given.

    outputs: what the attention function gave, and what the output's layer got. own: k and v are
    the module's own.
    """
    q = seen.attentions[0].args[1]
    k, v = seen.updates[0].args[:2] if own else (q[:, :0], q[:, :0])
    (batch, heads, length, size), kv_heads = q.shape, k.shape[1]
    if k.shape != v.shape or k.shape != (batch, kv_heads, length, size):
        raise Unknown("q, k and v of several sizes")
    if angles is None:
        angles = (x.new_empty(batch, length, 0),) * 2
    calls = [c for c in inner if isinstance(c.module, QuantLinear) and c.inputs[0] is x]
    if not calls:
        raise Unknown("no projection")
    row = torch.cat([c.out for c in calls], -1)
    for places in _places(_sizes(calls), heads, kv_heads, size):
        gate = _gate(row[..., places.gate], outputs, heads)
        if gate is False:
            continue
        outs = [row[..., places.q], row[..., places.k]]
        of_v = outs[1] if places.v is None else row[..., places.v]
        found = _normed(inner, outs, (q, k), size)
        value = _value_norm(inner, of_v, v) if own else (None,)
        if found is None or value is None:
            continue
        norms = found["qk_norms"] or ()
        eps = {n.eps for n in (*norms, *filter(None, value))}
        if len(eps) > 1 or len({n.offset for n in norms}) > 1:
            raise Unknown("norms of q, k and v with other numbers")
        found |= {
            "heads": heads,
            "kv_heads": kv_heads,
            "head_size": size,
            **_arranged(calls, places, own),
            "v_is_k": places.v is None and own,
            "gate": gate,
            "value_norm": value[0],
        }
        for scale in (1.0, *numbers_of(seen.attentions[0].args[0])):
            rotation = _rotation(found, [outs[0], outs[1] * scale, of_v], angles, (q, k))
            if rotation is not None:
                found["factors"] = _factors(found, places, scale)
                return {**found, "angles": rotation[0], "interleaved": rotation[1]}
    raise Unknown("q, k and v that are made in another way")


def _places(sizes: list[int], heads: int, kv_heads: int, size: int) -> Iterator[_Places]:
    """The places that q, k, v and a gate may have in results of these sizes."""
    q, k, n = heads * size, kv_heads * size, len(sizes)
    parts = torch.split(torch.arange(sum(sizes)), sizes)
    nothing = torch.arange(0)

    def whole_and_gated(t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(q, its gate) of what has q, or q and a gate."""
        if len(t) == q:
            yield t, nothing
        elif len(t) == 2 * q:
            by_head = t.view(heads, 2, size)
            yield by_head[:, 0].flatten(), by_head[:, 1].flatten()
            yield t[:q], t[q:]

    if not kv_heads:
        if n == 1:
            yield from (_Places(a, nothing, nothing, b) for a, b in whole_and_gated(parts[0]))
        return
    if n == 1 and sizes[0] == q + 2 * k:
        yield _Places(parts[0][:q], parts[0][q : q + k], parts[0][q + k :], nothing)
        if heads % kv_heads == 0:  # a head of k and of v behind the heads of q that read them
            group = parts[0].view(kv_heads, -1, size)
            of_q, of_k, of_v = (group[:, a:b].flatten() for a, b in ((0, -2), (-2, -1), (-1, None)))
            yield _Places(of_q, of_k, of_v, nothing)
    for order in permutations(parts):
        rest = [len(t) for t in order[1:]]
        if n in (2, 3) and rest == [k] * (n - 1):
            v = order[2] if n == 3 else None
            yield from (_Places(a, order[1], v, b) for a, b in whole_and_gated(order[0]))
        if n == 4 and len(order[0]) == q and rest[:2] == [k, k] and rest[2] in (q, heads):
            yield _Places(order[0], order[1], order[2], order[3])


def _gate(gate: Tensor, outputs: tuple[Tensor, Tensor], heads: int) -> Any:
    """The gate's kind, "values" or "heads"; None: there is no gate; False: the outputs fit none."""
    given, wanted = outputs
    if given.numel() != wanted.numel():
        return False
    factor = torch.sigmoid(gate)
    if gate.shape[-1] == 0:
        return None if torch.equal(given.reshape(wanted.shape), wanted) else False
    by_head = factor.view(*factor.shape[:-1], heads, -1)
    gated = (given.reshape(*by_head.shape[:-1], -1) * by_head).reshape(wanted.shape)
    if not near(gated, wanted):
        return False
    return "values" if by_head.shape[-1] > 1 else "heads"


def _arranged(calls: list[Call], places: _Places, own: bool) -> dict[str, Any]:
    """The fields `projections` and `order`, which is None where no copy is needed."""
    parts = torch.split(torch.arange(sum(_sizes(calls))), _sizes(calls))
    kept = [t for t in places[: 3 if own else 1] if t is not None]
    order = torch.cat((*kept, places.gate))
    where = {int(value): at for at, value in enumerate(order)}
    each = sorted(zip(parts, calls, strict=True), key=lambda pair: where[int(pair[0][0])])
    if torch.equal(order, torch.cat([part for part, _ in each])):
        return {"projections": tuple(call.module for _, call in each), "order": None}
    return {"projections": tuple(call.module for call in calls), "order": order}


def _factors(found: dict[str, Any], places: _Places, scale: float) -> Tensor | None:
    """Factors of the layers' results, `scale` for k and 1 for others; None: all are 1."""
    if scale == 1:
        return None
    if found["order"] is not None or found["v_is_k"] or found["gate"] or found["qk_norms"]:
        raise Unknown("k times a number, and more")
    q, k, v = (torch.ones(len(t)) for t in places[:3] if t is not None)
    return torch.cat((q, k * scale, v))


def _sizes(calls: list[Call]) -> list[int]:
    return [c.out.shape[-1] for c in calls]


def _normed(
    inner: list[Call], outs: list[Tensor], made: tuple[Tensor, Tensor], size: int
) -> dict[str, Any] | None:
    """The field qk_norms; None: one of q and k has a norm, or one of each head, and one not."""
    norms = [
        _norm_of(inner, out, size) or _norm_after(inner, of, size)
        for out, of in zip(outs, made, strict=True)
        if out.shape[-1]
    ]
    if len(norms) == 1:
        norms *= 2  # q alone has values
    first, second = norms
    if first is None and second is None:
        return {"qk_norms": None}
    if first is None or second is None or first[1] != second[1]:
        return None
    return {"qk_norms": (first[0], second[0])}


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


def _norm_after(inner: list[Call], made: Tensor, size: int) -> tuple[Norm, bool] | None:
    """The norm without weight that made q or k behind the rotation, which changes no length."""
    for call in inner:
        out = call.out
        if isinstance(out, Tensor) and any(
            out.shape == t.shape and torch.equal(out, t) for t in (made, made.transpose(1, 2))
        ):
            norm = as_norm(call.module, size)
            return (norm, True) if norm is not None and not norm.name else None
    return None


def _value_norm(inner: list[Call], of_v: Tensor, v: Tensor) -> tuple[Norm | None] | None:
    """(the norm that makes v, None if there is none); None: v is made in another way."""
    batch, heads, length, size = v.shape
    by_head = of_v.reshape(batch, length, heads, size)
    if torch.equal(by_head, v.transpose(1, 2)):
        return (None,)
    for call in inner:
        norm = as_norm(call.module, size) if len(call.inputs) == 1 else None
        if norm is not None and not norm.name:
            made = _rms_norm(by_head, norm.weight(), norm.eps, norm.offset)
            if near(made, v.transpose(1, 2)):
                return (norm,)
    return None


def _rotation(
    found: dict[str, Any],
    outs: list[Tensor],
    angles: tuple[Tensor, Tensor],
    wanted: tuple[Tensor, Tensor],
) -> tuple[str, bool] | None:
    """The rotation that makes q and k of what the layers gave, None if there is none of ours."""
    weights: tuple[Any, ...] = (None, None, 0.0, 0.0)
    heads, size = (found["heads"], found["kv_heads"]), found["head_size"]
    if found["qk_norms"] is not None:
        of_q, of_k = found["qk_norms"]
        own = of_k.factors(outs[0]) if found["kv_heads"] else None
        weights = (of_q.factors(outs[0]), own, of_q.eps, of_q.offset)
    row = torch.cat(outs, -1)
    for form, pairs in _ROTATIONS:
        cos, sin = tables(form, *angles)
        if cos.shape[-1] > size or cos.shape[-1] % 2:
            continue
        got = _rope(row, cos, sin, *heads, None, *weights, pairs)
        if all(near(a, b) for a, b in zip(got, wanted, strict=False)):
            return form, pairs
    return None


def near(a: Tensor, b: Tensor) -> bool:
    """Whether a differs from b by less than one that is computed in another way."""
    return bool((a - b).norm() <= _NEAR * b.norm())
