"""What shard_ does to each layer: read from a plan in transformers' terms, and from the shapes.

A plan names layers, `*` for numbers, and a style for each. Layers of one parent that feed each
other ("colwise" into "rowwise") are divided alike: a gated MLP by blocks of its last layer, an
attention by heads. What cannot be divided is replicated, every rank having all of it, where the
plan is the model's own, and refused where it was given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ... import formats
from ...nn import QuantEmbedding, QuantLinear
from ...nn.sharded import Ranges
from ..experts import homes, unpackable
from ..replace import is_conv1d, packable, weight_shape
from ..skeleton import tied_names
from .split import Heads, even, heads, scaled

COLUMNWISE, ROWWISE = "colwise", "rowwise"
GATHERED, SPLIT_INPUT = "colwise_gather_output", "rowwise_split_input"
VOCABULARY = "embedding_rowwise"
REPLICATED = "replicate"
# What transformers calls the same otherwise.
_SAME = {
    "colwise_rep": GATHERED,
    "rowwise_rep": SPLIT_INPUT,
    "replicated_with_grad_allreduce": REPLICATED,
    "local_params": REPLICATED,
}
STYLES = (COLUMNWISE, ROWWISE, GATHERED, SPLIT_INPUT, VOCABULARY, REPLICATED)
_DENSE = {dtype: name for name, dtype in formats.DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """What becomes of one layer: ranges of its rows or columns by rank."""

    style: str
    ranges: Ranges
    heads: Heads | None = None  # of the attention that it ends

    @property
    def rows(self) -> bool:
        return self.style not in (ROWWISE, SPLIT_INPUT)


@dataclass
class Plan:
    """Parts by the names of layers, and why layers that the plan names are replicated."""

    parts: dict[str, Part] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


def plan_of(model: nn.Module, given: Mapping[str, str] | None, ranks: int) -> Plan:
    """What each layer of the model gets. Weights are not read and may be on the meta device.

    ValueError: experts; a style that is none of STYLES; a name that no layer has; no plan, given or
    the model's; and of a given plan what cannot be divided.
    """
    named = _named(model, given)
    styles = {name: _style(name, style) for name, style in named.items()}
    plan = Plan()
    groups: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        if style in (COLUMNWISE, ROWWISE):
            groups.setdefault(name.rpartition(".")[0], {})[name] = style
        elif style != REPLICATED:
            _alone(model, name, style, ranks, plan)
    for parent, members in groups.items():
        _group(model, parent, members, ranks, plan)
    _agree_on_ties(model, plan)
    if given is not None and plan.whole:
        name, why = next(iter(plan.whole.items()))
        raise ValueError(f"plan: {name} cannot be divided among {ranks} ranks: {why}")
    return plan


def _named(model: nn.Module, given: Mapping[str, str] | None) -> dict[str, str]:
    """{name of a layer: style}."""
    found: Any = given
    if found is None:
        found = getattr(model, "tp_plan", None)
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no tp_plan of its own: give plan={{pattern: style}}"
            )
    if not isinstance(found, Mapping):
        raise TypeError(f"plan must be {{pattern: style}}, got {type(found).__name__}")
    refuse_experts(model, found)
    layers = {name for name, module in model.named_modules(remove_duplicate=False) if name}
    result: dict[str, str] = {}
    for pattern, style in found.items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch
        names = [name for name in layers if match(name)]
        if given is not None and not names:
            raise ValueError(f"plan: the model has no layer {pattern!r}")
        if not names and _is_parameter(model, match):
            raise ValueError(f"{pattern} is no layer but a parameter, which is not sharded")
        result.update(dict.fromkeys(names, style))
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    return dict(sorted(result.items(), key=lambda item: order[item[0]]))


def refuse_experts(model: nn.Module, plan: Mapping[str, str] | None = None) -> None:
    """ValueError: the model has stacked experts, dense or packed, or the plan divides experts."""
    given = () if plan is None else plan.items()
    asked = [n for n, s in given if ".experts" in f".{n}" or str(s).startswith("moe_")]
    for name in (*homes(model), *unpackable(model), *asked):
        raise ValueError(f"experts are not sharded yet: {name}")


def _is_parameter(model: nn.Module, match: Any) -> bool:
    return any(match(name) for name, _ in model.named_parameters())


def _style(name: str, style: str) -> str:
    style = _SAME.get(style, style)
    if style not in STYLES:
        raise ValueError(f"plan: {name} has the style {style!r}; allowed: {', '.join(STYLES)}")
    return style


def _alone(model: nn.Module, name: str, style: str, ranks: int, plan: Plan) -> None:
    """A layer that is divided by itself."""
    module, why = _layer(model, name)
    if why is None and (style == VOCABULARY) != isinstance(module, nn.Embedding):
        why = f"{style} is not for a {type(module).__name__}"
    if why is not None:
        plan.whole[name] = why
        return
    n, k = weight_shape(module)
    unit = _block(module) if style == SPLIT_INPUT else 1
    found = even(k if style == SPLIT_INPUT else n, ranks, unit)
    if found is None:
        plan.whole[name] = f"it has {k if style == SPLIT_INPUT else n} values in blocks of {unit}"
        return
    plan.parts[name] = Part(style, found)


def _layer(model: nn.Module, name: str) -> tuple[Any, str | None]:
    """The layer of that name, and why it is not divided."""
    module = model.get_submodule(name)
    if not packable(module):
        return module, f"it is a {type(module).__name__}"
    if is_conv1d(module):
        return module, "it is a dense Conv1D"
    if not isinstance(module, QuantLinear | QuantEmbedding) and module.weight.dtype not in _DENSE:
        return module, f"its weight is {module.weight.dtype}"
    return module, None


def _block(module: Any) -> int:
    """Values of K that belong together."""
    return formats.get(format_of(module)).block_values


def format_of(module: Any) -> str:
    """The format of a layer; of a dense one that of its dtype."""
    format: str | None = getattr(module, "format", None)
    return format or _DENSE[module.weight.dtype]


def _group(model: nn.Module, parent: str, members: dict[str, str], ranks: int, plan: Plan) -> None:
    """Layers of one parent: those that are divided by rows feed the one divided by columns."""
    layers: dict[str, Any] = {}
    why = None
    for name in members:
        layers[name], problem = _layer(model, name)
        if problem is not None:
            why = f"{name.rpartition('.')[2]}: {problem}"
    last = [name for name, style in members.items() if style == ROWWISE]
    if why is None and len(last) != 1:
        why = f"{parent} has {len(last)} layers of the style {ROWWISE}; there must be one"
    if why is None and getattr(layers[last[0]], "input_order", None) is not None:
        why = f"{last[0].rpartition('.')[2]} has its columns in an order of its own"
    if why is None:
        owner = model.get_submodule(parent)
        attention = _attention(model, owner, layers, last[0])
        if attention is None:
            parts, why = _by_blocks(layers, last[0], ranks)
        else:
            parts, why = _by_heads(layers, last[0], ranks, *attention)
    if why is None:
        plan.parts.update(parts)
    else:
        plan.whole.update(dict.fromkeys(members, why))


def _by_blocks(layers: dict[str, Any], last: str, ranks: int) -> tuple[dict[str, Part], str | None]:
    k, block = weight_shape(layers[last])[1], _block(layers[last])
    found = even(k, ranks, block)
    if found is None:
        return {}, f"{last.rpartition('.')[2]} has {k} inputs in blocks of {block}"
    parts = {last: Part(ROWWISE, found)}
    for name, layer in layers.items():
        if name == last:
            continue
        if weight_shape(layer)[0] != k:
            return {}, f"{name.rpartition('.')[2]} has {weight_shape(layer)[0]} outputs, not {k}"
        parts[name] = Part(COLUMNWISE, found)
    return parts, None


def _attention(
    model: Any, owner: Any, layers: dict[str, Any], last: str
) -> tuple[int, int, int] | None:
    """(heads of queries, of keys, values of a head) where the layers are those of an attention."""
    leaves = {name.rpartition(".")[2] for name in layers}
    if not leaves & {"k_proj", "query_key_value"}:
        return None
    size = getattr(owner, "head_dim", None) or getattr(owner, "head_size", None)
    if not isinstance(size, int):
        return None
    queries = weight_shape(layers[last])[1] // size
    keys = queries
    for name, layer in layers.items():
        if name.endswith("k_proj"):
            keys = weight_shape(layer)[0] // size
    return queries, keys, size


def _by_heads(
    layers: dict[str, Any], last: str, ranks: int, queries: int, keys: int, size: int
) -> tuple[dict[str, Part], str | None]:
    block = _block(layers[last])
    found = heads(queries, keys, ranks, size, block)
    if found is None:
        return {}, (
            f"{queries} heads of queries and {keys} of keys, of {size} values, where "
            f"{last.rpartition('.')[2]} has blocks of {block}"
        )
    parts = {last: Part(ROWWISE, scaled(found.queries, size), found)}
    for name, layer in layers.items():
        if name == last:
            continue
        n, leaf = weight_shape(layer)[0], name.rpartition(".")[2]
        count, ranges = (
            (keys, found.keys) if leaf in ("k_proj", "v_proj") else (queries, found.queries)
        )
        if n % count:
            return {}, f"{leaf} has {n} outputs for {count} heads"
        parts[name] = Part(COLUMNWISE, scaled(ranges, n // count))
    return parts, None


def _agree_on_ties(model: nn.Module, plan: Plan) -> None:
    """Layers that share a weight are divided alike, or not at all."""
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
            why = f"its weight is that of {other if other != name else others[0]}, too"
            for each in others:
                if plan.parts.pop(each, None) is not None:
                    plan.whole[each] = why
