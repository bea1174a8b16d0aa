"""States of recurrent layers of many texts: a place of memory that stays for each one under way.

The places of a step's texts follow each other, so the step reads and writes one view of each state;
where they do not, states are moved first. A state cannot go back to an earlier token: some are kept
as they were behind a page, the least recently used ones go first, and a later text that begins
with these pages goes on from there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .hybrid import states_of
from .pages import PoolFull
from .slots import lasting


class PooledStates:
    """States of `count` texts in a cache of layers as `like`, which hold an entry of the model."""

    def __init__(self, like: Sequence[Any], count: int, kept: int) -> None:
        """kept: states that are kept beside those of texts under way."""
        recurrent = [layer for layer in like if isinstance(layer, LinearAttentionLayer)]
        self.count, self.most_kept = count, kept
        self._before = [layer.has_previous_state for layer in recurrent]
        with lasting():
            self._pools = [
                (states, i, state.new_zeros(count, *state.shape[1:]))
                for states, i, state in _states(recurrent)
            ]
            self._free = [[torch.empty_like(t[0]) for *_, t in self._pools] for _ in range(kept)]
        # Views by the places of a step, made once: a step that is recorded is of these tensors.
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        # The place of the step's first text, and whether all of them have read tokens.
        self.first, self.goes_on = 0, False
        self._texts: list[Any] = [None] * count
        self._kept: OrderedDict[int, list[Tensor]] = OrderedDict()

    @staticmethod
    def bytes_of(like: Sequence[Any]) -> int:
        """The bytes that the states of a text take."""
        return sum(state[0].nbytes for state in states_of(like))

    def __bool__(self) -> bool:
        return bool(self._pools)

    def start(self, text: Any, serial: int | None) -> None:
        """The text has a place: of the states that are kept as `serial`, or of zeros.

        PoolFull: all places are texts'.
        """
        self.end(text)
        if None not in self._texts:
            raise PoolFull(f"the states of all {self.count} texts are in use")
        place = self._texts.index(None)
        given = None if serial is None else self._kept[serial]
        for i, (*_, pool) in enumerate(self._pools):
            if given is None:
                pool[place].zero_()
            else:
                pool[place].copy_(given[i])
        if serial is not None:
            self._kept.move_to_end(serial)
        self._texts[place] = text

    def end(self, text: Any) -> None:
        if text in self._texts:
            self._texts[self._texts.index(text)] = None

    def has(self, serial: int) -> bool:
        return serial in self._kept

    def keep(self, text: Any, serial: int) -> None:
        """The text's states as they are now, behind the page that has this serial number."""
        place = self._texts.index(text)
        self.put(serial, [pool[place] for *_, pool in self._pools])

    def put(self, serial: int, states: Sequence[Tensor]) -> None:
        """Keep a copy of these, in the place of those that were used longest ago."""
        if serial in self._kept:
            self._kept.move_to_end(serial)
            return
        if not self.most_kept:
            return
        if len(self._kept) < self.most_kept:
            kept = self._free.pop()
        else:
            _, kept = self._kept.popitem(last=False)
        for own, state in zip(kept, states, strict=True):
            own.copy_(state)
        self._kept[serial] = kept

    def kept(self) -> dict[int, list[Tensor]]:
        """The states that are kept, by their serial numbers, the last used ones first."""
        return dict(reversed(self._kept.items()))

    def shapes(self) -> list[tuple[torch.dtype, list[int]]]:
        """The dtypes and shapes of a text's states."""
        return [(pool.dtype, list(pool.shape[1:])) for *_, pool in self._pools]

    def begin_step(self, texts: Sequence[Any]) -> None:
        """The layers show the states of these texts, whose places they will move on."""
        for text in texts:
            if text not in self._texts:
                assert not text.tokens, "a text whose states are gone"
                self.start(text, None)
        places = [self._texts.index(text) for text in texts]
        if places != [*range(places[0], places[0] + len(places))]:
            self._arrange(places)
            places = [*range(len(places))]
        self.first = places[0]
        self.goes_on = all(text.tokens for text in texts)
        for (states, i, _), view in zip(self._pools, self._shown(len(places)), strict=True):
            states[i] = view
        for before in self._before:
            before.update(dict.fromkeys(before, self.goes_on))

    def _shown(self, count: int) -> list[Tensor]:
        key = self.first, count
        if key not in self._views:
            with lasting():
                self._views[key] = [pool[key[0] : key[0] + count] for *_, pool in self._pools]
        return self._views[key]

    def _arrange(self, places: list[int]) -> None:
        """Move `places` to the front."""
        order = places + [place for place in range(self.count) if place not in places]
        self._texts = [self._texts[place] for place in order]
        for *_, pool in self._pools:
            pool.copy_(pool[order])


def _states(layers: Sequence[Any]) -> Iterator[tuple[dict[int, Any], int, Tensor]]:
    """(where a layer has it, under which number, the state [B, ...]) of each."""
    for layer in layers:
        for states in (layer.conv_states, layer.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    yield states, i, state
