"""Dense formats: the values themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import DTYPES, Format
from ._bits import as_bytes


class Dense(Format):
    """w stored as `dtype`, rounded to nearest even; a value too large for it becomes Inf."""

    block_values = 1

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = self.exact = dtype
        self.block_bytes = dtype.itemsize

    def _encode_rows(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        return as_bytes(x.to(self.dtype))

    def _decode_rows(self, packed: Tensor, k: int) -> Tensor:
        data = packed.clone(memory_format=torch.contiguous_format)
        return data.view(self.dtype).float()


DENSE = tuple(Dense(name, dtype) for name, dtype in DTYPES.items())
