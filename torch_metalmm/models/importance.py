"""The importance of each column of a layer's weight: sums of squares of inputs it multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .replace import packable, weight_shape
from .shard.apply import refuse_sharded


@dataclass
class Sums:
    """Σ x² of each column over the rows of x that a layer has seen, and how many rows that was."""

    squares: Tensor  # f64 [K], on the CPU
    rows: int = 0


Importance = Mapping[str, Tensor | Sums]  # by layer: the mean of x^2 of each column, or its sum


def columns_of(name: str, given: Tensor | Sums, k: int) -> Tensor | None:
    """The importance f32 [k] on the CPU; None for sums of a layer that never ran.

    ValueError: it is not f32 [k], or an element is negative, NaN or infinite.
    """
    if isinstance(given, Sums):
        if not given.rows:
            return None
        given = (given.squares / given.rows).float()
    if given.dtype != torch.float32 or tuple(given.shape) != (k,):
        raise ValueError(
            f"importance: {name} must be float32 [{k}], got {given.dtype} {list(given.shape)}"
        )
    if not bool((torch.isfinite(given) & (given >= 0)).all()):
        raise ValueError(f"importance: {name} has an element that is negative, NaN or infinite")
    return given.detach().cpu()


@contextmanager
def importance(model: nn.Module) -> Iterator[dict[str, Sums]]:
    """Collect the sums of every packable linear layer of the model while it runs.

        with importance(model) as sums:
            model(ids)
        quantize_(model, "q3_k", importance=sums)

    Gives {name: Sums}, complete when the block ends; layers that never ran have rows = 0. Fused
    layers run their own forward meanwhile. Embeddings and stacked experts are not seen. Columns are
    in the order of x, also where a layer's input_order gives its packed weight another.
    ValueError: the model is sharded; at the end of the block, an input was NaN or infinite.
    """
    refuse_sharded(model, "importance")
    sums: dict[str, Sums] = {}
    hooks = []
    for name, module in model.named_modules():
        if packable(module) and not isinstance(module, nn.Embedding):
            sums[name] = Sums(torch.zeros(weight_shape(module)[1], dtype=torch.float64))
            hooks.append(module.register_forward_pre_hook(_adder(sums[name]), with_kwargs=True))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
    for name, found in sums.items():
        if not bool(torch.isfinite(found.squares).all()):
            raise ValueError(f"{name} was given an input that is NaN or infinite")


def _adder(sums: Sums) -> Any:
    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        sums.squares += rows.square().sum(0).cpu().double()  # not earlier: Apple's GPUs have no f64
        sums.rows += len(rows)

    return add
