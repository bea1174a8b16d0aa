"""Embeddings and output heads whose results the model multiplies by a number: one op for both.

Code of the model multiplies, which nothing replaces. So the result is a tensor that waits for the
number, at the one place of that code where fuse_ saw that a number comes next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map

from ..formats import DTYPES
from .embedding import QuantEmbedding
from .linear import QuantLinear
from .settings import Settings
from .stand_in import StandIn

_embedding = torch.ops.metalmm.embedding.default
_gemm = torch.ops.metalmm.gemm.default
_CALLS = vars(torch_module)  # the names of the file that calls forwards
_KNOWN = [vars(torch._C.TensorBase)[n].__get__ for n in ("shape", "dtype", "device")]  # unread
Site = tuple[str, str, int, int]  # of a call: file, name and line of the function, instruction


class Waiting(Tensor):
    """A result that the first op to read it computes: `times` the number that this op multiplies it
    by, or `plain`, as it is."""

    times: Callable[[float], Tensor]
    plain: Callable[[], Tensor]
    value: Tensor | None  # the plain one, once it was read

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.mul, Tensor.div) and not kwargs:
            x, number = args
            if type(x) is Waiting and type(number) in (int, float) and number and x.value is None:
                return x.times(number if function is Tensor.mul else 1 / number)
        if function in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args)
        return function(*tree_map(_read, args), **tree_map(_read, kwargs or {}))

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def _read(value: Any) -> Any:
    if type(value) is not Waiting:
        return value
    if value.value is None:
        value.value = value.plain()
    return value.value


class Scaled(StandIn):
    """The forward of an embedding or of a linear layer, whose result waits where `site` calls it.

    At other places, where gradients are recorded, under autocast, and where the module is another
    than fuse_ saw, the class's own computes at once.
    """

    def __init__(self, module: Any, site: Site | None) -> None:
        super().__init__(module)
        self.site, self._settings = site, Settings([module])
        self._scale: tuple[float, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._fits(x):
            return self.original(x)
        site = site_of(sys._getframe(1))
        if not self._waits(site) or torch.is_autocast_enabled(x.device.type):
            return self.original(x)
        module = self.module
        sizes, dtype = (*x.shape[:-1], module.weight.shape[0]), x.dtype
        if type(module) is QuantEmbedding:
            sizes, dtype = (*x.shape, module.embedding_dim), module.dtype
        made = Tensor._make_wrapper_subclass(Waiting, sizes, dtype=dtype, device=x.device)
        made.times, made.plain = partial(self._times, site, x), partial(self.original, x)
        made.value = None
        return made

    def _waits(self, site: Site) -> bool:
        return site == self.site

    def _fits(self, x: Tensor) -> bool:
        """Whether an op computes the module's result times a number."""
        module = self.module
        if not self._settings.same():
            return False
        if type(module) is QuantEmbedding:
            return module.embed_scale is None
        exact = module.activations is None or not x.is_cpu
        plain = module._parameters["bias"] is None and module._buffers["input_order"] is None
        return exact and plain and x.dtype in DTYPES.values()

    def _times(self, site: Site, x: Tensor, number: float) -> Tensor:
        module = self.module
        weight, format = module._parameters["weight"], module.format
        if type(module) is QuantLinear:
            y: Tensor = _gemm(x.reshape(-1, x.shape[-1]), weight, format, None, number)
            return y.view(*x.shape[:-1], -1)
        if self._scale is None or self._scale[0] != number or self._scale[1].device != x.device:
            scale = torch.tensor(number, dtype=torch.float32, device=x.device)
            self._scale = number, scale
        options = {"dtype": module.dtype, "scale": self._scale[1]}
        y = _embedding(x, weight, format, module.embedding_dim, **options)
        return y


def site_of(frame: FrameType | None) -> Site:
    """The call of a module in the frames above its forward."""
    while frame is not None and frame.f_globals is _CALLS:
        frame = frame.f_back
    if frame is None:
        return "", "", 0, 0
    code = frame.f_code
    return code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti
