"""The whole model on rank 0, for a save: the bytes that an unsharded model has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ... import formats
from ...nn import QuantEmbedding, QuantLinear
from ...nn.activations import set_activations
from ...nn.collective import FailedElsewhere, gather_bytes
from ...nn.embedding import embedding_scale
from ...nn.fused import LinearPart
from ...nn.sharded import Shard, Sharded

_T = TypeVar("_T")


def on_whole(model: nn.Module, save: Callable[[], None]) -> None:
    """save() on rank 0, while the model is whole there; on every rank, once that is done.

    All ranks call this; rank 0 needs memory for the whole model. What fails on a rank is raised
    there, and as a RuntimeError that names the rank on the others.
    """
    ranks = next(m.shard.ranks for m in model.modules() if isinstance(m, Sharded))
    mine: BaseException | None = None
    try:
        with _whole(model):
            if ranks.rank == 0:
                save()
    except FailedElsewhere:
        pass
    except BaseException as error:
        mine = error
    said: list[str | None] = [None] * ranks.size
    text = None if mine is None else f"{type(mine).__name__}: {mine}"
    dist.all_gather_object(said, text, group=ranks.process_group())
    if mine is not None:
        raise mine
    for rank, problem in enumerate(said):
        if problem is not None:
            raise RuntimeError(f"rank {rank} could not save: {problem}")


@contextmanager
def _whole(model: nn.Module) -> Iterator[None]:
    """Inside, rank 0 has the whole layers, on the CPU; the other ranks have what they had.

    Ranks leave the gathers together, whichever of them fails: see gather_bytes.
    """
    parts: dict[str, nn.Module] = {}
    made: dict[int, nn.Module | None] = {}
    gathered = _Gathered()
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        shard = _shard_of(layer)
        if shard is None:
            continue
        if id(layer) not in made:
            made[id(layer)] = gathered.layer(layer, shard)
        if made[id(layer)] is not None:
            parts[name] = layer
    gathered.check()
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


class _Gathered:
    """The whole layers on rank 0; layers that share a part share the whole."""

    def __init__(self) -> None:
        self._weights: dict[int, nn.Parameter | None] = {}
        self._problem: Exception | None = None  # rank 0's, after a gather and before the next

    def check(self) -> None:
        if self._problem is not None:
            raise self._problem

    def layer(self, layer: Any, shard: Shard) -> nn.Module | None:
        """The whole layer on rank 0; None on the others."""
        key = id(layer) if isinstance(layer, LinearPart) else id(layer.weight)
        if key not in self._weights:
            rows = [shard.n] * shard.ranks.size if not shard.rows else list(shard.sizes)
            whole = self._whole(layer.weight, rows, shard, shard.join)
            frozen = None if whole is None else nn.Parameter(whole, requires_grad=False)
            self._weights[key] = frozen
        weight = self._weights[key]
        bias = getattr(layer, "bias", None)
        if bias is not None and shard.rows:
            bias = self._whole(bias, list(shard.sizes), shard, shard.join)
        order = getattr(layer, "input_order", None)
        if order is not None and not shard.rows:
            order = self._whole(order, list(shard.sizes), shard, torch.cat)
        if weight is None:
            return None
        return self._kept(lambda: _layer(layer, shard, weight, bias, order))

    def _whole(
        self, mine: Tensor, rows: list[int], shard: Shard, join: Callable[[list[Tensor]], Tensor]
    ) -> Tensor | None:
        """join() of every rank's tensor, whose first dimension is rows[rank], on rank 0."""

        def sent() -> Tensor:
            self.check()
            return mine.detach().cpu().contiguous().view(torch.uint8).flatten()

        if mine.dim() == 1:
            row = [mine.element_size()] * len(rows)
        elif shard.rows:
            row = [mine.shape[1]] * len(rows)
        else:
            row = [formats.get(shard.format).row_bytes(count) for count in shard.sizes]
        sizes = tuple(count * size for count, size in zip(rows, row, strict=True))
        parts = gather_bytes(sent, sizes, shard.ranks)
        if parts is None:
            return None
        shapes = [(count,) if mine.dim() == 1 else (count, -1) for count in rows]
        return self._kept(
            lambda: join(
                [p.cpu().view(mine.dtype).view(s) for p, s in zip(parts, shapes, strict=True)]
            )
        )

    def _kept(self, make: Callable[[], _T]) -> _T | None:
        """make(); None where it fails, which the next gather says: the others are on their way."""
        try:
            return make()
        except Exception as error:
            self._problem = self._problem or error
            return None


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
    return new.train(layer.training)


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
