"""A cache of many texts in a fixed number of bytes: entries of each layer in pages of one pool.

A layer has two tensors, keys and values [1, kv_heads, slots, entry], of which pages.py gives texts
pages of 64 slots; the states of recurrent layers lie beside them (pooled.py). A forward reads and
writes entries of the texts that begin_step() names: a token, or a part of a prompt, of each. Texts
that join, leave or grow move no entries; a common beginning is read at one place.
Entries of a failed step lie behind all lengths, so no text sees them; states have moved on, and the
step's texts are to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from ...models.cache_argument import with_cache
from .hybrid import HybridPackedLayer
from .layers import Offset, PackedLayer, Room
from .pages import SLOTS, Pages, PoolFull
from .pooled import PooledStates
from .slots import Stored, lasting

__all__ = ["PagedCache", "PoolFull", "Step", "Text", "default_memory", "paged_cache"]

ops = torch.ops.metalmm

KEPT = 0.25  # a share of the memory behind the states of texts under way


class Step:
    """The entries of a step's texts, each `count`: where they lie, and what their queries see.

    One tensor, so that a step is one transfer to the device, and views of it.
    """

    def __init__(self, values: Tensor, texts: int, count: int) -> None:
        """values: int64 [texts, 2 count + 1 + pages]: positions, slots, length, pages of each."""
        self.values, self.count = values, count
        self.positions, self.slots = values[:, :count], values[:, count : 2 * count]
        self.length, self.table = values[:, 2 * count], values[:, 2 * count + 1 :]

    @classmethod
    def of(cls, texts: Sequence[Text], count: int, device: torch.device) -> Step:
        # Each doubling of the longest text is another kind of step, and no other growth.
        most = 1 << (max(len(text.pages) for text in texts) - 1).bit_length()
        numbers = []
        for text in texts:
            own = range(len(text.tokens), len(text.tokens) + count)
            slots = [text.pages[t // SLOTS] * SLOTS + t % SLOTS for t in own]
            table = text.pages + [0] * (most - len(text.pages))
            numbers.append([*own, *slots, own.stop, *table])
        return cls(torch.tensor(numbers, device=device), len(texts), count)

    @property
    def key(self) -> Any:
        return self.values.shape, self.count

    def copy(self) -> Step:
        return Step(self.values.clone(), len(self.values), self.count)


class Text:
    """Tokens whose entries the cache holds. owner: whose texts alone may begin with its entries."""

    def __init__(self, cache: PagedCache, owner: bytes = b"") -> None:
        self.cache, self.owner = cache, owner
        self.tokens: list[int] = []
        self.pages: list[int] = []

    def begin(self, tokens: Sequence[int], least: int) -> int:
        """Hold the longest beginning of the tokens that the cache has, in whole pages; its length.

        least: tokens at the end that are read in any case.
        """
        self.end()
        pages, states = self.cache.pages, self.cache.states
        self.pages = pages.find(tokens, max(0, len(tokens) - least), self.owner)
        if states:
            while self.pages and not states.has(pages.serial(self.pages[-1])):
                self._drop(len(self.pages) - 1)
            states.start(self, pages.serial(self.pages[-1]) if self.pages else None)
        self.tokens = list(tokens[: len(self.pages) * SLOTS])
        return len(self.tokens)

    def make_room(self, count: int) -> None:
        """Pages for `count` tokens more. PoolFull: there are none, and the text has what it had."""
        had = len(self.pages)
        try:
            while len(self.pages) * SLOTS < len(self.tokens) + count:
                self.pages.append(self.cache.pages.take())
        except BaseException:
            self._drop(had)
            raise

    def extend(self, tokens: Sequence[int], is_shared: bool = True) -> None:
        """Add tokens that have entries now. is_shared: the owner's other texts may find them."""
        full = len(self.tokens) // SLOTS
        self.tokens.extend(tokens)
        if is_shared and len(self.tokens) // SLOTS > full:
            self.cache.pages.publish(self.pages, self.tokens, self.owner)

    def keep_states(self) -> None:
        """Keep recurrent states for texts that begin with all these tokens, in full pages."""
        pages = self.cache.pages
        known = pages.find(self.tokens, len(self.tokens), self.owner)  # may be another text's
        if len(known) == len(self.pages):
            self.cache.states.keep(self, pages.serial(known[-1]))
        pages.release(known)

    def end(self) -> None:
        """The text's pages may go when others need their place."""
        self._drop(0)
        self.cache.states.end(self)
        self.tokens = []

    def _drop(self, kept: int) -> None:
        dropped, self.pages = self.pages[kept:], self.pages[:kept]
        self.cache.pages.release(dropped)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of all texts in a layer. window: of a sliding one; 0: none."""

    is_initialized = True

    def __init__(self, like: PackedLayer, slots: int) -> None:
        """like: a layer that holds an entry, whose formats and sizes this one has."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.formats = like.formats
        self.is_sliding = like.is_sliding
        self.window: int = getattr(like, "sliding_window", 0)
        with lasting():
            self.keys, self.values = (
                t.new_empty(1, t.shape[1], slots, t.shape[3]) for t in (like.keys, like.values)
            )

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do: the layer has all slots."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("entries are written by update() of the cache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return Offset(0)

    def get_max_length(self) -> int:
        return -1


class PagedHybridLayer(LinearAttentionLayer, PagedLayer):  # type: ignore
    """Keys and values of all texts, and the states that `like` shows."""

    is_compileable = False  # as PagedLayer's: masks are made for one that is

    def __init__(self, like: HybridPackedLayer, slots: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=like.number_of_states)
        vars(self).update(vars(like))
        PagedLayer.__init__(self, like, slots)

    lazy_initialization = LinearAttentionLayer.lazy_initialization  # type: ignore[assignment]


class PagedCache(Cache):
    """Keys and values of all texts of a model whose attention function is "metalmm".

    like: the layers of a PackedCache that hold an entry of the model, or none where they read those
    of others. memory: bytes that entries and states may take, those of `texts` texts at a time and
    kept ones; ValueError: not even one page fits.
    """

    def __init__(self, like: Sequence[Any], memory: int, texts: int = 1) -> None:
        self.page_bytes = sum(
            t.shape[1] * SLOTS * t.shape[3] * t.element_size()
            for layer in like
            if isinstance(layer, PackedLayer)
            for t in (layer.keys, layer.values)
        )
        of_text = PooledStates.bytes_of(like)
        left, kept = memory - texts * of_text, 0
        if left < self.page_bytes:
            states = f", and states of {texts} texts" if of_text else ""
            needed = self.page_bytes + texts * of_text
            raise ValueError(
                f"memory: {memory} bytes; {SLOTS} tokens of this model{states} take {needed}"
            )
        if of_text:
            kept = int((left - self.page_bytes) * KEPT) // of_text
            kept = min(kept, left // (of_text + self.page_bytes))  # one at each page's end
            left -= kept * of_text
        self.states = PooledStates(like, texts, kept)
        self.pages = Pages(left // self.page_bytes)
        slots = self.pages.count * SLOTS
        super().__init__(layers=[_paged(x, slots) for x in like])
        self.with_entries = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        self.slots = slots  # all texts'
        self.step: Step | None = None

    def begin_step(self, texts: Sequence[Text], count: int) -> Tensor:
        """The next forward is of `count` tokens more of each text; their positions [B, count].

        PoolFull: a text has no place for them, and nothing has changed but what others have.
        """
        for text in texts:
            text.make_room(count)
        if self.states:
            self.states.begin_step(texts)
        first: Any = self.with_entries[0]
        self.step = Step.of(texts, count, first.keys.device)
        return self.step.positions

    def room(
        self, number: int, x: Tensor, kv_heads: int, head_size: int, is_masked: bool = False
    ) -> Room:
        """Room for the keys of x [B, count, ...], whose attention is the op."""
        layer: Any = self.layers[number]
        step, keys, values = self.step, layer.keys, layer.values
        assert step is not None
        seen = keys, values, step.length, step.table, layer.window
        return Room(layer.formats, keys, values, step.slots, *seen)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """The room itself, in the place of keys and of values [B, kv_heads, T, D]."""
        room = self.room(layer_idx, key_states, 0, 0)
        given = room.new_keys, room.new_values, key_states, value_states, room.slots
        ops.cache_append(*given, *room.formats)
        return room, room

    def stored(self, number: int, room: Room, count: int) -> Stored:
        """Entries that are written in this room, for layers that share them."""
        return Stored(room, lambda: (room, room))


def _paged(like: Any, slots: int) -> Any:
    """The layer of a cache of many texts; one without entries is as it is."""
    if isinstance(like, HybridPackedLayer):
        return PagedHybridLayer(like, slots)
    return PagedLayer(like, slots) if isinstance(like, PackedLayer) else like


def paged_cache(model: Any, format: str, memory: int | None, texts: int = 1) -> PagedCache:
    """The cache of a model with attention "metalmm", which reads a token to show its entries.

    memory: as PagedCache; None: a quarter of what is free, of which the states of texts under way
    take no more than half: of fewer than `texts`, down to one, where theirs would.
    """
    from ..cache import PackedCache

    like: Any = PackedCache(model.config, format)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **with_cache(model, like))
    if memory is None:
        memory = default_memory(model.device)
        if of_text := PooledStates.bytes_of(like.layers):
            texts = max(1, min(texts, memory // 2 // of_text))
    return PagedCache(like.layers, memory, texts)


def default_memory(device: torch.device) -> int:
    """A quarter of the bytes that are free where the entries will lie."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 4
    import psutil

    return int(psutil.virtual_memory().available) // 4
