"""What a layer computes, read from the tensors that its modules passed each other in one call.

A result is followed by the tensor's identity; sums are known by their values. Whether the recipe is
right is for confirm.py to say: here a wrong guess costs only that the layer stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.fused import SwiGLU
from ...nn.recipe import Attend, Norm, Output, Recipe
from .norms import as_norm
from .observe import Attention, Call, Seen, is_angles
from .projections import projections_of
from .runs import Unknown

_PLAIN = (bool, int, float, str, type(None))  # what a constant argument may be


def recipe_of(layer: nn.Module, runs: list[Seen]) -> Recipe:
    """The recipe of a layer, the first of whose runs is a prompt with an empty cache.

    Unknown: what was seen is not what a recipe says.
    """
    if not runs or any((len(s.args), len(s.attentions), len(s.updates)) != (1, 1, 1) for s in runs):
        raise Unknown("not one argument without a name, one attention and one update of the cache")
    seen = runs[0]
    x, attention = seen.args[0], seen.attentions[0].args[0]
    if not isinstance(seen.out, Tensor) or x.dim() != 3:
        raise Unknown("not one tensor [batch, length, size] from another")
    inside = set(attention.modules())
    outer = [c for c in seen.calls if c.module is attention or c.module not in inside]
    inner = [c for c in seen.calls if c.module in inside and c.module is not attention]
    a = _one(c for c in outer if c.module is attention)
    within = {m for c in outer for m in c.module.modules() if m is not c.module}
    tops = [c for c in outer if c is not a and c.module not in within]
    changing = [c for c in tops if all(t is not c.out for t in c.inputs)]  # no dropout
    mlp = _one(c for c in changing if as_norm(c.module, x.shape[-1]) is None)
    gated = mlp.module.gated if isinstance(mlp.module, SwiGLU) else None
    normed = _one(t for t in a.inputs if t.shape == x.shape)
    pre = None if normed is x else _norm(outer, lambda c: c.out is normed, x)[0]
    into_mlp = _one(mlp.inputs)
    before = [c for c in outer if c.out is into_mlp]
    pre_mlp, h = _norm(before, lambda _: True) if before else (None, into_mlp)
    o = _one(c for c in inner if isinstance(c.module, QuantLinear) and c.out is a.out)
    given = seen.attentions[0].out
    if not _same_values(o.inputs[0], given[0] if isinstance(given, tuple) else given):
        raise Unknown("something between attention and output")
    names = _Names(runs)
    return Recipe(
        attention=attention,
        names=names.all,
        embeddings=names.embeddings,
        mask=names.mask,
        cache=names.cache,
        number=names.number,
        attend=_attend(attention, runs),
        pre=pre,
        output=_output(layer, tops, o.module, a.out, x, h),
        pre_mlp=pre_mlp,
        mlp=gated or mlp.module,
        down=_output(layer, tops, gated and gated.layers()[2], mlp.out, h, seen.out),
        **projections_of(inner, normed, seen, seen.kwargs[names.embeddings]),
    )


def _one(found: Any) -> Any:
    found = list(found)
    if len(found) != 1:
        raise Unknown(f"{len(found)} of what there should be one")
    return found[0]


def _norm(
    calls: list[Call], wanted: Callable[[Call], bool], x: Tensor | None = None
) -> tuple[Norm, Tensor]:
    """The norm among the calls that is wanted, and its input, which is x if that is given."""
    call = _one(c for c in calls if wanted(c))
    given: Tensor = _one(call.inputs)
    norm = as_norm(call.module, given.shape[-1])
    if norm is None or (x is not None and given is not x):
        raise Unknown("not an RMS norm of the branch's input")
    return norm, given


def _output(
    layer: nn.Module, outer: list[Call], linear: nn.Module | None, out: Tensor, x: Tensor, y: Tensor
) -> Output:
    """How y comes from x and `out`, which the linear layer, or else the MLP as a whole, gave."""
    after = [c for c in outer if c.out is not out and any(t is out for t in c.inputs)]
    post, branch = None, out
    if after:
        post, branch = _norm(after, lambda _: True)[0], after[0].out
    for scale in (1.0, *(v for v in vars(layer).values() if isinstance(v, float))):
        added = branch if scale == 1 else branch * scale
        if added.shape == x.shape and torch.equal(x + added, y):
            return Output(linear, post, scale)
    raise Unknown("not the sum of a branch and its input")


def _same_values(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a, b.reshape(a.shape))


class _Names:
    """What the layer's keyword arguments are, by what became of them in every run."""

    def __init__(self, runs: list[Seen]) -> None:
        self.all = frozenset(name for seen in runs for name in seen.kwargs)
        every = [name for name in self.all if all(name in seen.kwargs for seen in runs)]
        self.embeddings: str = _one(n for n in every if all(is_angles(s.kwargs[n]) for s in runs))
        self.cache: str = _one(
            n for n in every if all(hasattr(s.kwargs[n], "update") for s in runs)
        )
        masks = [s.attentions[0].args[4] for s in runs]
        fit = [n for n in every if all(s.kwargs[n] is m for s, m in zip(runs, masks, strict=True))]
        if not fit and any(mask is not None for mask in masks):
            raise Unknown("a mask of the layer's own")
        self.mask: str | None = fit[0] if fit else None
        number = runs[0].updates[0].args[2]
        own = getattr(runs[0].attentions[0].args[0], "layer_idx", None)
        self.number: int | None = None if own == number else number
        for seen in runs:
            update = seen.updates[0]
            if update.options or update.args[2:] != (number,) or not isinstance(number, int):
                raise Unknown("the cache is given more than k, v and a number")
            if any(a is not b for a, b in zip(update.result, _kv(seen), strict=True)):
                raise Unknown("something between cache and attention")


def _kv(seen: Seen) -> tuple[Any, Any]:
    return seen.attentions[0].args[2:4]


def _attend(attention: nn.Module, runs: list[Seen]) -> Attend:
    calls = [seen.attentions[0] for seen in runs]
    first = calls[0]
    names = frozenset(first.options)
    if any(len(c.args) != 5 or frozenset(c.options) != names for c in calls):
        raise Unknown("attention with other arguments in each run")
    passed = [
        name
        for name in first.options
        if all(
            name in s.kwargs and c.options[name] is s.kwargs[name]
            for s, c in zip(runs, calls, strict=True)
        )
    ]
    constants = {name: first.options[name] for name in names.difference(passed)}
    for call in calls:
        if any(call.options[name] != value for name, value in constants.items()):
            raise Unknown("attention with arguments that change")
    if not all(isinstance(value, _PLAIN) for value in constants.values()):
        raise Unknown("attention with a tensor of its own")
    config = next(
        value
        for value in vars(attention).values()
        if getattr(value, "_attn_implementation", None) == first.implementation
    )
    place = _place(attention, first)
    return Attend(place, first.default, config, constants, tuple(passed))


def _place(attention: nn.Module, call: Attention) -> tuple[str, str]:
    """Where the code of the attention finds the interface: (module, name)."""
    forwards = [vars(kind).get("forward") for kind in type(attention).__mro__]
    for function in (*forwards, call.default):
        names = getattr(inspect.unwrap(function), "__globals__", {}) if function else {}
        for name, value in names.items():
            if value is call.interface:
                return names["__name__"], name
    raise Unknown("an interface that has no name")
