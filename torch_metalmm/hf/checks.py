"""Whether the tensors of a checkpoint are those that a model's packed layers wait for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..files.headers import Found
from ..models.experts import Stack
from ..models.quantize import Job

_SOURCES = ("F64", "F32", "F16", "BF16")  # safetensors dtypes that can be packed


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
        for name in job.parameters:
            tensor, want = found.get(name), tuple(model.get_parameter(name).shape)
            if tensor is not None and (tensor.dtype, tensor.shape) != ("U8", want):
                raise ValueError(
                    f"{tensor.file}: {name} must be U8 {list(want)} ({job.format}), "
                    f"got {tensor.dtype} {list(tensor.shape)}"
                )
    for name, layer in model.named_modules():
        if getattr(layer, "input_order", None) is not None:
            order = found.get(f"{name}.input_order")
            if order is None or (order.dtype, order.shape) != ("I64", (layer.in_features,)):
                raise ValueError(f"the checkpoint has no {name}.input_order I64 of its K values")


def check_floats(model: Any, found: dict[str, Found]) -> None:
    """ValueError: a tensor beside the packed layers is of integers, and the model's is not."""
    for name, value in model.state_dict().items():
        tensor = found.get(name)
        if tensor is None or not value.is_floating_point() or tensor.converted:
            continue
        if not tensor.dtype.startswith(("F", "BF")):
            raise ValueError(f"{tensor.file}: {name} is {tensor.dtype}, not a float dtype")


def check_order(name: str, order: Tensor | None) -> None:
    if order is None or order.is_meta:
        return
    if not torch.equal(order.sort().values, torch.arange(len(order), device=order.device)):
        raise ValueError(f"{name}.input_order is no order of its {len(order)} inputs")
