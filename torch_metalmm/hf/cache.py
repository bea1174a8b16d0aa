"""PackedCache: keys and values of a model of transformers in a weight format.

A layer has two tensors, keys and values: [B, kv_heads, capacity, D] of the dtype of a dense format,
or uint8 [B, kv_heads, capacity, row_bytes] of packed entries. New ones are written in place. A full
tensor is replaced by one of twice the slots, at most STEP more. A sliding window keeps its entries
in the order of their positions, as masks have them; PackedSlidingLayer says what that costs.

update() returns a view of entries of a dense format, which any attention function reads; packed
ones it decodes, unless the model's attention function is "metalmm": that one gets PackedEntries,
which decode themselves where any other code of the model uses them. A layer that fuse_ has changed
calls room() instead, and writes and reads the entries by two ops.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..extras import require

require("PackedCache", "transformers")

from transformers.cache_utils import (  # noqa: E402
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    get_layer_types_and_kwargs,
)

from .caches import ATTENTION, name_of, pair_of  # noqa: E402
from .caches.file import File, write  # noqa: E402
from .caches.hybrid import HybridPackedLayer  # noqa: E402
from .caches.layers import Offset, PackedLayer, PackedSlidingLayer, Room  # noqa: E402
from .caches.slots import Slots, Stored  # noqa: E402
from .caches.static import StaticPackedLayer  # noqa: E402
from .caches.transaction import Transaction  # noqa: E402

SLIDING = ("sliding_attention", "chunked_attention")


class PackedCache(Cache):
    """A cache for generate() and for past_key_values of a model with this config.

    format: "f16/q8_0", keys and values in any two weight formats whose blocks divide the head size,
    each "_rotated" where it is to lose less (docs/guide/fuse.md);
    of one name, "f16" is of both, and a packed "q8_0" is of values beside keys in f16 (pair_of in
    caches says why); None: the model's dtype. What f16 cannot hold, beyond 65504, is refused on the
    CPU, and becomes infinite on GPUs, which would have to wait for each step to say it; take bf16
    or f32 for keys like these. slots: as many from the start and no more, of whose shapes a
    compiled model makes one graph. Layers without keys are those of
    transformers' own caches; of layers with keys and states the keys alone are packed.

    A step of a model that fails leaves no entries: see caches/transaction.py.
    """

    def __init__(
        self,
        config: Any,
        format: str | None = None,
        slots: int | None = None,
        offloading: bool = False,
    ) -> None:
        if format is not None and not isinstance(format, str):
            raise ValueError(f"format: {format!r}; must be None or the name of a format")
        if slots is not None and (type(slots) is not int or slots < 1):
            raise ValueError(f"slots: {slots!r}; must be None or a whole number from 1 on")
        self.format = None if format is None else name_of(pair_of(format))
        self.config = config.get_text_config(decoder=True)
        layers = [
            self._layer(kind, options, slots)
            for kind, options in zip(*get_layer_types_and_kwargs(self.config), strict=True)
        ]
        shared, self.transaction = Slots(), Transaction()
        for layer in layers:
            if isinstance(layer, PackedLayer):
                layer.slots, layer.transaction = shared, self.transaction
        super().__init__(layers=layers, offloading=offloading)

    def _layer(self, kind: str, options: dict[str, Any], slots: int | None) -> Any:
        if kind == "full_attention" or kind in SLIDING:
            if slots is not None:
                return StaticPackedLayer(slots, self.format, kind in SLIDING)
            if kind in SLIDING:
                is_chunked = kind == "chunked_attention"
                return PackedSlidingLayer(options["sliding_window"], self.format, is_chunked)
            return PackedLayer(self.format)
        if kind == "hybrid" and slots is None:
            return HybridPackedLayer(self.format, **options)
        if slots is None:
            return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)
        return STATIC_LAYER_TYPE_MAPPING[kind](max_cache_len=slots, **options)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        layer = self.layers[layer_idx]
        if isinstance(layer, PackedLayer):
            layer.returns_packed = self.config._attn_implementation == ATTENTION
        given = (key_states, value_states, layer_idx, *args)
        if torch.compiler.is_compiling():
            return super().update(*given, **kwargs)
        try:
            return super().update(*given, **kwargs)
        except BaseException:
            self.undo()
            raise

    def expect(self, rows: int) -> None:
        """Note how many slots will be filled, as far as one knows: some room is made for all.

        Each time that a cache grows, its steps are recorded anew.
        """
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.slots.expected = rows

    def begins(self, number: int) -> None:
        """The code of the layer begins; a step does, where the layer wrote in the one before."""
        if getattr(self.layers[number], "before", None) is not None:
            self.transaction.settle()

    def undo(self) -> None:
        """Forget the entries of a step that has not reached all layers."""
        self.transaction.undo()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the entries as a safetensors file, which replaces another at once.

        ValueError: a layer has other states than keys and values.
        """
        write(self.layers, self.format, path)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        config: Any,
        slots: int | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedCache:
        """The cache that save() wrote, for a model with this config; slots as of PackedCache().

        No code is run, and no more memory taken than the file has and `slots` asks for. ValueError
        that names the field: not such a file, or one of a cache for another config.
        """
        file = File(path)
        cache = cls(config, file.format, slots)
        file.fill(cache.layers, cache.config, device)
        return cache

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """The position of the next query; of a step that is recorded one that needs no mask."""
        fixed = getattr(getattr(self.layers[layer_idx], "slots", None), "fixed", None)
        if fixed is None or any(getattr(each, "is_chunked", False) for each in self.layers):
            return super().get_query_offset(layer_idx)
        return Offset(fixed.first)

    def room(
        self, number: int, x: Tensor, kv_heads: int, head_size: int, is_masked: bool = False
    ) -> Room | None:
        """Room for the keys of x [B, S, ...], whose attention is the op, in the layer `number`.

        None, before anything changed: update() and the attention function are to be called, because
        another has a say in what these do.
        """
        layer: Any = self.layers[number]
        if type(layer) not in _LAYERS or type(self) is not PackedCache:
            return None
        if self.offloading or "update" in self.__dict__:
            return None
        self.transaction.begin(layer)
        shape = x.shape
        if not layer.takes(shape[0], kv_heads, head_size):
            like = x.new_empty(shape[0], kv_heads, 0, head_size)
            layer.prepare(like, like)
        return layer.room(shape[1], is_masked)

    def stored(self, number: int, room: Room, count: int) -> Stored:
        """`count` entries that are written in this room, for layers that share them."""
        layer: Any = self.layers[number]
        layer.returns_packed = self.config._attn_implementation == ATTENTION
        return Stored(room, partial(layer.seen, count))


_LAYERS = frozenset((PackedLayer, PackedSlidingLayer, StaticPackedLayer, HybridPackedLayer))
