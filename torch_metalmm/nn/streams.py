"""Several streams through a layer that computes with the first of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .heads import TRACED, Ops, normed, projection
from .recipe import Streams

_exact = TRACED[None]  # ops on coefficients, whose rows are shorter than blocks


def through(
    s: Streams, ops: Ops, x: Tensor, branches: Sequence[Callable[[Tensor], Tensor]]
) -> Tensor:
    """The streams behind a layer that is given streams x."""
    x = predicted(s, ops, x)
    *branches, last = branches
    y = x[0]
    for branch in branches:
        y = branch(y)
    x = corrected(s, ops, x, y)
    x[1:].add_(last(read(s, x)))
    return x


def predicted(s: Streams, ops: Ops, x: Tensor) -> Tensor:
    """The streams before the branches."""
    n, m = x.shape[0], _mixed(s, ops, x[0])
    own = s.predict
    coefficients = normed(_exact, None, m, own._parameters["weight"], own.format)
    rows = x.reshape(n, -1, x.shape[-1]).transpose(0, 1)
    y = torch.baddbmm(rows, coefficients.view(-1, n, n), rows)
    return y.transpose(0, 1).view(x.shape)


def corrected(s: Streams, ops: Ops, x: Tensor, y: Tensor) -> Tensor:
    """The streams behind branches that made y of the first."""
    m, own = _mixed(s, ops, y), s.correct
    _, ones = _vectors(s, m)
    coefficients = normed(_exact, None, m, own._parameters["weight"], own.format, ones)
    return torch.addcmul(x, y - x[0], coefficients.movedim(-1, 0)[..., None])


def read(s: Streams, x: Tensor) -> Tensor:
    """The input of the last branch."""
    if s.vector is None:
        return x[0]
    vector: Any = s.vector[0]._parameters[s.vector[1]]
    return (x[0].to(vector.dtype) * vector).to(x.dtype)


def _vectors(s: Streams, x: Tensor) -> Sequence[Tensor | None]:
    """Factors of the router's results, and the bias of `correct`."""
    return s.factors_of(x, (s.router, s.router))


def _mixed(s: Streams, ops: Ops, h: Tensor) -> Tensor:
    factors, _ = _vectors(s, h)
    return torch.tanh(projection(ops, s.norm, h, s.router, factors))
