"""The layer of a PackedCache of fixed shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layers import PackedLayer, Room
from .rows import PackedRows, lasting


class StaticPackedLayer(PackedLayer):  # type: ignore[no-untyped-call]
    """A layer of so many slots from the start, for graphs: its length is a tensor.

    Of a sliding window all rows are kept; the mask has the window.
    """

    is_compileable = True

    def __init__(self, slots: int, format: str | None = None, is_sliding: bool = False) -> None:
        super().__init__(format)
        self.slot_count, self.is_sliding = slots, is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        # Zeros: attention functions that see the empty slots multiply them by 0.
        self.keys, self.values = (
            self._empty(t.shape, self.slot_count).zero_() for t in (key_states, value_states)
        )
        # The last slot that has a row, and the number of rows: a token's slot and length are what
        # one addition leaves.
        with lasting():
            self.last_and_length = torch.arange(-1, 1, device=self.device)
        if not torch.compiler.is_compiling():
            for t in (self.keys, self.values, self.last_and_length):
                torch._dynamo.mark_static_address(t)

    @property
    def length(self) -> Tensor:
        return self.last_and_length[1]

    def _advance(self, count: int) -> Tensor:
        """The slots of `count` rows more."""
        if count == 1:
            return self.last_and_length.add_(1)[:1]
        slots = torch.arange(count, device=self.device) + self.length
        self.last_and_length.add_(count)
        return slots

    def room(self, count: int) -> Room:
        slots, keys, values = self._advance(count), self.keys, self.values
        return self.format, keys, values, slots, keys, values, self.length

    def _fit(self, count: int) -> None:
        pass  # _check_held did

    def hold(self, *args: Any) -> None:
        super().hold(*args)
        self._advance(self.end)
        self.end = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the rows; all rows, of which the mask hides those that nobody wrote."""
        self.prepare(key_states, value_states)
        self._append(key_states, value_states, self._advance(key_states.shape[2]))
        return self._rows(self.keys, 0, 0), self._rows(self.values, 0, 1)

    def _rows(self, rows: Tensor, first: int, which: int) -> Any:
        assert self.format is not None
        packed = PackedRows(rows, self.format, self.dims[which], self.dtype, self.length)
        return packed if self.returns_packed else packed.decoded()

    def held(self) -> tuple[int, Tensor, Tensor] | None:
        if not self.is_initialized:
            return None
        if (end := int(self.length)) == 0:
            return None
        return 0, self.keys[:, :, :end], self.values[:, :, :end]

    def _check_held(self, base: int, count: int) -> None:
        super()._check_held(base, count)
        if count > self.slot_count:
            raise ValueError(f"length: {count}; the cache has {self.slot_count} slots")

    def get_seq_length(self) -> Any:
        return self.length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.slot_count

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slot_count, 0

    def reset(self) -> None:
        if self.is_initialized:
            self._set_length(self.length - self.length)

    def _set_length(self, length: Tensor) -> None:
        self.last_and_length.copy_(torch.stack((length - 1, length)))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove}; must be negative, the tokens to remove")
        if self.is_initialized:
            self._set_length((self.length + tokens_to_remove).clamp(min=0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized:
            if len(beam_idx) != len(self.keys):
                raise ValueError(
                    f"reorder_cache: {len(beam_idx)} sequences; a cache of slots keeps its "
                    f"{len(self.keys)}"
                )
            for rows in (self.keys, self.values):
                rows.copy_(rows.index_select(0, beam_idx.to(rows.device)))
