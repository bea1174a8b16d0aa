"""Caches of several sequences under one forward that reads a token of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Several:
    """Keys, or values, of each sequence, in the place of a tensor [B, kv_heads, T, D]."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts


class SharedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer of each cache. What update() returns is all that a sequence's token sees: no mask."""

    def __init__(self, caches: Sequence[Cache], number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.caches, self.number = caches, number
        self.is_sliding = caches[0].is_sliding[number]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The caches have the rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        new = zip(
            self.caches, torch.split(key_states, 1), torch.split(value_states, 1), strict=True
        )
        rows = [cache.update(k, v, self.number, *args, **kwargs) for cache, k, v in new]
        keys, values = zip(*rows, strict=True)
        return Several(keys), Several(values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


def shared(caches: Sequence[Cache]) -> Cache:
    """The caches as one: row i of a forward's input, one token, is of sequence i.

    Each sequence keeps its rows where they are, so none waits, or is moved, when another joins or
    leaves. The attention function is "metalmm"; position_ids are to be given.
    """
    return Cache(layers=[SharedLayer(caches, i) for i in range(len(caches[0].layers))])


def attend_each(attend: Any, query: Tensor, key: Several, value: Several) -> Tensor:
    """attend(query, key, value), a sequence at a time: each to the bit what it is alone."""
    given = zip(torch.split(query, 1), key.parts, value.parts, strict=True)
    return torch.cat([attend(q, k, v)[0] for q, k, v in given])
