"""The whole model on rank 0, for a save: the bytes that an unsharded model has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import formats
from ...nn import QuantEmbedding, QuantLinear
from ...nn.activations import set_activations
from ...nn.collective import gather_bytes
from ...nn.embedding import embedding_scale
from ...nn.fused import LinearPart
from ...nn.sharded import Shard, Sharded


def on_whole(model: nn.Module, save: Callable[[], None]) -> None:
    """save() on rank 0, while the model is whole there; on every rank, once that is done.

    All ranks call this; rank 0 needs memory for the whole model. RuntimeError on the others: save()
    failed on rank 0, where its own error is raised.
    """
    ranks = next(m.shard.ranks for m in model.modules() if isinstance(m, Sharded))
    problem: list[Any] = [None]
    try:
        with _whole(model):
            if ranks.rank == 0:
                save()
    except BaseException as error:
        problem[0] = f"{type(error).__name__}: {error}"
        raise
    finally:
        dist.broadcast_object_list(problem, group=ranks.process_group(), group_src=0)
    if problem[0] is not None:
        raise RuntimeError(f"rank 0 could not save: {problem[0]}")


@contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Inside, rank 0 has the whole layers, on the CPU; the other ranks have what they had."""
    parts: dict[str, nn.Module] = {}
    made: dict[int, nn.Module | None] = {}
    weights: dict[int, nn.Parameter] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        shard = _shard_of(layer)
        if shard is None:
            continue
        if id(layer) not in made:
            made[id(layer)] = _gathered(layer, shard, weights)
        if made[id(layer)] is not None:
            parts[name] = layer
    for name, layer in parts.items():
        model.set_submodule(name, made[id(layer)])  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, layer in parts.items():
            model.set_submodule(name, layer)


def _shard_of(layer: Any) -> Shard | None:
    if isinstance(layer, LinearPart):
        layer = layer.merged.originals[layer.index]
    return layer.shard if isinstance(layer, Sharded) else None


def _gathered(layer: Any, shard: Shard, weights: dict[int, nn.Parameter]) -> nn.Module | None:
    """The whole layer on rank 0; None on the others. Layers that share a part share the whole."""
    key = id(layer) if isinstance(layer, LinearPart) else id(layer.weight)
    if key not in weights:
        rows = [shard.n] * shard.ranks.size if not shard.rows else list(shard.sizes)
        parts = _tensors(layer.weight, rows, shard)
        if parts is not None:
            weights[key] = nn.Parameter(shard.join(parts), requires_grad=False)
        elif shard.ranks.rank > 0:
            weights[key] = layer.weight
    bias = getattr(layer, "bias", None)
    if bias is not None and shard.rows:
        parts = _tensors(bias, list(shard.sizes), shard)
        bias = None if parts is None else shard.join(parts)
    order = getattr(layer, "input_order", None)
    if order is not None and not shard.rows:
        parts = _tensors(order, list(shard.sizes), shard)
        order = None if parts is None else torch.cat(parts)
    if shard.ranks.rank > 0:
        return None
    return _layer(layer, shard, weights[key], bias, order)


def _tensors(mine: Tensor, rows: list[int], shard: Shard) -> list[Tensor] | None:
    """Every rank's tensor, whose first dimension is rows[rank], on rank 0; None on the others."""
    local = mine.detach().cpu().contiguous()
    if local.dim() == 1:
        row = [local.element_size()] * len(rows)
    elif shard.rows:
        row = [local.shape[1]] * len(rows)
    else:
        row = [formats.get(shard.format).row_bytes(count) for count in shard.sizes]
    sizes = tuple(count * size for count, size in zip(rows, row, strict=True))
    parts = gather_bytes(local.view(torch.uint8).flatten(), sizes, shard.ranks)
    if parts is None:
        return None
    return [
        part.view(local.dtype) if local.dim() == 1 else part.view(count, -1)
        for part, count in zip(parts, rows, strict=True)
    ]


def _layer(
    layer: Any, shard: Shard, weight: nn.Parameter, bias: Tensor | None, order: Tensor | None
) -> nn.Module:
    """A whole layer like the one that was sharded."""
    new: Any
    if shard.dense is not None:
        return _dense(layer, shard, weight, bias)
    if isinstance(layer, QuantEmbedding):
        scale = embedding_scale(layer)
        new = QuantEmbedding.from_packed(
            weight, shard.k, shard.format, layer.padding_idx, layer.dtype, scale
        )
    else:
        bias = None if bias is None else bias.cpu()
        new = QuantLinear.from_packed(weight, shard.k, shard.format, bias)
        new.input_order = None if order is None else order.cpu()
        set_activations(new, layer.activations)
    return new.train(layer.training)  # type: ignore[no-any-return]


def _dense(layer: Any, shard: Shard, weight: nn.Parameter, bias: Tensor | None) -> nn.Module:
    assert shard.dense is not None
    values = nn.Parameter(weight.detach().view(shard.dense), requires_grad=False)
    new: nn.Module
    if isinstance(layer, QuantEmbedding):
        new = nn.Embedding(shard.n, shard.k, layer.padding_idx, device="meta")
    else:
        new = nn.Linear(shard.k, shard.n, bias is not None, device="meta")
        new.bias = None if bias is None else nn.Parameter(bias.cpu(), requires_grad=False)  # type: ignore[assignment]
    new.weight = values
    return new.train(layer.training)
