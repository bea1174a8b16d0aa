"""Which embeddings and output heads the model multiplies the results of: found by running it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...nn import QuantEmbedding, QuantLinear
from ...nn.fused import unhooked
from ...nn.scaled import Scaled, Site
from .runs import rounding

_ROUNDINGS = 4  # of the result, of the number, of one by the other, and one more


@contextmanager
def scales_found(model: nn.Module) -> Iterator[None]:
    """What runs the model inside says where a number comes next, and whether our op agrees."""
    lookers = [_Looking(module) for module in _ends(model)]
    for looker in lookers:
        looker.attach()
    try:
        yield
    finally:
        for looker in lookers:
            looker.detach()
            if looker.site is not None:
                Scaled(looker.module, looker.site).attach()


def _ends(model: Any) -> list[Any]:
    """The packed embedding and output head of the model."""
    found = []
    for find in (model.get_input_embeddings, model.get_output_embeddings):
        try:
            module = find()
        except Exception:  # a model that has none
            continue
        if type(module) in (QuantEmbedding, QuantLinear) and unhooked(module):
            found.append(module)
    return found


class _Looking(Scaled):
    """Lets the result wait wherever it is made; site: where a number came next."""

    def __init__(self, module: Any) -> None:
        super().__init__(module, None)

    def _waits(self, site: Site) -> bool:
        return True

    def _times(self, site: Site, x: Tensor, number: float) -> Tensor:
        own = self.original(x) * number
        error = (super()._times(site, x, number) - own).float().norm()
        k = x.shape[-1] if type(self.module) is QuantLinear else 1
        if error <= _ROUNDINGS * rounding(own, k) * own.float().norm():
            self.site = site
        return own
