"""Giving each rank its part of a model: the layers of a plan, replaced in place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...formats._bits import as_bytes
from ...nn import QuantEmbedding, QuantLinear
from ...nn.activations import set_activations
from ...nn.collective import Ranks
from ...nn.embedding import embedding_scale
from ...nn.fused import FusedMLP, LinearPart
from ...nn.sharded import ColumnsLinear, RowsEmbedding, RowsLinear, Shard, Sharded, is_sharded
from ..replace import summary, weight_shape
from .parts import GATHERED, SPLIT_INPUT, Part, format_of
from .plan import plan_of


def shard_(model: nn.Module, mesh: Any, plan: Mapping[str, str] | None = None) -> nn.Module:
    """Leave this process its part of the model's layers, in place: tensor parallelism.

    mesh: a torch.distributed DeviceMesh of one dimension, or with a dimension "tp"; every process
    of it calls this with the same model, and from then on the model with the same inputs, in the
    same order.
    plan: {name of a layer, `*` for its numbers: style}, by default the model's own tp_plan. Styles,
    as transformers has them:
      "colwise"                this rank's rows of W, its part of the outputs
      "rowwise"                this rank's columns of W, for its part of the inputs; summed
      "colwise_gather_output"  rows, the outputs gathered from all ranks
      "rowwise_split_input"    columns, of inputs that every rank has; summed
      "embedding_rowwise"      this rank's part of the vocabulary; summed
      "replicate"              all of it on every rank, as what the plan does not name
    Layers of one parent, colwise into rowwise, are divided together: an MLP at blocks of the
    rowwise layer's format, attention at heads, as far as its module takes their number from the
    shapes it meets. Parts need not be even. Where there are more ranks than heads of keys, ranks
    share one. Dense layers that the plan names are frozen.

    What cannot be divided is replicated with a warning, if the plan is the model's own. Rows and
    columns are copied, so that the memory of the whole layer is free; loaders that take a mesh
    leave rows where the file is mapped.
    Returns `model`. Nothing is changed by an error. TypeError: mesh or plan is none. ValueError:
    experts, a plan that does not fit the model, a layer of a given plan that cannot be divided, no
    plan; a model that is sharded, fused or has adapters.
    """
    ranks = Ranks.of(mesh)
    _check(model)
    made = plan_of(model, plan, ranks.size)
    if ranks.size > 1:
        warn_whole(made.whole, ranks.size)
        _replace(model, made.parts, ranks)
    return model


def part_of(model: nn.Module, name: str, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that the whole model has under that name; a view of rows."""
    owner, _, leaf = name.rpartition(".")
    layer = model.get_submodule(owner)
    return layer.shard.take(leaf, whole) if isinstance(layer, Sharded) else whole


def part_of_rows(model: nn.Module, name: str, order: Tensor) -> Tensor:
    """The rows that this rank has of the weight `name`, whose rows are given in their order."""
    shard = getattr(model.get_submodule(name.rpartition(".")[0]), "shard", None)
    return order if shard is None or not shard.rows else order[slice(*shard.range)]


def part_of_columns(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """This rank's columns of the weight `name`, whose rows are those of this rank."""
    shard = getattr(model.get_submodule(name.rpartition(".")[0]), "shard", None)
    return weight if shard is None or shard.rows else shard.take("weight", weight)


def whole_shape(layer: Any) -> tuple[int, int]:
    """(N, K) of a packable layer, of a sharded one that of the whole."""
    return (layer.shard.n, layer.shard.k) if isinstance(layer, Sharded) else weight_shape(layer)


def refuse_sharded(model: nn.Module, what: str) -> None:
    """ValueError: `what` is not done to a sharded model."""
    if is_sharded(model):
        raise ValueError(f"{what}: the model is sharded; do it before shard_")


def warn_whole(whole: dict[str, str], ranks: int) -> None:
    """Say which layers every rank has, and why."""
    reasons: dict[str, list[str]] = {}
    for name, why in whole.items():
        reasons.setdefault(why, []).append(name)
    if reasons:
        said = "; ".join(f"{summary(names)}: {why}" for why, names in reasons.items())
        warnings.warn(f"every one of {ranks} ranks has all of {said}", stacklevel=3)


def _check(model: nn.Module) -> None:
    if is_sharded(model):
        raise ValueError("model is sharded; a part is not divided again")
    for name, module in model.named_modules():
        if isinstance(module, LinearPart | FusedMLP) or "forward" in module.__dict__:
            raise ValueError(f"{name} is fused or has another forward; call shard_ before fuse_")
        if hasattr(module, "base_layer"):
            raise ValueError(f"{name} has an adapter; merge it, or load it before shard_")


def _replace(model: nn.Module, parts: dict[str, Part], ranks: Ranks) -> None:
    made: dict[int, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}
    for name, part in parts.items():
        old: Any = model.get_submodule(name)
        if id(old) not in made:
            made[id(old)] = _sharded(old, part, ranks, weights)
            _set_groups(model, name, part, ranks)
        model.set_submodule(name, made[id(old)])


def _sharded(old: Any, part: Part, ranks: Ranks, weights: dict[int, nn.Parameter]) -> nn.Module:
    """The layer with this rank's part. weights: those made so far, by the id of the whole one."""
    n, k = weight_shape(old)
    dense = None if isinstance(old, QuantLinear | QuantEmbedding) else old.weight.dtype
    format = format_of(old)
    shard = Shard(ranks, part.rows, part.ranges, n, k, format, dense)
    whole = old.weight.detach()
    if dense is not None:
        whole = as_bytes(whole)
    if id(old.weight) not in weights:
        taken = shard.take("weight", whole)
        # A view would keep the whole tensor; the columns are a copy already.
        owned = taken.clone() if part.rows else taken
        weights[id(old.weight)] = nn.Parameter(owned, requires_grad=False)
    weight = weights[id(old.weight)]
    if isinstance(old, nn.Embedding):
        dtype = old.dtype if isinstance(old, QuantEmbedding) else old.weight.dtype
        scale = embedding_scale(old)
        new: Any = RowsEmbedding.from_packed(weight, k, format, old.padding_idx, dtype, scale)
    else:
        new = _linear(old, weight, part, shard)
    new.shard = shard
    return new.train(old.training)


def _linear(old: Any, weight: nn.Parameter, part: Part, shard: Shard) -> Any:
    kind: Any = RowsLinear if part.rows else ColumnsLinear
    begin, end = shard.range
    k = shard.k if part.rows else end - begin
    bias = None if old.bias is None else shard.take("bias", old.bias.detach()).clone()
    new = kind.from_packed(weight, k, shard.format, bias)
    if part.rows:
        new.gathered = part.style == GATHERED
    else:
        new.split_input = part.style == SPLIT_INPUT
    if isinstance(old, QuantLinear):
        set_activations(new, old.activations)
        if old.input_order is not None:
            new.input_order = shard.take("input_order", old.input_order).clone()
    return new


def _set_groups(model: nn.Module, name: str, part: Part, ranks: Ranks) -> None:
    """Attention repeats keys and values for the heads of queries that this rank has."""
    owner = model.get_submodule(name.rpartition(".")[0])
    if part.heads is not None and hasattr(owner, "num_key_value_groups"):
        owner.num_key_value_groups = part.heads.groups(ranks.rank)  # type: ignore[assignment]
