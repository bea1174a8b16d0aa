"""The layers that a config says are packed: put before their bytes come, and made dense again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .. import formats
from ..nn import QuantEmbedding, QuantExperts, QuantLinear
from ..nn.activations import Activations, set_activations
from ..nn.experts import GATE
from .activations import activations_
from .experts import unpack_into
from .quantize import Job, plan
from .replace import is_conv1d, weight_shape


def stored_jobs(model: nn.Module, table: Mapping[str, str | None]) -> list[Job]:
    """The layers that a stored model has packed: those of table, {name: format}, None: dense.

    ValueError: one of them cannot be packed.
    """
    apart = {name.removesuffix(f".{GATE}") for name in table if name.endswith(f".{GATE}")}
    jobs = plan(model, lambda name, module: table.get(name), apart=apart)
    for job in jobs:
        if job.format != job.asked:
            k = weight_shape(job.sites[0][1])[1]
            raise ValueError(f"quantization_config: {job.name} has K = {k}, no {job.asked} row")
    placed = {name for job in jobs for name, _ in job.sites}
    if wrong := sorted(name for name, format in table.items() if format and name not in placed):
        owner = wrong[0].rpartition(".")[0]
        known = dict(model.named_modules(remove_duplicate=False))
        kind = type(known.get(wrong[0], known[owner])).__name__
        raise ValueError(f"quantization_config: {wrong[0]}, a {kind}, cannot be packed")
    return jobs


def put_empty(model: nn.Module, jobs: Iterable[Job], orders: Iterable[str]) -> None:
    """Put packed layers on the meta device in the place of dense ones.

    orders: names of those that gather their input. ValueError: one of them is not packed.
    """
    for job in jobs:
        n, k = weight_shape(job.sites[0][1])
        row = formats.get(job.format).row_bytes(k)
        job.put(model, torch.empty(n, row, dtype=torch.uint8, device="meta"))
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in orders:
        layer = modules.get(name)  # None: a stack of experts
        if not isinstance(layer, QuantLinear):
            raise ValueError(f"quantization_config: {name} in input_order is not packed")
        layer.input_order = torch.empty(layer.in_features, dtype=torch.int64, device="meta")


def take_activations(model: nn.Module, asked: str | Mapping[str, str | None] | None) -> None:
    """Set what a config says of activations: for all layers, by name, or nothing.

    ValueError: a name is of no packed layer, or activations_ refuses.
    """
    if asked is None or isinstance(asked, str):
        if asked is not None:
            activations_(model, asked)
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, kind in asked.items():
        layer = modules.get(name)  # None: a stack of experts
        if not isinstance(layer, Activations):
            raise ValueError(f"quantization_config: {name} in activations is no packed layer")
        set_activations(layer, kind)


def unpack_(model: nn.Module, originals: nn.Module, dtype: torch.dtype) -> list[str]:
    """Replace the packed layers by those of `originals`, with what the packed ones decode to.

    originals: a dense model of the same class. Returns the names of the dense experts.
    ValueError, before anything is changed: it has no such layer.
    """
    known = dict(originals.named_modules(remove_duplicate=False))
    for name, packed in model.named_modules(remove_duplicate=False):
        if isinstance(packed, QuantLinear | QuantEmbedding | QuantExperts) and name not in known:
            raise ValueError(
                f"dequantize: a {type(originals).__name__} of this config has no layer {name}; "
                "adapters are unloaded first"
            )
    experts, weights = [], dict[int, nn.Parameter]()
    for name, packed in list(model.named_modules(remove_duplicate=False)):
        if isinstance(packed, QuantExperts):
            dense: Any = originals.get_submodule(name)
            unpack_into(dense, packed, dtype)
            model.set_submodule(name, dense.train(packed.training))
            experts.append(name)
        elif isinstance(packed, QuantLinear | QuantEmbedding):
            dense = originals.get_submodule(name)
            if id(packed.weight) not in weights:
                decoded = packed.dequantize(dtype)
                if is_conv1d(dense):
                    decoded = decoded.t().contiguous()
                weights[id(packed.weight)] = nn.Parameter(decoded)
            dense.weight = weights[id(packed.weight)]
            if isinstance(packed, QuantLinear):
                dense.bias = packed.bias
            model.set_submodule(name, dense.to(packed.weight.device).train(packed.training))
    return experts
