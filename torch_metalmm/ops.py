"""torch.ops.metalmm: importing this module registers the ops and their fake implementations.

The kernels, autograd and autocast are native, and so are the checks of a fake implementation: it
returns what the op would, same shape, dtype and strides, same errors. A fake implementation also
runs for meta tensors. A call with some arguments on meta is an error, not a result without data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from . import _C

_native: Any = _C  # the import registers the ops; mypy does not see into the module

PROBES = ("add", "sub", "mul", "div", "dot")
# The ops whose result has a dtype of its own, not that of the first argument.
_DECODING = ("dequantize", "embedding")


def _register_fake(op: str) -> None:
    """The fake implementation of an op: tensors of the sizes that csrc/ops/shapes.cpp computes."""
    shape_of = getattr(torch.ops.metalmm, f"_{op}_shape").default

    def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...] | None:
        with no_dispatch():  # the checks see the fake tensors themselves, with their devices
            shape = shape_of(*args, **kwargs)
        if shape is None:
            return None
        first: Tensor = args[0]
        if isinstance(shape, tuple):
            return tuple(first.new_empty(each) for each in shape)
        if op in _DECODING:
            return first.new_empty(shape, dtype=kwargs.get("dtype") or torch.float32)
        return first.new_empty(shape, dtype=torch.uint8 if op == "quantize" else first.dtype)

    torch.library.register_fake(f"metalmm::{op}", fake)


for _op in _native.TORCH_OPS:
    _register_fake(_op)
