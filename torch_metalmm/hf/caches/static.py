"""The layer of a PackedCache of fixed shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layers import PackedLayer, Room
from .slots import PackedEntries
from .transaction import advanced


class StaticPackedLayer(PackedLayer):  # type: ignore[no-untyped-call]
    """A layer of so many slots from the start, for graphs: its length is a tensor.

    All entries of a sliding window are kept; the mask has the window.
    """

    is_compileable = True
    last_and_length: Tensor

    def __init__(self, slots: int, format: str | None = None, is_sliding: bool = False) -> None:
        super().__init__(format)
        self.leads = False
        self.slot_count, self.is_sliding = slots, is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Zeros: attention functions that see the empty slots multiply them by 0.
        self.keys, self.values = (
            self._empty(t.shape, self.slot_count, which).zero_()
            for which, t in enumerate((key_states, value_states))
        )
        # The layer that made the length of its device is the one that crops and resets it.
        earlier = self.last_and_length if self.leads else None
        self.last_and_length, is_new = self.transaction.length_on(self.device)
        self.leads = is_new or self.last_and_length is earlier
        if not torch.compiler.is_compiling():
            for t in (self.keys, self.values, self.last_and_length):
                torch._dynamo.mark_static_address(t)

    @property
    def length(self) -> Tensor:
        return self.last_and_length[1]

    def _has_entries(self) -> bool:
        return int(self.length) > self.transaction.advanced.get(self.device, (0,))[0]

    def _advance(self, count: int) -> Tensor:
        """The slots of `count` entries more, of which one layer makes room."""
        if not torch.compiler.is_compiling():
            return self.transaction.advance(self.device, count)
        if self.leads:
            return advanced(self.last_and_length, count)
        if count == 1:
            return self.last_and_length[:1]
        return torch.arange(count, device=self.device) + (self.length - count)

    def room(self, count: int, is_masked: bool = False) -> Room:
        slots, keys, values = self._advance(count), self.keys, self.values
        return Room(self.formats, keys, values, slots, keys, values, self.length)

    def _fit(self, count: int) -> None:
        pass  # _check_held did

    def hold(self, *args: Any) -> None:
        super().hold(*args)
        self._set_length(torch.tensor(self.end, device=self.device))
        self.end = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the entries; all entries, of which the mask hides those that nobody wrote."""
        self.transaction.begin(self)
        self.prepare(key_states, value_states)
        self._append(key_states, value_states, self._advance(key_states.shape[2]))
        return self.seen(key_states.shape[2])

    def seen(self, count: int) -> tuple[Any, Any]:
        return self._entries(self.keys, 0, 0), self._entries(self.values, 0, 1)

    def _entries(self, entries: Tensor, first: int, which: int) -> Any:
        packed = PackedEntries(
            entries, self.formats[which], self.dims[which], self.dtype, self.length
        )
        return packed if self.returns_packed else packed.decoded()

    def held(self) -> tuple[int, Tensor, Tensor] | None:
        self.transaction.settle()
        if not self.is_initialized:
            return None
        if (end := int(self.length)) == 0:
            return None
        return 0, self.keys[:, :, :end], self.values[:, :, :end]

    def _check_held(self, base: int, count: int) -> None:
        super()._check_held(base, count)
        if count > self.slot_count:
            raise ValueError(f"length: {count}; the cache has {self.slot_count} slots")

    def position(self) -> int:
        return 0  # for every layer: the device alone has the position

    def rewind(self, position: int) -> None:
        pass  # the transaction has the length

    def get_seq_length(self) -> Any:
        if not self.is_initialized:
            return 0
        if torch.compiler.is_compiling() or self.device not in self.transaction.advanced:
            return self.length
        counts = self.before is not None and not self.transaction.is_open()
        return self.length if counts else self.length - self.transaction.advanced[self.device][0]

    def get_max_length(self) -> int:
        return self.slot_count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slot_count, 0

    def reset(self) -> None:
        self.transaction.forget()
        if self.is_initialized:
            self._set_length(self.length - self.length)

    def _set_length(self, length: Tensor) -> None:
        if self.leads:
            self.last_and_length.copy_(torch.stack((length - 1, length)))

    def _shorten(self, count: int) -> None:
        if self.is_initialized:
            self._set_length((self.length - count).clamp(min=0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.transaction.settle()
        if self.is_initialized:
            if len(beam_idx) != len(self.keys):
                raise ValueError(
                    f"reorder_cache: {len(beam_idx)} sequences; a cache of slots keeps its "
                    f"{len(self.keys)}"
                )
            for entries in (self.keys, self.values):
                entries.copy_(entries.index_select(0, beam_idx.to(entries.device)))
