"""Giving an empty model what a checkpoint holds: packed rows, and dense tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.attach import attach
from ..models.finite import check_finite
from ..models.integers.affine import Rows
from ..models.replace import is_conv1d, packable, replaceable
from ..models.shard.apply import part_of
from ..models.skeleton import put_dense, put_packed, set_input_order, tied_names
from ..nn import QuantExperts, QuantLinear
from ..nn.place import place
from .blame import blaming
from .source import Source


def fill(
    model: Any,
    source: Source,
    packed: Mapping[str, Iterable[str]],
    rows: Callable[[str, nn.Module], Rows] | None,
    device: torch.device | str,
    done: Container[str] = (),
) -> None:
    """Put everything of the source into the model, which is on the meta device.

    packed: {name of a layer: the tensors of the source that rows(name, layer) reads}; rows is None
    where it is empty. A router that no packed layer can stand in for gets what the rows decode to.
    done: names of parameters that the model has already.
    ValueError: a layer cannot be packed, has a dense weight beside its packed one, or a tensor does
    not fit, is too many or is missing.
    """
    wanted, ties = model.state_dict(), tied_names(model)
    left = set(source.keys)
    for owner in sorted(packed):
        layer = layer_of(model, source, owner, packed[owner])
        names = ties[f"{owner}.weight"]
        if dense := sorted(left.intersection(names).difference(packed[owner])):
            shown = ", ".join(source.keys[name] for name in dense)
            raise ValueError(
                f"{source.path}: {owner} is quantized, and has a dense weight too: {shown}"
            )
        assert rows is not None
        made = rows(owner, layer)
        left.difference_update(packed[owner])
        if not (packable(layer) and replaceable(model, owner)):
            put_dense(model, names, _decoded(made), device)
            continue
        put_packed(model, names, place(made.weight, device), made.format)
        if made.input_order is not None:
            if not all(
                isinstance(model.get_submodule(n.removesuffix(".weight")), QuantLinear)
                for n in names
            ):
                raise ValueError(
                    f"{source.path}: {owner} orders its columns, which an embedding cannot"
                )
            set_input_order(model, names, made.input_order.to(device))
    if extra := sorted(left - wanted.keys()):
        raise ValueError(f"{source.path} has tensors the model does not: {', '.join(extra[:6])}")
    for name in sorted(left):
        _put_dense(model, source, name, wanted[name], ties.get(name, [name]), device)
    given = left | {f"{owner}.weight" for owner in packed}
    filled = {name for target in given for name in ties.get(target, [target])}
    needed = {name for name, _ in model.named_parameters(remove_duplicate=False)} & wanted.keys()
    needed |= {name for name, t in wanted.items() if t.is_floating_point()}  # buffers: corrections
    if missing := sorted(n for n in needed - filled if n not in done):
        raise ValueError(f"{source.path} has no tensor for {', '.join(missing[:6])}")
    model.to(device)  # buffers, which were made on the CPU


def finish(path: Path, model: Any) -> Any:
    """The filled model, frozen, with the folder's generation_config.json.

    ValueError: a packed weight is NaN or Inf.
    """
    check_finite(path, model)
    if (path / "generation_config.json").exists():
        from transformers import GenerationConfig

        with blaming(path, "transformers makes nothing of its generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    attach(model)
    return model.requires_grad_(False)


def layer_of(model: Any, source: Source, owner: str, tensors: Iterable[str]) -> nn.Module:
    """The layer of that name, which can be packed."""
    key = _shown(source, owner, tensors)
    try:
        module: nn.Module = model.get_submodule(owner)
    except AttributeError:
        stacked = "; transformers stacks experts in one tensor" if ".experts." in owner else ""
        raise ValueError(f"{source.path}: the model has no layer {key}{stacked}") from None
    packs = packable(module) and replaceable(model, owner)
    if not packs and not _is_router(model, owner):
        raise ValueError(
            f"{source.path}: {key} is a {type(module).__name__}, which cannot be packed"
        )
    return module


def _is_router(model: nn.Module, owner: str) -> bool:
    """Whether the module chooses among packed experts beside it."""
    module = model.get_submodule(owner)
    weight = module._parameters.get("weight")
    beside = model.get_submodule(owner.rpartition(".")[0]).children()
    return (
        weight is not None
        and weight.dim() == 2
        and any(isinstance(c, QuantExperts) for c in beside)
    )


def _decoded(rows: Rows) -> torch.Tensor:
    """The values of a packed weight."""
    dense: torch.Tensor = torch.ops.metalmm.dequantize(rows.weight, rows.format)
    return dense if rows.input_order is None else dense[:, rows.input_order.argsort()]


def _shown(source: Source, owner: str, tensors: Iterable[str]) -> str:
    """The checkpoint's name of a layer."""
    name = min(tensors)
    return source.keys[name].removesuffix(name.removeprefix(owner))


def _put_dense(
    model: Any,
    source: Source,
    name: str,
    wanted: torch.Tensor,
    names: list[str],
    device: torch.device | str,
) -> None:
    value = part_of(model, name, source.read(name))
    if is_conv1d(model.get_submodule(name.rpartition(".")[0])) and value.dim() == 2:
        value = value.t().contiguous()
    if value.shape != wanted.shape:
        raise ValueError(
            f"{source.path}: {source.keys[name]} is {list(value.shape)}, the model has "
            f"{list(wanted.shape)}"
        )
    if wanted.is_floating_point() and not value.is_floating_point():
        raise ValueError(f"{source.path}: {source.keys[name]} is {value.dtype}, not a float dtype")
    put_dense(model, names, value, device)
