"""Results that wait for the numbers that their caller applies to them, to be one op with these.

A model multiplies what its embedding gives by a number, or normalises it, or caps what its head
gives by a tanh, in a forward of its own that nothing replaces. So the module gives that forward a
tensor without values, from which those functions make another such tensor, and the last of them,
which fuse_ has seen, the result. Any other function, also one by another number, is given the
module's own result, as is any other caller of the module.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .activations import of_call
from .embedding import QuantEmbedding
from .linear import QuantLinear
from .stand_in import StandIn

_embedding = torch.ops.metalmm.embedding.default
_gemm = torch.ops.metalmm.gemm.default
_rms_norm = torch.ops.metalmm.rms_norm.default

Step = tuple[str, float]  # a function, and its number
Caller = tuple[str, str, int]  # a function: its module, its name, and the line where it begins
_NAMES = {"mul": "mul", "__rmul__": "mul", "div": "div", "__truediv__": "div", "tanh": "tanh"}
_FUNCTIONS: dict[str, Any] = {
    "mul": torch.mul,
    "div": torch.div,
    "tanh": lambda y, _: y.tanh(),
    "norm": lambda y, eps: _rms_norm(y, None, eps),
}
_PART = 2**22  # values of a table that are decoded at a time
# Facts that a tensor without values says of itself.
_SAID = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "requires_grad")
) | {Tensor.size, Tensor.dim, Tensor.is_floating_point}


class Waiting(Tensor):
    """The result of `maker` for `x`, and of `steps` behind it, which is not computed yet."""

    maker: Awaiting
    x: Tensor
    steps: tuple[Step, ...]
    known: Tensor | None

    @staticmethod
    def of(
        maker: Awaiting, x: Tensor, shape: Sequence[int], dtype: torch.dtype, *steps: Step
    ) -> Waiting:
        out: Any = Tensor._make_wrapper_subclass(Waiting, shape, dtype=dtype, device=x.device)
        out.maker, out.x, out.steps, out.known = maker, x, steps, None
        if maker.steps is None:
            maker.last = out
        return out

    def computed(self) -> Tensor:
        """The values, as torch has them."""
        if self.known is None:
            y = self.maker.original(self.x)
            for name, number in self.steps:
                y = _FUNCTIONS[name](y, number)
            self.known = y
        return self.known

    def after(self, step: Step) -> Tensor | None:
        """The result of the function for this; None: the model was not seen to call it here."""
        steps, seen = (*self.steps, step), self.maker.steps
        if self.known is not None or (seen is not None and seen[: len(steps)] != steps):
            return None
        if steps == seen:
            return self.maker.made(self.x)
        return Waiting.of(self.maker, self.x, self.shape, self.dtype, *steps)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _SAID and args[0].known is None:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        step = None if kwargs else _step(function, *args)
        if step is not None and (after := args[0].after(step)) is not None:
            return after
        return cls.__torch_dispatch__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Waiting, Waiting.computed, (args, kwargs or {}))
        return function(*args, **kwargs)


def _step(function: Any, *args: Any) -> Step | None:
    """The function, of a Waiting and of no other tensor; of norms those without a weight."""
    if function is _rms_norm:
        alone = isinstance(args[0], Waiting) and all(t is None for t in (args[1], *args[4:]))
        return ("norm", args[2]) if alone else None
    name = _NAMES.get(getattr(function, "__name__", ""))
    if name is None or not isinstance(args[0], Waiting) or len(args) != 2 - (name == "tanh"):
        return None
    number = args[1] if len(args) > 1 else 1.0
    return (name, float(number)) if type(number) in (int, float) else None


class Awaiting(StandIn):
    """The forward of a packed embedding, or of an output head, whose result waits for `steps`.

    The module's own computes where torch.compile traces, where a gradient is recorded, under
    autocast, where a head has more than its product, or rounds what it reads, and for callers but
    `reader`: what they do with x, the weights and torch's modes before they read the result is
    unknown. steps None: any are waited for, `last` is what came of them, and `reader` who called.
    """

    def __init__(self, module: QuantEmbedding | QuantLinear) -> None:
        super().__init__(module)
        self.steps: tuple[Step, ...] | None = None
        self.last: Waiting | None = None
        self.reader: Caller | None = None
        self.eps: float | None = None
        self._scale: Tensor | None = None
        self._of: tuple[Tensor | None, int] = None, 0  # the table that it is of, and its version

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        is_table = isinstance(module, QuantEmbedding)
        own = (
            torch.compiler.is_compiling()
            or torch._C._is_any_autocast_enabled()
            or (torch.is_grad_enabled() and x.requires_grad)
            or (module.embed_scale is not None if is_table else not _is_product(module, x))
        )
        if own or not self._is_read_by(caller()):
            return self.original(x)
        if is_table:
            return Waiting.of(self, x, (*x.shape, module.embedding_dim), module.dtype)
        return Waiting.of(self, x, (*x.shape[:-1], module.out_features), x.dtype)

    def _is_read_by(self, function: Caller) -> bool:
        if self.steps is None:
            self.reader = function
        return self.reader == function

    def expect(self, steps: tuple[Step, ...]) -> None:
        """Wait for these steps alone.

        ValueError: no op computes them with the module.
        """
        names, is_table = [name for name, _ in steps], isinstance(self.module, QuantEmbedding)
        if names.count("tanh") > 1 - is_table or "norm" in names[: len(names) - is_table]:
            allowed = "products, of a head with one tanh, of a table before a norm"
            raise ValueError(f"steps: {steps}; allowed: {allowed}")
        factors = [1.0]  # before a tanh, and behind
        for name, number in steps:
            if name == "tanh":
                factors.append(1.0)
            elif name != "norm":
                factors[-1] *= number if name == "mul" else 1 / number
        self.steps, self.last = steps, None
        self.factor, self.cap = math.prod(factors), factors[1] if factors[1:] else 0.0
        self.eps = steps[-1][1] if "norm" in names else None
        self._scale = None

    def made(self, x: Tensor) -> Tensor:
        """All steps of the module's result for x, in one op."""
        module, weight = self.module, self.module._parameters["weight"]
        if isinstance(module, QuantEmbedding):
            given = (x, weight, module.format, module.embedding_dim)
            y: Tensor = _embedding(*given, dtype=module.dtype, scale=self._scale_of(weight))
            return y
        rows = x.reshape(-1, x.shape[-1])
        y = _gemm(rows, weight, module.format, None, self.factor, softcap=self.cap)
        return y.view(*x.shape[:-1], module.out_features)

    def _scale_of(self, weight: Tensor) -> Tensor:
        """The factor of the op's rows: one number, or where a norm follows a number for each row
        of the table as it is now."""
        version = 0 if weight.is_inference() or self.eps is None else weight._version
        scale, (of, seen) = self._scale, self._of
        if scale is None or scale.device != weight.device or of is not weight or seen != version:
            with torch.inference_mode(False), torch.no_grad():
                scale = self._scale = self._numbers(weight.device)
            self._of = weight, version
        return scale

    def _numbers(self, device: torch.device) -> Tensor:
        if self.eps is None:
            return torch.tensor(self.factor, dtype=torch.float32, device=device)
        module = self.module
        ids = torch.arange(module.num_embeddings, device=device)
        parts = torch.split(ids, max(1, _PART // module.embedding_dim))
        rows = (self.original(part).float() * self.factor for part in parts)
        return self.factor * (torch.cat([r.square().mean(-1) for r in rows]) + self.eps).rsqrt()


def caller() -> Caller:
    """Who called the module whose forward calls this. A name, since code cannot be pickled."""
    frame: Any = sys._getframe(2)
    while frame.f_globals.get("__name__") == "torch.nn.modules.module":
        frame = frame.f_back
    code = frame.f_code
    return frame.f_globals.get("__name__", ""), code.co_name, code.co_firstlineno


def _is_product(head: QuantLinear, x: Tensor) -> bool:
    """Whether the head's result is x W^T."""
    plain = head._parameters["bias"] is None and head._buffers["input_order"] is None
    return plain and not of_call(head.activations, x)
