"""The rows of a layer that attends, and beside that mixes by a convolution and a state."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from .layers import PackedLayer


class HybridPackedLayer(LinearAttentionLayer, PackedLayer):  # type: ignore[misc, override]
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

    def offload(self) -> None:
        PackedLayer.offload(self)  # type: ignore[no-untyped-call]
        LinearAttentionLayer.offload(self)  # type: ignore[no-untyped-call]

    def prefetch(self) -> None:
        PackedLayer.prefetch(self)  # type: ignore[no-untyped-call]
        LinearAttentionLayer.prefetch(self)  # type: ignore[no-untyped-call]

    def get_max_length(self) -> int:
        return PackedLayer.get_max_length(self)

    def reset(self) -> None:
        PackedLayer.reset(self)
        LinearAttentionLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        PackedLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        PackedLayer.reorder_cache(self, beam_idx)
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
