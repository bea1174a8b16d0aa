"""Layers of a cache with the states of a convolution or a recurrence, beside rows or alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .layers import PackedLayer


def _of_both(name: str) -> Any:
    """A method that is done to the states, which may refuse, and then to the rows."""

    def both(layer: Any, *args: Any, **named: Any) -> None:
        for kind in (LinearAttentionLayer, PackedLayer):
            getattr(kind, name)(layer, *args, **named)

    both.__name__ = name
    return both


class HybridPackedLayer(LinearAttentionLayer, PackedLayer):  # type: ignore[misc, no-untyped-call, override]
    """Keys and values as PackedLayer has them, states as transformers' own layers.

    As there a crop is refused, since a state cannot go back; so is a file of the rows.
    """

    is_compileable = False
    has_states = True

    def __init__(self, format: str | None = None, number_of_states: int = 1) -> None:
        PackedLayer.__init__(self, format)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *rows: Tensor, **states: Any) -> None:  # type: ignore[override]
        """Of keys and values, or of states by their names."""
        if rows:
            PackedLayer.lazy_initialization(self, *rows)
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


class States:
    """What the recurrent layers hold, to go back to. No row can be taken from a state."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._kept = [(state, state.clone()) for state in states_of(layers)]

    def __bool__(self) -> bool:
        return bool(self._kept)

    def restore(self) -> None:
        for state, values in self._kept:
            state.copy_(values)
