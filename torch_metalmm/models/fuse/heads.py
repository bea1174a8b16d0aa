"""Attention of a module: its arguments, its cache, the function that it calls, and its output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import QuantLinear
from ...nn.recipe import Attend, Growth, Heads
from .observe import Attention, Seen, is_angles
from .projections import projections_of
from .runs import Unknown, one, split


def heads_of(
    attention: nn.Module, runs: list[Seen], x: Tensor, out: Tensor
) -> tuple[Heads, QuantLinear]:
    """The heads of a module that makes `out` of x in the first run, and its output's linear layer.

    Unknown: they are not what Heads says.
    """
    if any([a.args[0] for a in seen.attentions] != [attention] for seen in runs):
        raise Unknown("not one call of an attention function")
    inside, seen = set(attention.modules()), runs[0]
    inner = [c for c in seen.calls if c.module in inside and c.module is not attention]
    o = one(c for c in inner if isinstance(c.module, QuantLinear) and c.out is out)
    given = seen.attentions[0].out
    given = given[0] if isinstance(given, tuple) else given
    shared = _shared(runs)
    own = shared is None or shared[2]
    numbers = {update.args[2] for s in runs for update in s.updates}
    if any(len(s.updates) != int(own) for s in runs) or len(numbers) != int(own):
        raise Unknown("not one update of the cache")
    number = next(iter(numbers), None)
    every = [n for n in seen.kwargs if all(n in s.kwargs for s in runs)]
    embeddings = [n for n in every if all(is_angles(s.kwargs[n]) for s in runs)]
    if len(embeddings) > 1:
        raise Unknown("several pairs of cos and sin")
    angles = seen.kwargs[embeddings[0]] if embeddings else None
    heads = Heads(
        attention=attention,
        embeddings=embeddings[0] if embeddings else None,
        mask=_mask(every, runs),
        cache=one(n for n in every if all(hasattr(s.kwargs[n], "update_conv_state") for s in runs)),
        told=_told(runs) if own else None,
        number=None if getattr(attention, "layer_idx", None) == number else number,
        attend=_attend(attention, runs),
        shared=None if shared is None else shared[:2],
        **projections_of(inner, x, seen, angles, (given, o.inputs[0]), own),
    )
    if own:
        _check_updates(runs, number)
    return heads, o.module


def growths(layer: nn.Module, runs: list[Seen]) -> Iterator[Growth]:
    """Factors of a layer's q that runs of short texts do not show.

    Made of numbers that a config has side by side; confirm.py runs the layer at far positions.
    """
    kwargs = runs[0].kwargs
    whole = [n for n, v in kwargs.items() if isinstance(v, Tensor) and v.dtype == torch.int64]
    configs = {id(c): c for m in layer.modules() if (c := getattr(m, "config", None)) is not None}
    dicts = [d for c in configs.values() for d in vars(c).values() if isinstance(d, dict)]
    for numbers in dicts:
        sizes = [n for n, v in numbers.items() if type(v) is int and v > 1]
        rates = [n for n, v in numbers.items() if type(v) is float and 0 < v < 1]
        for name, rate, size in product(whole, rates, sizes):
            yield Growth(name, numbers, rate, size)


def _shared(runs: list[Seen]) -> tuple[str, Any, bool] | None:
    """(the argument, the key, whether they are the layer's own) of k and v that layers share."""
    seen = runs[0]
    kv = seen.attentions[0].args[2:4]
    places = [(*place, True) for place, value in seen.stored.items() if _are(value, kv)] + [
        (name, key, False)
        for name, values in seen.kwargs.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if _are(value, kv) and (name, key) not in seen.stored
    ]
    return one(places) if places else None


def _are(value: Any, kv: tuple[Any, ...]) -> bool:
    pair = isinstance(value, tuple) and len(value) == 2
    return pair and all(a is b for a, b in zip(value, kv, strict=True))


def _mask(every: list[str], runs: list[Seen]) -> str | None:
    masks = [s.attentions[0].args[4] for s in runs]
    fit = [n for n in every if all(s.kwargs[n] is m for s, m in zip(runs, masks, strict=True))]
    if not fit and any(mask is not None for mask in masks):
        raise Unknown("a mask of the layer's own")
    named = [n for n in fit if "mask" in n]  # others are None, too, where no run has one
    return next(iter(named or fit), None)


def _told(runs: list[Seen]) -> tuple[tuple[str, ...], dict[str, Any]] | None:
    """The `kwargs` of the cache's update: arguments of the layer by name, and constants."""
    updates = [seen.updates[0].options for seen in runs]
    if not any(updates):
        return None
    if any(u.keys() != {"kwargs"} or not isinstance(u["kwargs"], dict) for u in updates):
        raise Unknown("the cache is given more than k, v, a number and arguments of the layer")
    passed, constants = split([u["kwargs"] for u in updates], [seen.kwargs for seen in runs])
    return tuple(passed), constants


def _check_updates(runs: list[Seen], number: Any) -> None:
    for seen in runs:
        update, kv = seen.updates[0], seen.attentions[0].args[2:4]
        if update.args[2:] != (number,) or not isinstance(number, int):
            raise Unknown("the cache is given more than k, v and a number")
        if any(a is not b for a, b in zip(update.result, kv, strict=True)):
            raise Unknown("something between cache and attention")


def _attend(attention: nn.Module, runs: list[Seen]) -> Attend:
    calls = [seen.attentions[0] for seen in runs]
    first = calls[0]
    if any(len(c.args) != 5 for c in calls):
        raise Unknown("attention with others than q, k, v and a mask by place")
    own = {
        name: parameter
        for name, value in first.options.items()
        for parameter, tensor in attention._parameters.items()
        if value is tensor and value is not None
        if all(c.options.get(name) is tensor for c in calls)
    }
    given = [{n: v for n, v in c.options.items() if n not in own} for c in calls]
    passed, constants = split(given, [seen.kwargs for seen in runs])
    config = next(
        value
        for value in vars(attention).values()
        if getattr(value, "_attn_implementation", None) == first.implementation
    )
    place = _place(attention, first)
    return Attend(place, first.default, config, constants, tuple(passed), own)


def _place(attention: nn.Module, call: Attention) -> tuple[str, str]:
    """The place where the code of the attention finds the interface: (module, name)."""
    forwards = [vars(kind).get("forward") for kind in type(attention).__mro__]
    for function in (*forwards, call.default):
        names = getattr(inspect.unwrap(function), "__globals__", {}) if function else {}
        for name, value in names.items():
            if value is call.interface:
                return names["__name__"], name
    raise Unknown("an interface that has no name")
