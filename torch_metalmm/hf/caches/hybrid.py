"""Layers of a cache with the states of a convolution or a recurrence, beside entries or alone."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ...nn.again import ALL, Again
from .layers import PackedLayer
from .slots import lasting


def _of_both(name: str) -> Any:
    """A method that is done to the states, which may refuse, and then to the entries."""

    def both(layer: Any, *args: Any, **named: Any) -> None:
        for kind in (LinearAttentionLayer, PackedLayer):
            getattr(kind, name)(layer, *args, **named)

    both.__name__ = name
    return both


class HybridPackedLayer(LinearAttentionLayer, PackedLayer):  # type: ignore[misc, no-untyped-call, override]
    """Keys and values as PackedLayer has them, states as transformers' own layers.

    As there a crop is refused, since a state cannot go back; so is a file of the entries.
    """

    is_compileable = False
    has_states = True

    def __init__(self, format: str | None = None, number_of_states: int = 1) -> None:
        PackedLayer.__init__(self, format)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *entries: Tensor, **states: Any) -> None:  # type: ignore[override]
        """Make the memory of keys and values, or of states by their names."""
        if entries:
            PackedLayer.lazy_initialization(self, *entries)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def get_max_length(self) -> int:
        return PackedLayer.get_max_length(self)

    offload, prefetch, reset = _of_both("offload"), _of_both("prefetch"), _of_both("reset")
    crop, reorder_cache = _of_both("crop"), _of_both("reorder_cache")


def states_of(layers: Iterable[Any]) -> list[Tensor]:
    """The memory of the recurrent ones among the layers."""
    found: list[Tensor] = []
    for layer in layers:
        if isinstance(layer, LinearAttentionLayer):
            states = (*layer.conv_states.values(), *layer.recurrent_states.values())
            found += [each for each in states if each is not None]  # LFM2 has a convolution alone
    return found


def crop_entries(layers: Iterable[Any], count: int) -> None:
    """Forget the last `count` entries of the packed layers among these, and leave their states."""
    for layer in layers:
        if isinstance(layer, PackedLayer):
            PackedLayer.crop(layer, -count)


class States:
    """States of recurrent layers before a step, to go back to: no token can be taken from a state.

    again: what notes the step's recurrent ops (nn.again.noted); None: no layer is recurrent.
    """

    def __init__(self, layers: Iterable[Any] = ()) -> None:
        self._states: list[Tensor] = []
        # (the states, their values) of each dtype: a GPU copies such in few launches.
        self._kept: list[tuple[list[Tensor], list[Tensor]]] = []
        self.take(layers)

    def take(self, layers: Iterable[Any]) -> None:
        """Keep the states as they are now, in the memory of those that were kept before."""
        states = states_of(layers)
        if len(states) == len(self._states) and all(map(is_, states, self._states)):
            for held, values in self._kept:
                torch._foreach_copy_(values, held)
        else:
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for state in states:
                by_dtype.setdefault(state.dtype, []).append(state)
            with lasting():
                self._kept = [(held, [s.clone() for s in held]) for held in by_dtype.values()]
            self._states = states  # last: what is interrupted before is done anew
        self.again = Again() if states else None

    def restore(self, texts: slice = ALL) -> None:
        """Bring back the states of these sequences of the step."""
        for held, values in self._kept:
            if texts == ALL:
                torch._foreach_copy_(held, values)
            else:
                for state, value in zip(held, values, strict=True):
                    state[texts].copy_(value[texts])

    def go_back(self, count: int, texts: slice = ALL) -> bool:
        """Bring the states of these sequences to those behind the first `count` tokens of the step;
        False: to those before the step, as not all ops that moved them are known."""
        self.restore(texts)
        if self.again is None:
            return True
        if not self.again.moves(self._states):
            return False
        with torch.inference_mode():
            self.again.run(count, texts)
        return True
