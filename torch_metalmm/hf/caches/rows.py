"""Packed rows of a cache in the place of the tensor that they decode to; slots as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ... import formats

ops = torch.ops.metalmm

_OWN = ("rows", "format", "dtype", "length", "shape", "device")
# Up to so many queries the op's kernels read a length of the device, which the layers share. More
# may be torch's, which has no such argument: they get slots that all hold rows.
FEW_QUERIES = 16
_MOST_HELD = 8  # kinds of layers, times two lengths of each


def lasting() -> AbstractContextManager[Any]:
    """Tensors made in here may be written in any mode, whichever mode they are made in."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


class Slots:
    """Slots and lengths as tensors, made once for all layers of a cache that ask for the same.

    While a step is recorded (hf/replay.py) those of its rows are `fixed`: memory that stays, which
    each replayed step fills.
    """

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Tensor, Tensor]] = {}
        self.fixed: Fixed | None = None

    def of(self, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(the slots [count] from `first` on; the length of a cache that ends behind these)."""
        if torch.compiler.is_compiling():  # a graph that reads _held is one for one token
            return self._made(first, count, device)
        key = (first, count, device)
        if self.fixed is not None and self.fixed.key == key:
            return self.fixed.slots, self.fixed.length
        found = self._held.get(key)
        if found is None:
            found = self._made(first, count, device)
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            self._held[key] = found
        return found

    def length(self, rows: Tensor) -> Tensor:
        """That of rows [B, kv_heads, T, row] which are all filled."""
        return self.of(rows.shape[2], 0, rows.device)[1]

    @staticmethod
    def _made(first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        both = torch.arange(first, first + count + 1, device=device)
        return both[:count], both[count]

    def __getstate__(self) -> dict[str, Any]:
        return {"_held": {}, "fixed": None}


class Fixed:
    """The slots [count] of a step's rows, and the length behind them, in memory that stays."""

    def __init__(self, count: int, device: torch.device) -> None:
        with lasting():
            self._both = torch.arange(count + 1, device=device)
            self.slots, self.length = self._both[:count], self._both[count]
            self.position = self._both[0]
        self.first, self.count, self.device = 0, count, device

    @property
    def key(self) -> Any:
        return self.first, self.count, self.device

    def fill(self, first: int) -> None:
        """The rows begin in this slot."""
        if first != self.first:
            self._both.add_(first - self.first)
            self.first = first


class PackedRows:
    """Rows [B, kv_heads, T, row] of a format in the place of a tensor [B, kv_heads, T, D].

    Where `length` is given, an int64 tensor, the rows from there on are empty; without it none is.
    """

    def __init__(
        self,
        rows: Tensor,
        format: str,
        dim: int,
        dtype: torch.dtype,
        length: Tensor | None = None,
    ) -> None:
        self.rows, self.format, self.dtype, self.length = rows, format, dtype, length
        self.shape = torch.Size((*rows.shape[:-1], dim))
        self.device = rows.device

    def decoded(self) -> Tensor:
        """The rows as a tensor of the model's dtype."""
        if self.format in formats.DTYPES:
            return self.rows.to(self.dtype)
        flat = self.rows.reshape(-1, self.rows.shape[-1])
        values: Tensor = ops.dequantize(flat, self.format, self.shape[-1], dtype=self.dtype)
        return values.view(self.shape)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def plain(a: Any) -> Any:
            return a.decoded() if isinstance(a, PackedRows) else a

        args, kwargs = _pytree.tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)  # of an object that is being copied
        return getattr(self.decoded(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.decoded()[index]
