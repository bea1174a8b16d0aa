"""Norms of transformers models in one op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..formats import DTYPES
from .recipe import Norm
from .settings import Settings
from .stand_in import StandIn

_rms_norm = torch.ops.metalmm.rms_norm.default


class FusedNorm(StandIn):
    """The forward of an RMS norm; with centred, of x less its mean.

    The class's own forward computes where a gradient is recorded, under autocast, where x has not
    the weight's dtype, or one that the op does not take, and once eps or that forward is another.
    """

    def __init__(self, norm: Norm, centred: bool = False) -> None:
        super().__init__(norm.module)
        self.norm, self._settings, self.centred = norm, Settings([norm.module]), centred

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = self.norm
        weight = norm.module._parameters.get(norm.name)
        own = (
            args
            or kwargs
            or x.dtype not in DTYPES.values()
            or (norm.name and (weight is None or weight.dtype != x.dtype))
            or not self._settings.same()
            or torch.is_autocast_enabled(x.device.type)
            or (
                torch.is_grad_enabled()
                and (x.requires_grad or (weight is not None and weight.requires_grad))
            )
        )
        if own:
            return self.original(x, *args, **kwargs)
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], weight, None, norm.eps)
        return _rms_norm(x, weight, norm.eps, norm.offset, None)
