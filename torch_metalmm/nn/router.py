"""A router of experts in one op: the forward that fuse_ gives to routers it understands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from .settings import Settings

_route = torch.ops.metalmm.route.default
_FORMAT = {dtype: name for name, dtype in formats.DTYPES.items()}


@dataclass
class Router:
    """What a module computes of x [T, K]: (anything, weights [T, top_k], ids [T, top_k]).

    weight, bias, choice_bias: names of the module's tensors, None for none; choice_bias "" is the
    second argument. options: of torch.ops.metalmm.route. keeps_dtype: weights have that of x, not
    f32.
    """

    module: nn.Module
    top_k: int
    weight: str
    bias: str | None
    choice_bias: str | None
    options: dict[str, Any]
    keeps_dtype: bool

    def route(self, module: nn.Module, x: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.choose(module, x, *given)
        return weights.to(x.dtype) if self.keeps_dtype else weights, ids

    def choose(
        self, module: nn.Module, x: Tensor, *given: Tensor, shared: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same, weights in f32. shared: as the op has it."""
        own = {**module._parameters, **module._buffers}
        weight: Any = own[self.weight]
        bias = None if self.bias is None else own[self.bias]
        choice = None if self.choice_bias is None else own.get(self.choice_bias, *given)
        form = _FORMAT[weight.dtype]
        made: tuple[Tensor, Tensor] = _route(
            x, self.top_k, weight, bias, form, choice_bias=choice, shared=shared, **self.options
        )
        return made


class FusedRouter:
    """The forward of a router, (None, weights, ids).

    None stands for the logits, which nothing but a hook reads. `forward` is set on the module. The
    class's own computes in training, where a gradient is recorded, under autocast, where the module
    has a hook, and where its numbers are not what fuse_ saw.
    """

    def __init__(self, router: Router) -> None:
        self.router, self._settings = router, Settings([router.module])

    def attach(self) -> None:
        self.router.module.__dict__["forward"] = self.forward

    def detach(self) -> None:
        del self.router.module.__dict__["forward"]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.router.module
        tensors = [x, *args, *module._parameters.values()]
        own = (
            kwargs
            or module.training
            or module._forward_hooks
            or not self._settings.same()
            or len(args) != (self.router.choice_bias == "")
            or torch.is_autocast_enabled(x.device.type)
            or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
        )
        if own:
            return type(module).forward(module, x, *args, **kwargs)
        return None, *self.router.route(module, x.reshape(-1, x.shape[-1]), *args)
