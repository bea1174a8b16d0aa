"""The division of a model by shard_: read from a plan in transformers' terms, and from the shapes.

A plan names layers, `*` for numbers, and a style for each. Layers of one parent that feed each
other ("colwise" into "rowwise") are divided alike: a gated MLP by blocks of its last layer, an
attention by heads. What cannot be divided is replicated, every rank having all of it, where the
plan is the model's own, and refused where it was given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..experts import homes, unpackable
from ..replace import weight_shape
from ..skeleton import tied_names
from .attention import KEYS_ELSEWHERE, by_heads, is_attention
from .parts import (
    COLUMNWISE,
    REPLICATED,
    ROWWISE,
    SPLIT_INPUT,
    STYLES,
    VOCABULARY,
    Part,
    Plan,
    block_of,
    feeds,
    layer_of,
    leaf,
    other_tensors,
    our_style,
)
from .split import even


def plan_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> Plan:
    """The parts of the model's layers. Weights are not read and may be on the meta device.

    ValueError: experts; a name that no layer has; no plan, given or the model's; and of a given
    plan a style that is none of STYLES and what cannot be divided.
    """
    styles = _styles(model, given)
    plan = Plan()
    groups: dict[str, dict[str, str]] = {}
    unknown: dict[str, str] = {}  # by the parent of what has the style, and by itself
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if style not in STYLES:
            plan.whole[name] = f"its style is {style!r}"
            unknown |= dict.fromkeys((parent, name), f"{leaf(name)} has the style {style!r}")
        elif style in (COLUMNWISE, ROWWISE):
            groups.setdefault(parent, {})[name] = style
        elif style != REPLICATED:
            _alone(model, name, style, ranks, plan)
    for parent, members in groups.items():
        parts, why = _group(model, parent, members, ranks)
        why = unknown.get(parent, why)
        plan.parts |= parts
        if why is not None:
            plan.replicate(members, why)
    _agree_on_keys(groups, plan)
    _agree_on_ties(model, groups, plan)
    if given is not None and plan.whole:
        name, why = next(iter(plan.whole.items()))
        raise ValueError(f"plan: {name} cannot be divided among {ranks} ranks: {why}")
    return plan


def _styles(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """{name of a layer, of the model's own plan also of a parameter: style}."""
    found: Any = given
    if found is None:
        found = getattr(model, "tp_plan", None)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no tp_plan of its own: give plan={{pattern: style}}"
            )
    if not isinstance(found, Mapping):
        raise TypeError(f"plan must be {{pattern: style}}, got {type(found).__name__}")
    refuse_experts(model, found, given is None)
    order = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if given is None:
        order += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    result: dict[str, str] = {}
    for pattern, style in found.items():
        names = _matching(pattern, order)
        if given is not None and not names:
            raise ValueError(f"plan: the model has no layer {pattern!r}")
        if given is not None and our_style(style) not in STYLES:
            raise ValueError(
                f"plan: {names[0]} has the style {style!r}; allowed: {', '.join(STYLES)}"
            )
        result.update(dict.fromkeys(names, our_style(style)))
    return {name: result[name] for name in order if name in result}


def _matching(pattern: str, names: list[str]) -> list[str]:
    """The names that the pattern of a plan stands for."""
    match = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
    return [name for name in names if match(name)]


def refuse_experts(
    model: nn.Module, plan: Mapping[str, str] | None = None, own: bool = False
) -> None:
    """ValueError: the model has stacked experts, dense or packed, or the plan divides experts.

    own: the plan is the model's own, which is that of its class, and names experts for models of
    all sizes: those count that this one has.
    """
    given = () if plan is None else plan.items()
    asked = [n for n, s in given if ".experts" in f".{n}" or str(s).startswith("moe_")]
    if own and asked:
        names = [n for n, _ in (*model.named_modules(), *model.named_parameters())]
        asked = [pattern for pattern in asked if _matching(pattern, names)]
    for name in (*homes(model), *unpackable(model), *asked):
        raise ValueError(f"experts are not sharded yet: {name}")


def _alone(model: nn.Module, name: str, style: str, ranks: int, plan: Plan) -> None:
    """A layer that is divided by itself."""
    module, why = layer_of(model, name)
    if why is None and (style == VOCABULARY) != isinstance(module, nn.Embedding):
        why = f"{style} is not for a {type(module).__name__}"
    if why is not None:
        plan.whole[name] = why
        return
    n, k = weight_shape(module)
    unit = block_of(module) if style == SPLIT_INPUT else 1
    found = even(k if style == SPLIT_INPUT else n, ranks, unit)
    if found is None:
        plan.whole[name] = f"it has {k if style == SPLIT_INPUT else n} values in blocks of {unit}"
        return
    plan.parts[name] = Part(style, found)


def _group(
    model: nn.Module, parent: str, members: dict[str, str], ranks: int
) -> tuple[dict[str, Part], str | None]:
    """The parts of layers of one parent, those divided by rows feeding the one divided by columns;
    or why these have none."""
    layers: dict[str, Any] = {}
    for name in members:
        layers[name], why = layer_of(model, name)
        if why is not None:
            return {}, f"{leaf(name)}: {why}"
    ends = [name for name, style in members.items() if style == ROWWISE]
    if len(ends) != 1:
        return {}, f"{parent} has {len(ends)} layers of the style {ROWWISE}; there must be one"
    last = ends[0]
    if len(members) == 1:
        return {}, (
            f"no layer of {parent} has the style {COLUMNWISE} and gives {leaf(last)} a part of its "
            f"inputs; {SPLIT_INPUT} takes all of them"
        )
    if getattr(layers[last], "input_order", None) is not None:
        return {}, f"{leaf(last)} has its columns in an order of its own"
    owner = model.get_submodule(parent)
    if is_attention(owner, layers):
        return by_heads(owner, layers, last, ranks)
    return _by_blocks(owner, layers, last, ranks)


def _by_blocks(
    owner: nn.Module, layers: dict[str, Any], last: str, ranks: int
) -> tuple[dict[str, Part], str | None]:
    k, block = weight_shape(layers[last])[1], block_of(layers[last])
    found = even(k, ranks, block)
    if found is None:
        return {}, f"{leaf(last)} has {k} inputs in blocks of {block}"
    parts = {last: Part(ROWWISE, found)}
    for name, layer in layers.items():
        if name == last:
            continue
        if weight_shape(layer)[0] != k:
            return {}, f"{leaf(name)} has {weight_shape(layer)[0]} outputs, not {k}"
        parts[name] = Part(COLUMNWISE, found)
    for other, layer in feeds(owner, layers):
        if weight_shape(layer)[0] == k:
            return {}, f"{other}, of {k} outputs, too, is not of the style {COLUMNWISE}"
    for other, tensor in other_tensors(owner, layers):
        if k in tensor.shape:
            return {}, f"{other}, {list(tensor.shape)}, is for all {k} inputs of {leaf(last)}"
    return parts, None


def _agree_on_keys(groups: dict[str, dict[str, str]], plan: Plan) -> None:
    """Where an attention reads the keys of another layer, none has them for some heads only."""
    wholly = [
        parent for parent, of in groups.items() if plan.whole.get(next(iter(of))) == KEYS_ELSEWHERE
    ]
    for members in groups.values():
        if wholly and any(n in plan.parts and plan.parts[n].heads is not None for n in members):
            plan.replicate(members, f"{wholly[0]} may read its keys")


def _agree_on_ties(model: nn.Module, groups: dict[str, dict[str, str]], plan: Plan) -> None:
    """Layers that share a weight are divided alike, or not at all, nor is what they feed."""
    ties = tied_names(model)
    for name in list(plan.parts):
        others = [n.rpartition(".")[0] for n in ties.get(f"{name}.weight", ())]
        mine = plan.parts.get(name)
        for other in others:
            theirs = plan.parts.get(other)
            if mine is not None and theirs is not None:
                if (mine.rows, mine.ranges) == (theirs.rows, theirs.ranges):
                    continue
            elif mine is theirs:
                continue
            for each in others:
                if each in plan.parts:
                    tied = next(n for n in others if n != each)
                    why = f"its weight is that of {tied}, too"
                    plan.replicate([each], why)
                    plan.replicate(groups.get(each.rpartition(".")[0], ()), f"{leaf(each)}: {why}")
                    _agree_on_ties(model, groups, plan)  # other ties of layers that are whole now
