"""Dtypes, shapes and sizes that the tensors of a layer must have; an error names the tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)  # others (float8) have scales of their own


def check(
    tensors: Mapping[str, Tensor],
    name: str,
    dtypes: torch.dtype | Sequence[torch.dtype] | None,
    shape: Sequence[int | None],
) -> Tensor:
    """tensors[name] if it has one of the dtypes (None: f16, bf16, f32) and this shape.

    A size of None may be any. ValueError: it is missing, or is something else.
    """
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(f"{name} is missing")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes or _FLOATS
    sizes = len(shape) == tensor.dim() and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in allowed or not sizes:
        kinds = " or ".join(map(str, allowed))
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be {kinds} [{wanted}], got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor


def integer(what: str, whole: int, part: int) -> int:
    """whole / part. ValueError: it is no positive integer."""
    if part <= 0 or whole <= 0 or whole % part:
        raise ValueError(f"{what} must be a positive integer, got {whole} / {part}")
    return whole // part
