"""Packed entries of a cache in the place of the tensor that they decode to; slots as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ... import formats
from . import format_of

ops = torch.ops.metalmm

_OWN = ("entries", "format", "dtype", "length", "shape", "device")
# Up to so many queries the op's kernels read a length of the device, which the layers share. More
# may be torch's, which has no such argument: they get slots that all hold entries.
FEW_QUERIES = 16
_MOST_HELD = 8  # kinds of layers, times two lengths of each
_FIRST_NUMBERS = 4096


def lasting() -> AbstractContextManager[Any]:
    """Tensors made in here may be written in any mode, whichever mode they are made in."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


class Numbers:
    """0, 1, 2, ... on each device as one tensor, which grows: a part of it takes no launch."""

    def __init__(self) -> None:
        self._all: dict[torch.device, Tensor] = {}

    def part(self, first: int, end: int, device: torch.device) -> Tensor:
        """first, ..., end - 1, int64 [end - first]."""
        found = self._all.get(device)
        if found is None or len(found) < end:
            with lasting():
                found = torch.arange(max(_FIRST_NUMBERS, 2 * end), device=device)
            self._all[device] = found
        return found[first:end]


class Slots:
    """Slots and lengths as tensors, the same for all layers of a cache that ask for the same.

    They are parts of Numbers, of which a token makes none.
    While a step is recorded (hf/replay.py) those of its tokens are `fixed`: memory that stays,
    which each replayed step fills.
    """

    def __init__(self) -> None:
        self._held: dict[Any, tuple[Tensor, Tensor]] = {}
        self._numbers = Numbers()
        self.fixed: Fixed | None = None
        self.expected = 0  # entries for which room is made at once

    def of(
        self, first: int, count: int, device: torch.device, window: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(the slots [count] from `first` on; the length of a cache that ends behind these).

        window: of the layer that asks.
        """
        if torch.compiler.is_compiling():  # a graph that reads _held is one for one token
            both = torch.arange(first, first + count + 1, device=device)
            return both[:count], both[count]
        key = (first, count, device)
        if self.fixed is not None and (fixed := self.fixed.of(key, window)) is not None:
            return fixed
        found = self._held.get(key)
        if found is None:
            both = self._numbers.part(first, first + count + 1, device)
            found = both[:count], both[count]
            if len(self._held) >= _MOST_HELD:
                self._held.clear()
            self._held[key] = found
        return found

    def length(self, entries: Tensor) -> Tensor:
        """The length of entries [B, kv_heads, T, entry] which are all filled."""
        return self.of(entries.shape[2], 0, entries.device)[1]

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_held": {}, "_numbers": Numbers(), "fixed": None}
        return fresh | {"expected": self.expected}


class Fixed:
    """The slots [count] of a step's entries, and the length behind them, in memory that stays.

    Layers of one window have one such pair: their entries move to the front, no others do.
    """

    def __init__(self, count: int, device: torch.device, windows: Iterable[int]) -> None:
        self.count, self.device = count, device
        names = [*windows]
        with lasting():
            numbers = torch.arange(count + 1, device=device).repeat(len(names))
            self._memory = torch.cat([numbers[:1], numbers])
            self.position = self._memory[0]
            slots = self._memory[1:].view(len(names), count + 1)
        self._slots = dict(zip(names, slots, strict=True))
        # The numbers in the tensors; -1 while they are written.
        self.first, self.ends = 0, dict.fromkeys(names, 0)

    def of(self, key: Any, window: int) -> tuple[Tensor, Tensor] | None:
        """(slots, length) of layers of this window, where Slots.of is asked for them."""
        both = self._slots.get(window)
        if both is None or key != (self.ends[window], self.count, self.device):
            return None
        return both[: self.count], both[self.count]

    def fill(self, position: int, ends: dict[int, int]) -> None:
        """The entries begin at this position, and in these slots of the layers of each window."""
        shift, first = position - self.first, self.first
        moves = [end - self.ends[window] for window, end in ends.items()]
        if not shift and not any(moves):
            return
        self.first = -1
        if first >= 0 and all(move == shift for move in moves):
            self._memory.add_(shift)  # one launch for all
        else:
            self.position.fill_(position)
            for window, end in ends.items():
                torch.arange(end, end + self.count + 1, out=self._slots[window])
        self.first, self.ends = position, dict(ends)

    def advance(self) -> None:
        """On the device alone: to the entries of the next step."""
        self._memory.add_(self.count)

    @contextmanager
    def advanced(self, steps: int) -> Iterator[None]:
        """Inside, the tensors advance by so many steps."""
        first, self.first = self.first, -1
        yield
        tokens = steps * self.count
        self.first, self.ends = first + tokens, {w: end + tokens for w, end in self.ends.items()}


class PackedEntries:
    """Entries [B, kv_heads, T, entry] of a format in the place of a tensor [B, kv_heads, T, D].

    Where `length` is given, an int64 tensor, those from there on are empty; without it none is.
    """

    def __init__(
        self,
        entries: Tensor,
        format: str,
        dim: int,
        dtype: torch.dtype,
        length: Tensor | None = None,
    ) -> None:
        self.entries, self.format, self.dtype, self.length = entries, format, dtype, length
        self.shape = torch.Size((*entries.shape[:-1], dim))
        self.device = entries.device

    def decoded(self) -> Tensor:
        """The entries as a tensor of the model's dtype."""
        if self.format in formats.DTYPES:
            return self.entries.to(self.dtype)
        flat = self.entries.reshape(-1, self.entries.shape[-1])
        kind, is_rotated = format_of(self.format)
        dtype = torch.float32 if is_rotated else self.dtype  # what is turned may be larger
        values: Tensor = ops.dequantize(flat, kind.name, self.shape[-1], dtype=dtype)
        values = ops.hadamard(values).to(self.dtype) if is_rotated else values
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
            return a.decoded() if isinstance(a, PackedEntries) else a

        args, kwargs = _pytree.tree_map(plain, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _OWN:
            raise AttributeError(name)  # of an object that is being copied
        return getattr(self.decoded(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.decoded()[index]


class Stored:
    """Keys and values that a layer has written in its room and others share, a pair (k, v).

    The pair is what the cache's update() returns, made where code of a model takes it apart: a
    fused layer reads the room, which is in memory that stays.
    """

    def __init__(self, room: Any, pair: Callable[[], tuple[Any, Any]]) -> None:
        self.room, self._pair = room, pair

    def __iter__(self) -> Iterator[Any]:
        return iter(self._pair())

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self._pair()[index]
