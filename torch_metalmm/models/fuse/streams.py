"""The mixing of a layer's streams, before and behind the branches, which read the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...nn.fused import plain
from ...nn.heads import TRACED
from ...nn.recipe import Norm, Streams
from ...nn.streams import corrected, predicted, read
from .norms import as_norm
from .observe import Call
from .projections import near
from .runs import Unknown

_ops = TRACED[None]


@torch.no_grad()
def streams_of(layer: nn.Module, calls: list[Call], x: Tensor) -> tuple[Streams, Tensor]:
    """(the streams of a layer that is given x, the first of them before the branches).

    The calls of modules that make these are taken off the list.
    """
    norm, router, predict = _mixing(calls, x.shape[-1])
    n, h = len(x), calls[0].inputs[0]
    if (router.out_features, predict.out_features) != (n, n * n):
        raise Unknown("coefficients of another number of streams")
    ways = []
    for scale in (1.0, *(float(b) for b in layer.buffers() if b.numel() == 1)):
        factors = torch.tensor([scale] * n + [1.0] * n, dtype=torch.float32, device="cpu")
        streams = Streams(norm=norm, router=router, predict=predict, factors=factors)
        ways.append((streams, predicted(streams, _ops, x)[0]))
    return _nearest(ways, h), h


@torch.no_grad()
def ends_of(streams: Streams, layer: nn.Module, calls: list[Call], x: Tensor) -> Tensor:
    """The input of the last branch, made of the streams that the layer makes of x.

    The calls of modules that make it are taken off the list; what they do is set in `streams`.
    """
    y = calls[0].inputs[0]
    _, _, streams.correct = _mixing(calls, x.shape[-1])
    h = calls[0].inputs[0]
    first = corrected(streams, _ops, predicted(streams, _ops, x), y)
    owned = ((m, name) for m in layer.modules() for name, p in m._parameters.items() if _is(p, h))
    ways = []
    for streams.vector in (None, *owned):
        ways.append((streams.vector, read(streams, first)))
    streams.vector = _nearest(ways, h)
    return h


def _nearest(ways: list[tuple[Any, Tensor]], wanted: Tensor) -> Any:
    """The way whose result is nearest to the wanted one. Unknown: no result is near."""
    found, result = min(ways, key=lambda way: float((way[1] - wanted).norm()))
    if not near(result, wanted):
        raise Unknown("streams that are mixed in another way")
    return found


def _is(parameter: Tensor | None, h: Tensor) -> bool:
    """Whether the parameter has a number for each column of h."""
    return parameter is not None and parameter.shape == h.shape[-1:]


def _mixing(calls: list[Call], size: int) -> tuple[Norm, Any, Any]:
    """The norm, the router and the layer of its results that are called next."""
    if len(calls) < 4:
        raise Unknown("nothing that mixes streams")
    first, router, linear = (calls.pop(0).module for _ in range(3))
    norm = as_norm(first, size)
    if norm is None or not all(plain(m) and m.bias is None for m in (router, linear)):
        raise Unknown("streams that are mixed by other modules")
    return norm, router, linear
