"""The caches of several answers as one, aligned at their ends.

A shorter answer has zeros before its first token, which a mask hides. Distances between tokens stay
what they are, so that sliding windows, whose layers hold the last tokens only, need nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Held = list[tuple[Tensor, Tensor]]  # of each layer [1, heads, tokens, size]


def can_join(model: Any) -> bool:
    """Whether every layer's cache has keys and values of each token, or of the last ones."""
    import inspect

    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from ..sequence import keeps_cache, long_from

    takes = inspect.signature(model.forward).parameters
    if not keeps_cache(model) or not {"attention_mask", "position_ids"} <= set(takes):
        return False
    layers = DynamicCache(config=model.config).layers
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return bool(layers) and all(type(x) in kinds for x in layers) and long_from(model) is None


def apart(cache: Any, lengths: Sequence[int]) -> list[Held]:
    """What the cache has of each answer; lengths: their tokens."""
    found: list[Held] = []
    for row, length in enumerate(lengths):
        layers = []
        for layer in cache.layers:
            if not layer.is_initialized:  # shares those of another layer
                layers.append((torch.empty(0), torch.empty(0)))
                continue
            first = max(0, layer.keys.shape[-2] - length)
            one = slice(row, row + 1)
            layers.append((layer.keys[one, :, first:], layer.values[one, :, first:]))
        found.append(layers)
    return found


def together(cache: Any, rows: Sequence[Held], length: int) -> Any:
    """The empty cache with these answers, of which the longest has `length` tokens."""
    for index, layer in enumerate(cache.layers):
        parts = [row[index] for row in rows]
        if not parts[0][0].numel():
            continue
        layer.lazy_initialization(*parts[0])
        width = max(keys.shape[-2] for keys, _ in parts)
        layer.keys = _stacked([keys for keys, _ in parts], width)
        layer.values = _stacked([values for _, values in parts], width)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    return cache


def _stacked(parts: list[Tensor], width: int) -> Tensor:
    if len(parts) == 1:
        return parts[0].clone()  # a view would keep the other answers' rows in memory
    return torch.cat([pad(part, (0, 0, width - part.shape[-2], 0)) for part in parts])


def mask_of(lengths: Sequence[int], device: Any) -> Tensor | None:
    """[answers, tokens] 1 where there is one; None: all have the same number."""
    most = max(lengths)
    if min(lengths) == most:
        return None
    first = most - torch.tensor(lengths, device=device)
    return (torch.arange(most, device=device) >= first[:, None]).long()
