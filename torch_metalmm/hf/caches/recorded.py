"""The numbers of a cache that change from step to step, in memory that stays, for recorded steps.

A kind of cache has a class here. `refusal` says why the next step may not be recorded, or ""; an
object is of the steps of one `key`. `reads` is asked at every step: whether the cache is as
`refusal` found it, with room for the entries, in the memory that the recorded ops read and write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from typing import Any

import torch
from transformers.cache_utils import DummyLayer, LinearAttentionLayer

from .hybrid import HybridPackedLayer, States, states_of
from .layers import PackedLayer, PackedSlidingLayer
from .slots import Fixed, lasting

_PACKED = frozenset((PackedLayer, PackedSlidingLayer, HybridPackedLayer))
_STATES = frozenset((LinearAttentionLayer, HybridPackedLayer))  # which are written in place
_KNOWN = _PACKED | _STATES | {DummyLayer}


class PackedStep:
    """A PackedCache's numbers: the slots and the length of its layers, and the position."""

    def __init__(self, cache: Any, count: int, device: torch.device) -> None:
        self.count = count
        self._layers = list(cache.layers)
        entries = self._with_entries = _with_entries(cache)
        self.fixed = Fixed(count, device, {_window(layer) for layer in entries})
        # Each with the first layer of its window, whose entries lie in the same slots.
        firsts = {_window(layer): layer for layer in reversed(entries)}
        self._entries = [
            (layer, firsts[_window(layer)], layer.keys, layer.values, layer.keys.shape[2] - count)
            for layer in entries
        ]
        self._firsts = firsts
        self._with_states = [layer for layer in cache.layers if type(layer) in _STATES]
        self._states = states_of(self._with_states)

    @staticmethod
    def key(cache: Any) -> Any:
        return ()

    @staticmethod
    def refusal(cache: Any, count: int) -> str:
        """Makes room for the entries of the step, where it may be recorded."""
        if cache.offloading or "update" in cache.__dict__:
            return "a cache that is offloaded, or whose update is another's"
        for layer in cache.layers:
            kind = type(layer)
            if kind not in _KNOWN:
                return f"a cache layer {kind.__name__}"
            if kind in _STATES and (layer.record_past or not _has_states(layer)):
                return "a cache whose layers hold no states yet, or record those that were"
        cache.transaction.settle()
        layers = _with_entries(cache)
        if not layers or not all(layer.is_initialized for layer in layers):
            return "a cache whose layers hold no entries yet"
        return _refusal_of_entries(layers, count)

    def reads(self, cache: Any) -> bool:
        if len(cache.layers) != len(self._layers) or not all(map(is_, cache.layers, self._layers)):
            return False
        if cache.offloading or "update" in cache.__dict__:
            return False
        cache.transaction.settle()
        position = self._entries[0][0].position()
        for layer, first, keys, values, most in self._entries:
            end = layer.end
            if end > most or end != first.end or layer.base + end != position:
                return False
            if layer.keys is not keys or layer.values is not values:
                return False
            if layer.is_chunked and (self.count > 1 or end + 1 >= layer.sliding_window):
                return False
        if not self._with_states:
            return True
        now = states_of(self._with_states)
        return (
            len(now) == len(self._states)
            and all(map(is_, now, self._states))
            and all(_has_states(x) and not x.record_past for x in self._with_states)
        )

    def has_room(self, more: int) -> bool:
        """For the step and so many entries behind it, none of which moves others."""
        return all(x.end + more <= most and not x.is_chunked for x, *_, most in self._entries)

    def fill(self, cache: Any) -> None:
        """For the cache's next step."""
        position = self._entries[0][0].position()
        self.fixed.fill(position, {window: x.end for window, x in self._firsts.items()})

    @property
    def place(self) -> tuple[int, ...]:
        """The numbers that code of Python may have read, each of which differs between two
        recordings."""
        return (self.fixed.first, *self.fixed.ends.values())

    @contextmanager
    def recorded(self, cache: Any) -> Iterator[None]:
        """Inside, the layers' slots and lengths are these. A step that fails leaves no entries
        and no states."""
        slots = _with_entries(cache)[0].slots
        before = States(self._with_states)
        slots.fixed = self.fixed
        try:
            yield
        except BaseException:
            cache.undo()
            before.restore()
            raise
        finally:
            slots.fixed = None

    def done(self, cache: Any) -> None:
        """The entries of a replayed step are written."""
        ends = [layer.end + self.count for layer in self._with_entries]
        # One call, which no signal interrupts.
        list(map(setattr, self._with_entries, repeat("end"), ends))


def _has_states(layer: Any) -> bool:
    return all(layer.has_previous_state.values())


def _with_entries(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if type(layer) in _PACKED]


def _refusal_of_entries(layers: list[Any], count: int) -> str:
    position, ends = layers[0].position(), dict[int, int]()
    for layer in layers:
        layer._make_room(count)
        end = ends.setdefault(_window(layer), layer.end)
        if layer.end != end or layer.position() != position:
            return "a cache whose layers hold other entries each"
        if layer.is_chunked and (count > 1 or layer.end + 1 >= layer.sliding_window):
            return "several tokens where attention is in chunks, or a chunk that is full"
    return ""


def _window(layer: Any) -> int:
    return getattr(layer, "sliding_window", 0)


class PagedStep:
    """A PagedCache's numbers: the slots, lengths and pages of its texts."""

    place = ()  # no code of Python sees what changes but the key

    def __init__(self, cache: Any, count: int, device: torch.device) -> None:
        with lasting():
            self._held = cache.step.copy()

    @staticmethod
    def key(cache: Any) -> Any:
        return cache.step.key, cache.states.first, cache.states.goes_on

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
        """Texts count their entries themselves."""
