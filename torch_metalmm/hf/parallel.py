"""from_pretrained for one rank of several: layers have their parts before any weight is read.

The layers of the empty model are sharded; a converter then gives each its part of the tensor that
transformers' loader hands over, a view of the mapped file, of which no more is read than is kept.
transformers' own tensor parallelism is left nothing to do: it would cut blocks and planes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from .. import formats
from ..files.headers import Found
from ..formats._base import normalised
from ..models.quantize import Job
from ..models.replace import is_conv1d
from ..models.shard.apply import shard_
from ..models.skeleton import tied_names
from ..nn.sharded import Shard, Sharded
from .checks import check_shape, require_safetensors

_asked: ContextVar[tuple[Any, Mapping[str, str] | None] | None] = ContextVar("mesh", default=None)


@contextmanager
def loading_on(mesh: Any, plan: Mapping[str, str] | None) -> Iterator[None]:
    """Inside, from_pretrained of packed models shards as shard_(model, mesh, plan)."""
    token = _asked.set(None if mesh is None else (mesh, plan))
    try:
        yield
    finally:
        _asked.reset(token)


def shard_skeleton(model: Any, jobs: list[Job], files: Sequence[str] | None) -> None:
    """Shard the model, whose weights are on meta, as loading_on or distributed_config asks.

    The importance of a job becomes that of this rank's columns.
    ValueError: shard_'s; distributed_config asks for more than tensor parallelism; the weights come
    from no safetensors, whose headers say what is to be cut; an importance
    of columns that a rank has a part of, in a format that weighs them by the whole row.
    """
    asked = _asked.get() or _of_config(model)
    if asked is None:
        return
    require_safetensors("parts of a model are", ["a state_dict"] if files is None else files)
    shard_(model, *asked)
    for job in jobs:
        owner = job.parameters[0].rpartition(".")[0]
        layer = model.get_submodule(owner)
        if job.importance is None or not isinstance(layer, Sharded) or layer.shard.rows:
            continue
        if formats.get(job.format).over_rows:
            raise ValueError(
                f"importance: {owner} is divided by columns, and {job.format} weighs each by the "
                "values of the whole row: give that layer another format, or save a packed model "
                "first and load that"
            )
        # Normalised as the whole: the least weight of a column is a fraction of the largest.
        job.importance = layer.shard.of_inputs(normalised(job.importance))


def _of_config(model: Any) -> tuple[Any, None] | None:
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return None
    for name in ("pp_size", "dp_size", "ep_size"):
        if getattr(config, name, 1) > 1:
            raise ValueError(
                f"distributed_config: {name} = {getattr(config, name)}; packed layers are divided "
                "by tensor parallelism alone (tp_size)"
            )
    if config.tp_size == 1:
        return None
    from torch.distributed.device_mesh import init_device_mesh

    if isinstance(config.tp_plan, dict):
        model._tp_plan = model.tp_plan | config.tp_plan
    # transformers asks the model what to divide: what is divided is ours.
    model._resolve_parallel_plans = lambda config: ({}, {}, {})
    kind = torch._C._get_accelerator().type
    return init_device_mesh(kind, (config.tp_size,), mesh_dim_names=("tp",)), None


def forget_styles(model: Any) -> None:
    """Undo what made transformers leave the model alone: saves are not transformers' either."""
    if model.__dict__.pop("_resolve_parallel_plans", None) is not None:
        del model.config.distributed_config


def check_present(model: nn.Module, found: dict[str, Found]) -> None:
    """ValueError: the checkpoint lacks a tensor of a sharded layer, which nothing else draws."""
    ties = tied_names(model)
    for name in model.state_dict():
        sharded = isinstance(model.get_submodule(name.rpartition(".")[0]), Sharded)
        if sharded and not any(tied in found for tied in ties.get(name, [name])):
            raise ValueError(f"the checkpoint has no tensor for the sharded {name}")


def cut_converters(
    model: nn.Module, jobs: list[Job], found: dict[str, Found]
) -> list[WeightConverter]:
    """For each tensor of a sharded layer, what leaves this rank's part of it.

    ValueError: transformers makes the tensor of others of the checkpoint, or it does not fit.
    """
    dense = {f"{name}.weight": module for job in jobs for name, module in job.sites}
    result = []
    for name in model.state_dict():
        owner, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner)
        if not isinstance(layer, Sharded) or (leaf == "bias" and not layer.shard.rows):
            continue
        given = found.get(name)
        if given is None:  # a tied layer has the part of another
            continue
        if given.converted:
            raise ValueError(
                f"{given.file}: {name} is made of other tensors, whose parts are not known; save a "
                "packed model first and load that"
            )
        module = dense.get(name)
        if module is not None and given.dtype != "U8":
            check_shape(name, given.shape, module)
        operation = _Cut(name, leaf, layer.shard, module is not None and is_conv1d(module))
        pattern = f"^{re.escape(given.key)}$"  # before transformers adds or removes prefixes
        result.append(WeightConverter([pattern], [name], [operation], force_cpu=True))
    return result


def is_of_dense(converter: Any) -> bool:
    """Whether the converter is for the weight of a dense layer, whose part becomes bytes."""
    return any(
        isinstance(operation, _Cut) and operation.leaf == "weight" and operation.shard.dense
        for operation in getattr(converter, "operations", ())
    )


class _Cut(ConversionOps):
    """A tensor of the whole layer -> this rank's part."""

    def __init__(self, name: str, leaf: str, shard: Shard, transposed: bool) -> None:
        self.name, self.leaf, self.shard, self.transposed = name, leaf, shard, transposed

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        (given,) = input_dict.values()
        whole: Tensor = given[0] if isinstance(given, list) else given
        turned = self.transposed and whole.is_floating_point() and self.leaf == "weight"
        return {self.name: self.shard.take(self.leaf, whole.t() if turned else whole)}
