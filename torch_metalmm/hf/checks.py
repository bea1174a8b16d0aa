"""The tensors of a checkpoint, by the names of the model, and whether they are what its packed
layers wait for: before one is read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..files.headers import Found, read_headers
from ..models.attach import quantized_by_another
from ..models.experts import Stack
from ..models.quantize import Job
from ..models.replace import weight_shape
from ..models.shard.apply import whole_shape
from ..nn import QuantEmbedding, QuantLinear
from ..nn.sharded import ColumnsLinear

_SOURCES = ("F64", "F32", "F16", "BF16")  # safetensors dtypes that can be packed


def find_tensors(files: Sequence[str], model: Any, conversions: list[Any]) -> dict[str, Found]:
    """{name in the model: the tensor that from_pretrained will load there}.

    conversions: transformers' renamings and converters for the model, applied as its loader does,
    so that old names, added and removed prefixes are found. The key of a tensor is what the loader
    looks for a converter by: renamed, the base model's prefix as the file has it. ValueError as
    read_headers.
    """
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    conversions = copy.deepcopy(conversions)  # conversions remember what they matched
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    state: dict[str, nn.Parameter] = model.state_dict(keep_vars=True)
    result = {}
    for key, tensor in sorted(
        read_headers(files).items(), key=lambda item: dot_natural_key(item[0])
    ):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is None:
            source, _ = rename_source_key(key, renamings, [])
            result[name] = replace(tensor, key=source)
            continue
        converter = next(c for c in converters if pattern in c.source_patterns)
        first = converter.target_patterns[0]
        for target in converter.target_patterns:
            result[name.replace(first, target)] = replace(tensor, converted=True)
    return result


def require_safetensors(what: str, files: Sequence[str]) -> None:
    for file in files:
        if not file.endswith(".safetensors"):
            raise ValueError(f"{what} read from safetensors only, not from {file}")


def check_shape(name: str, shape: tuple[int, ...], dense: nn.Module | Stack) -> None:
    assert isinstance(dense.weight, Tensor)
    want = tuple(dense.weight.shape)
    if shape != want:
        raise ValueError(f"{name} is {list(shape)} in the checkpoint, the model has {list(want)}")


def check_sources(jobs: list[Job], found: dict[str, Found]) -> None:
    """ValueError if a weight that is to be packed is not float or not of the model's shape."""
    for job in jobs:
        for name, (_, dense) in zip(job.parameters, job.sites, strict=True):
            tensor = found.get(name)
            if tensor is None or tensor.converted:
                continue
            if tensor.dtype not in _SOURCES:
                raise ValueError(f"{tensor.file}: {name} is {tensor.dtype}, only floats are packed")
            check_shape(name, tensor.shape, dense)


def check_stored(model: Any, jobs: list[Job], found: dict[str, Found]) -> None:
    """ValueError if the bytes of a packed layer are missing, or not those of its format."""
    for job in jobs:
        if not any(name in found for name in job.parameters):
            raise ValueError(f"the checkpoint has no tensor for the packed {job.parameters[0]}")
        dense = job.sites[0][1]
        *rows, k = dense.shape if isinstance(dense, Stack) else weight_shape(dense)
        want = (*rows, formats.get(job.format).row_bytes(k))  # the whole weight's, if sharded
        for name in job.parameters:
            tensor = found.get(name)
            if tensor is not None and (tensor.dtype, tensor.shape) != ("U8", want):
                raise ValueError(
                    f"{tensor.file}: {name} must be U8 {list(want)} ({job.format}), "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
    for name, layer in model.named_modules():
        if getattr(layer, "input_order", None) is not None:
            order = found.get(f"{name}.input_order")
            if order is None or (order.dtype, order.shape) != ("I64", (whole_shape(layer)[1],)):
                raise ValueError(f"the checkpoint has no {name}.input_order I64 of its K values")


def check_floats(model: Any, found: dict[str, Found]) -> None:
    """ValueError: a tensor beside the packed layers is of integers, and the model's is not."""
    for name, value in model.state_dict().items():
        tensor = found.get(name)
        if tensor is None or not value.is_floating_point() or tensor.converted:
            continue
        if not tensor.dtype.startswith(("F", "BF")):
            raise ValueError(f"{tensor.file}: {name} is {tensor.dtype}, not a float dtype")


def refuse_disk(pre_quantized: bool, device_map: Any) -> None:
    """ValueError: weights would be packed and then offloaded to files that are not packed."""
    places = device_map.values() if isinstance(device_map, dict) else ()
    if not pre_quantized and "disk" in places:
        raise ValueError(
            "device_map sends layers to the disk, where they cannot be packed: save a packed "
            "model first and load that"
        )


def check_one_method(model: Any) -> None:
    """ValueError: another method quantized layers of the model, too."""
    if quantized_by_another(model):
        other = type(model.hf_quantizer).__name__
        raise ValueError(
            f"the model has packed layers and is quantized by {other}, too; config.json has room "
            "for one method"
        )


def shape_in_words(layer: Any) -> str:
    n, k = weight_shape(layer)
    return f"{n} rows of {k}" + (", a bias" if getattr(layer, "bias", None) is not None else "")


def finish_loaded(model: nn.Module) -> None:
    """Finish layers whose bytes are there. ValueError: an input_order is no order of its inputs."""
    for name, module in model.named_modules():
        if isinstance(module, QuantEmbedding):
            module.reset_scale()
        elif isinstance(module, QuantLinear) and not isinstance(module, ColumnsLinear):
            _check_order(name, module.input_order)


def _check_order(name: str, order: Tensor | None) -> None:
    if order is None or order.is_meta:
        return
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise ValueError(f"{name}.input_order is no order of its {len(order)} inputs")
