"""The layers of PackedCache: two tensors, keys and values, whose entries are written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ... import formats
from . import format_of
from .slots import FEW_QUERIES, PackedEntries, Slots, lasting
from .transaction import Transaction

ops = torch.ops.metalmm


class Unrecorded(Exception):
    """A step that is being recorded cannot be; it is computed again as any other."""


class Offset(int):
    """The position of a step's first query. Attention knows its slots: it is given no mask."""


class Room(NamedTuple):
    """The place of a step's entries, and the entries that its queries see, as the ops take them."""

    formats: tuple[str, str]  # the keys', the values'
    new_keys: Tensor
    new_values: Tensor
    slots: Tensor  # where the new entries go in new_keys and new_values
    keys: Tensor
    values: Tensor
    length: Tensor | None  # how many slots of keys and values hold entries; None: all
    pages: Tensor | None = None
    window: int = 0


FIRST, STEP = 256, 4096  # slots of a new cache; the most that it grows by
SLACK = 256  # slots of a sliding window beyond those that it needs
DTYPE_NAMES = formats.DTYPE_NAMES


class PackedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of a layer that sees all that was before."""

    is_sliding = False
    is_chunked = False
    is_croppable = True
    has_states = False  # beside its entries
    keys: Any  # a tensor, None before the first entries
    values: Any

    def __init__(self, format: str | None = None) -> None:
        """format: "K/V", or one name of both; None: of the first keys' dtype."""
        super().__init__()  # type: ignore[no-untyped-call]
        names = None if format is None else format.split("/")
        # The formats of keys and of values; None before the first keys.
        self.formats: Any = None if names is None else (names[0], names[-1])
        self.end = 0  # the slots below hold entries
        self.base = 0  # the position of slot 0
        self.returns_packed = False
        self.before: int | None = None  # the position before the step that has begun
        # PackedCache gives all of its layers the same.
        self.slots, self.transaction = Slots(), Transaction()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.formats is None:
            if self.dtype not in DTYPE_NAMES:
                raise ValueError(f"PackedCache: keys of {self.dtype}; name a format")
            self.formats = (DTYPE_NAMES[self.dtype],) * 2
        self.dims = key_states.shape[-1], value_states.shape[-1]
        both = enumerate((key_states, value_states))
        self.keys, self.values = (self._empty(t.shape, 0, which) for which, t in both)
        self.end = self.base = 0
        self.is_initialized = True

    def _empty(self, shape: Sequence[int], slots: int, which: int) -> Tensor:
        """Slots for entries of this shape [B, kv_heads, S, D], which: 0 of keys, 1 of values."""
        format, size = self.formats[which], (shape[0], shape[1], slots)
        width, dtype = shape[3], formats.DTYPES.get(format)
        if dtype is None:
            width, dtype = format_of(format)[0].row_bytes(width), torch.uint8
        with lasting():
            return torch.empty(*size, width, dtype=dtype, device=self.device)

    def _resized(self, entries: Tensor, slots: int) -> Tensor:
        with lasting():
            return entries.new_empty(*entries.shape[:2], slots, entries.shape[3])

    # ---- room

    def _first_kept(self) -> int:
        """The first slot that later queries, or a crop, may need."""
        return 0

    def _capacity(self, entries: int, slots: int) -> int:
        """The slots to have for so many entries where there are `slots`."""
        return max(entries, min(max(2 * slots, FIRST, self.slots.expected), slots + STEP))

    def _make_room(self, count: int) -> None:
        slots = self.keys.shape[2]
        if self.end + count > slots:
            first = self._first_kept()
            self._move(first, self._capacity(self.end - first + count, slots))

    def _move(self, first: int, slots: int) -> None:
        """The entries from `first` on become the first of so many slots."""
        kept = self.end - first
        for name in ("keys", "values"):
            old = getattr(self, name)
            if slots == old.shape[2]:
                old[:, :, :kept] = old[:, :, first : self.end].clone()
                continue
            new = self._resized(old, slots)
            new[:, :, :kept] = old[:, :, first : self.end]
            setattr(self, name, new)
        self._moved(first)

    def _moved(self, count: int) -> None:
        """The entries are `count` slots before where they were."""
        self.base, self.end = self.base + count, self.end - count

    # ---- entries

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Write the entries; the entries that these queries may see."""
        self.transaction.begin(self)
        self.prepare(key_states, value_states)
        count = key_states.shape[2]
        if self.slots.fixed is not None and count > 1:
            raise Unrecorded("a layer that fuse_ has not changed, for several tokens")
        self._make_room(count)
        self._write(key_states, value_states)
        self.end += count
        return self.seen(count)

    def seen(self, count: int) -> tuple[Any, Any]:
        """The entries that the last `count`, which are written, may see."""
        first = self._first_seen(self.end - count)
        keys, values = self._entries(self.keys, first, 0), self._entries(self.values, first, 1)
        if isinstance(keys, PackedEntries) and count <= FEW_QUERIES:
            of_all = self.slots.of(self.end - count, count, keys.device)[1]
            keys.length = self.slots.length(keys.entries) if first else of_all
        return keys, values

    def prepare(self, k: Tensor, v: Tensor) -> None:
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "PackedCache: keys require grad, but a cache keeps no gradient; call the model "
                "under torch.no_grad(), or with use_cache=False"
            )
        if k.dim() != 4:
            raise ValueError(f"PackedCache: keys {list(k.shape)}; must be [B, kv_heads, S, D]")
        has_slots = self.takes(k.shape[0], k.shape[1], k.shape[3])
        dim = self.dims[1] if has_slots else v.shape[-1]
        if v.shape != (want := (*k.shape[:3], dim)):
            raise ValueError(f"PackedCache: values {list(v.shape)}; must be {list(want)}")
        # A cache without entries may be given another batch, or keys of another model.
        if not has_slots:
            if self.is_initialized and self._has_entries():
                (batch, heads), size = self.keys.shape[:2], self.dims[0]
                raise ValueError(
                    f"PackedCache: keys of {k.shape[0]} sequences; it has {batch}"
                    if k.shape[0] != batch
                    else f"PackedCache: keys of {k.shape[1]} heads of {k.shape[3]} values; it has "
                    f"{heads} of {size}"
                )
            self.lazy_initialization(k, v)
        self.dtype = k.dtype  # entries of any dtype decode to the model's

    def _has_entries(self) -> bool:
        """Whether the layer has entries from before the step that has begun."""
        return self.position() > 0

    def takes(self, batch: int, heads: int, size: int) -> bool:
        """Whether the layer has slots for keys [batch, heads, S, size]."""
        if not self.is_initialized:
            return False
        held = self.keys.shape
        return (held[0], held[1], self.dims[0]) == (batch, heads, size)

    def _first_seen(self, end: int) -> int:
        """The first slot that the next query sees, where `end` slots have entries."""
        return 0

    def _write(self, k: Tensor, v: Tensor) -> None:
        count = k.shape[2]
        # On a CPU the op refuses finite values that f16 has not.
        is_checked = k.is_cpu and k.dtype != torch.float16 and "f16" in self.formats
        if not self._is_packed() and not is_checked:
            self.keys.narrow(2, self.end, count).copy_(k)
            self.values.narrow(2, self.end, count).copy_(v)
        else:
            self._append(k, v, self.slots.of(self.end, count, k.device)[0])

    def _append(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if self.dims[0] == self.dims[1]:
            ops.cache_append(self.keys, self.values, k, v, slots, *self.formats)
            return
        for held, new, format in zip((self.keys, self.values), (k, v), self.formats, strict=True):
            ops.cache_append(held, held, new, new, slots, format, format)

    def room(self, count: int, is_masked: bool = False) -> Room:
        """Room for `count` entries more, which the caller writes.

        is_masked: of the mask that comes with them the first column is the first entry they see.
        """
        end = self.end
        if end + count > self.keys.shape[2]:
            self._make_room(count)
            end = self.end
        self.end = end + count
        keys, values = self.keys, self.values
        slots, length = self.slots.of(end, count, keys.device, getattr(self, "sliding_window", 0))
        if count <= FEW_QUERIES:
            return Room(self.formats, keys, values, slots, keys, values, length)
        k, v = (entries.narrow(2, 0, end + count) for entries in (keys, values))
        return Room(self.formats, keys, values, slots, k, v, None)

    def _entries(self, entries: Tensor, first: int, which: int) -> Any:
        seen = entries[:, :, first : self.end]
        if not self._is_packed() and seen.dtype == self.dtype:
            return seen
        packed = PackedEntries(seen, self.formats[which], self.dims[which], self.dtype)
        return packed if self.returns_packed else packed.decoded()

    def _is_packed(self) -> bool:
        """Whether keys or values are entries that not every attention function reads."""
        return not formats.DTYPES.keys() >= set(self.formats)

    # ---- as a file has them

    def held(self) -> tuple[int, Tensor, Tensor] | None:
        """(the position of the first; keys and values) of the entries that later queries need."""
        self.transaction.settle()
        if not self.is_initialized or self.end == 0:
            return None
        first = min(self._first_kept(), self.end - 1)
        k, v = (entries[:, :, first : self.end] for entries in (self.keys, self.values))
        return self.base + first, k, v

    def hold(
        self,
        base: int,
        dtype: torch.dtype,
        dims: tuple[int, int],
        keys: Tensor,
        values: Tensor,
        device: torch.device,
    ) -> None:
        """Be what held() said. ValueError: these are no entries of this layer."""
        self._check_held(base, keys.shape[2])
        (batch, heads, count, _), like = keys.shape, torch.empty(0, dtype=dtype, device=device)
        self.lazy_initialization(*(like.new_empty(batch, heads, 0, size) for size in dims))
        given = zip(("keys", "values"), (keys, values), self.formats, strict=True)
        for name, entries, format in given:
            own = getattr(self, name)
            if (entries.dtype, entries.shape[3]) != (own.dtype, own.shape[3]):
                raise ValueError(
                    f"{name} are entries of {entries.shape[3]} {entries.dtype}; {format} has "
                    f"{own.shape[3]} {own.dtype} for {dims[name == 'values']} values"
                )
        self._fit(count)
        self.end = count
        self.keys[:, :, :count], self.values[:, :, :count] = keys.to(device), values.to(device)
        self.base = base

    def _fit(self, count: int) -> None:
        """Slots for so many entries and no more, where there are none."""
        self.keys, self.values = (self._resized(t, count) for t in (self.keys, self.values))

    def _check_held(self, base: int, count: int) -> None:
        if base != 0:
            raise ValueError(f"base: {base}; must be 0, this layer sees all that was before")

    # ---- questions to a cache

    def position(self) -> int:
        """The position of the next entry."""
        return self.base + self.end

    def rewind(self, position: int) -> None:
        self.end = position - self.base

    def get_seq_length(self) -> Any:
        """The entries that count: those before a step that has not reached all layers.

        A recorded step gives a tensor, which no code can take for a number that stays.
        """
        if self.slots.fixed is not None:
            return self.slots.fixed.position
        return self._counted()

    def _counted(self) -> int:
        if self.transaction.is_open() and self.before is not None:
            return self.before
        return self.position()

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of entries that the next queries see, and the position of the first."""
        end = self._counted() - self.base
        first = self._first_seen(end)
        return end - first + query_length, self.base + first

    # ---- changes of a cache

    def reset(self) -> None:
        """No entries, in the same memory."""
        self.transaction.forget()
        self.base = self.end = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove positions."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop: {tokens_to_remove}; must be negative, the tokens to remove")
        self.transaction.settle()
        self._shorten(-tokens_to_remove)

    def _shorten(self, count: int) -> None:
        self.end = max(0, self.end - count)

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.transaction.settle()
        if self.is_initialized:
            with lasting():
                self.keys, self.values = change(self.keys), change(self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Each sequence becomes a copy of another, in place."""

        def change(entries: Tensor) -> Tensor:
            chosen = entries[:, :, : self.end].index_select(0, beam_idx.to(entries.device))
            if len(chosen) != len(entries):
                entries = entries.new_empty(len(chosen), *entries.shape[1:])
            entries[:, :, : self.end] = chosen
            return entries

        self._replace(change)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._replace(lambda entries: entries.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._replace(lambda entries: entries[indices.to(entries.device)])


class PackedSlidingLayer(PackedLayer):  # type: ignore[no-untyped-call]
    """A layer whose queries see sliding_window positions, their own included.

    Entries lie in the order of their positions, and every SLACK = 256 tokens those of the window
    move to the front, through a copy: 4 / 256 of a window read or written for a token, beside the
    window that its attention reads: 1.6 % more bytes, whatever window and format are. A ring would
    move nothing, but every mask and every other attention function would have to follow it.
    """

    is_sliding = True

    def __init__(
        self, sliding_window: int, format: str | None = None, is_chunked: bool = False
    ) -> None:
        """is_chunked: of queries that see their chunk of so many positions."""
        super().__init__(format)
        self.sliding_window, self.is_chunked = sliding_window, is_chunked
        self.record_past = False
        self.cropped = 0  # the end at the last crop, from which past is recorded

    def activate_past_recording(self) -> None:
        """Keep every entry from here on until the next crop."""
        self.record_past, self.cropped = True, self.end

    def _first_kept(self) -> int:
        end = min(self.end, self.cropped) if self.record_past else self.end
        return max(0, end - self.sliding_window + 1)

    def _first_seen(self, end: int) -> int:
        return max(0, end - self.sliding_window + 1)

    def room(self, count: int, is_masked: bool = False) -> Room:
        self._make_room(count)
        first = self._first_seen(self.end)
        room = super().room(count)
        if not (is_masked or self.is_chunked) and (count == 1 or self.slots.fixed is not None):
            return room._replace(window=self.sliding_window)
        if first == 0:
            return room
        k, v = (t.narrow(2, first, self.end - first) for t in (self.keys, self.values))
        length = None if room.length is None else self.slots.length(k)
        return room._replace(keys=k, values=v, length=length)  # masks begin with the first of them

    def _capacity(self, entries: int, slots: int) -> int:
        most = max(entries, self.sliding_window - 1 + SLACK)
        return min(most, super()._capacity(entries, slots))

    def _make_room(self, count: int) -> None:
        slots, most = self.keys.shape[2], self.sliding_window - 1 + SLACK
        is_long = slots > most and self.end - self._first_kept() + count <= most
        if is_long:  # after a prompt longer than the window
            self._move(self._first_kept(), most)
        super()._make_room(count)

    def _moved(self, count: int) -> None:
        super()._moved(count)
        self.cropped = max(0, self.cropped - count)

    def _check_held(self, base: int, count: int) -> None:
        if base > 0 and count < self.sliding_window - 1:
            raise ValueError(f"length: {count}; a window of {self.sliding_window} needs one less")

    def get_max_length(self) -> int:
        return self.sliding_window

    def reset(self) -> None:
        super().reset()
        self.cropped = 0

    def crop(self, tokens_to_remove: int) -> None:
        self.transaction.settle()
        left = self.end + tokens_to_remove
        if tokens_to_remove < 0 and left < self.sliding_window - 1 and self.base > 0:
            raise RuntimeError(
                f"crop: {-tokens_to_remove} positions, but the entries of a window before them are "
                "gone; call activate_past_recording before they are written"
            )
        super().crop(tokens_to_remove)
        self.cropped = self.end
