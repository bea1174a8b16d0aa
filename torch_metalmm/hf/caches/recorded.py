"""What of a cache changes from step to step, in memory that stays: for steps that are recorded.

A kind of cache has a class here. `refusal` says why the next step may not be recorded, or ""; an
object is of the steps of one `key`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .layers import PackedLayer, PackedSlidingLayer
from .rows import Fixed, lasting


class PackedStep:
    """Of a PackedCache: the slots and the length of its layers, and the position."""

    def __init__(self, cache: Any, count: int, device: torch.device) -> None:
        self.count = count
        self.fixed = Fixed(count, device, {_window(layer) for layer in cache.layers})
        self._rows = [(layer.keys, layer.values) for layer in cache.layers]

    @staticmethod
    def key(cache: Any) -> Any:
        return ()

    @staticmethod
    def refusal(cache: Any, count: int) -> str:
        """Makes room for the rows of the step, where it may be recorded."""
        if cache.offloading or "update" in cache.__dict__:
            return "a cache that is offloaded, or whose update is another's"
        layers = cache.layers
        kinds = {type(layer) for layer in layers}
        if others := kinds - {PackedLayer, PackedSlidingLayer}:
            return f"a cache layer {next(iter(others)).__name__}"
        cache.transaction.settle()
        if not all(layer.is_initialized for layer in layers):
            return "a cache whose layers hold no rows yet"
        position, ends = layers[0].position(), {}
        for layer in layers:
            layer._make_room(count)
            end = ends.setdefault(_window(layer), layer.end)
            if layer.end != end or layer.position() != position:
                return "a cache whose layers hold other rows each"
            is_full = layer.end + count >= getattr(layer, "sliding_window", layer.end + count + 1)
            if is_full and layer.is_chunked:
                return "a chunk, or a window for several tokens, that is full"
        if count > 1 and any(layer.is_chunked for layer in layers if layer.is_sliding):
            return "several tokens where attention is in chunks"
        return ""

    def reads(self, cache: Any) -> bool:
        """Whether the cache's rows are those that the recorded ops read and write."""
        if len(self._rows) != len(cache.layers):
            return False
        pairs = zip(cache.layers, self._rows, strict=True)
        return all(layer.keys is k and layer.values is v for layer, (k, v) in pairs)

    def fill(self, cache: Any) -> None:
        """For the cache's next step."""
        ends = {_window(layer): layer.end for layer in cache.layers}
        self.fixed.fill(cache.layers[0].position(), ends)

    @property
    def place(self) -> Any:
        """What code of Python may have read, and so must differ between two recordings."""
        return self.fixed.first

    @contextmanager
    def recorded(self, cache: Any) -> Iterator[None]:
        """Inside, the layers' slots and lengths are these."""
        slots = cache.layers[0].slots
        slots.fixed = self.fixed
        try:
            yield
        finally:
            slots.fixed = None

    def done(self, cache: Any) -> None:
        """The rows of a replayed step are written."""
        for layer in cache.layers:
            layer.end += self.count


def _window(layer: Any) -> int:
    return getattr(layer, "sliding_window", 0)


class PagedStep:
    """Of a PagedCache: the slots, lengths and pages of its texts."""

    place = None  # no code of Python sees what changes

    def __init__(self, cache: Any, count: int, device: torch.device) -> None:
        with lasting():
            self._held = cache.step.copy()

    @staticmethod
    def key(cache: Any) -> Any:
        return cache.step.key

    @staticmethod
    def refusal(cache: Any, count: int) -> str:
        return ""

    def reads(self, cache: Any) -> bool:
        return True

    def fill(self, cache: Any) -> None:
        self._held.values.copy_(cache.step.values)

    @contextmanager
    def recorded(self, cache: Any) -> Iterator[None]:
        given, cache.step = cache.step, self._held
        try:
            yield
        finally:
            cache.step = given

    def done(self, cache: Any) -> None:
        """Texts count their rows themselves."""
