"""A router of experts in one op: the forward that fuse_ gives to routers it understands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from .fused import unhooked
from .packed import Packed
from .settings import Settings
from .stand_in import StandIn

_route = torch.ops.metalmm.route.default


@dataclass
class Router:
    """A module that computes of x [T, K]: (anything, weights [T, top_k], ids [T, top_k]).

    weight, bias, choice_bias: names of tensors of the module or its children, None for none;
    choice_bias "" is the second argument. The weight may be a packed layer's. options: of
    torch.ops.metalmm.route. keeps_dtype: weights have that of x, not f32.
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
        self, module: nn.Module, x: Tensor, *given: Tensor, **shared: Any
    ) -> tuple[Tensor, Tensor]:
        """The routes, weights in f32. shared: the op's arguments for a shared expert."""
        owner, weight = tensor_of(module, self.weight)
        bias = None if self.bias is None else tensor_of(module, self.bias)[1]
        choice: Tensor | None = None
        if self.choice_bias is not None:
            choice = tensor_of(module, self.choice_bias)[1] if self.choice_bias else given[0]
            choice = choice.flatten()
        form = format_of(owner, weight)
        return _route(
            x, self.top_k, weight, bias, form, choice_bias=choice, **shared, **self.options
        )


def tensor_of(module: nn.Module, name: str) -> tuple[nn.Module, Any]:
    """(the module or its child that has the tensor, the parameter or buffer itself)."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    own = owner._parameters if last in owner._parameters else owner._buffers
    return owner, own[last]


def format_of(owner: nn.Module, weight: Tensor) -> str:
    """The format of a weight of this module: of a dense one that of its dtype."""
    return owner.format if isinstance(owner, Packed) else formats.DTYPE_NAMES[weight.dtype]


def _trained(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


class FusedRouter(StandIn):
    """The forward of a router: (None, weights, ids).

    None stands for the logits, which nothing but a hook reads. The class's own forward computes in
    training, where a gradient is recorded, under autocast, where the module has a hook, and where
    its numbers are not what fuse_ saw.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router.module)
        self.router, self._settings = router, Settings(router.module.modules())
        self._parts = [*router.module.modules()]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        own = (
            kwargs
            or module.training
            or module._forward_hooks
            or (module._modules and not self._same_parts())
            or not self._settings.same()
            or len(args) != (self.router.choice_bias == "")
            or torch.is_autocast_enabled(x.device.type)
            or (torch.is_grad_enabled() and _trained(x, *args, *module.parameters()))
        )
        if own:
            return self.original(x, *args, **kwargs)
        return None, *self.router.route(module, x.reshape(-1, x.shape[-1]), *args)

    def _same_parts(self) -> bool:
        """Whether the children are those that fuse_ saw, and nothing else is called with them."""
        now = [*self.module.modules()]
        return now == self._parts and all(map(unhooked, now[1:]))
