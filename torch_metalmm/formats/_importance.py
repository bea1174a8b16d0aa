"""The weights of a search, from the importance of columns."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from ._base import BlockFormat
from ._search import f32, ordered_sum, square_root

# Arguments of search_asymmetric with an importance: start, increment, last, absolute error.
WEIGHTED_TRIALS = (-0.9, 0.05, 36, False)


class WeightedBlock(BlockFormat):
    """A block format whose search minimises a sum of weight * error^2.

    With an importance, weight = importance * sqrt(s + x^2): large values count more, as they do
    without. s = `spread` * the mean of x^2 over the row (`over_rows`) or the block. Where spread is
    None, weight = importance. The rules are llama.cpp's, but for `normalised`.
    """

    weighs = True
    spread: float | None

    def _encode_rows(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        if importance is None:
            return super()._encode_rows(x)
        w = self.weigh(x, importance).reshape(-1, self.block_values)
        return self.encode(x.reshape(-1, self.block_values), w).reshape(x.shape[0], -1)

    def weigh(self, x: Tensor, importance: Tensor) -> Tensor:
        """The weights, f32 [R, K], of x f32 [R, K] for the normalised importance f32 [K]."""
        if self.spread is None:
            return importance.expand_as(x)
        size = x.shape[1] if self.over_rows else self.block_values
        groups = x.reshape(-1, size)
        squares = ordered_sum((groups * groups).t().contiguous())
        mean = squares * f32(self.spread, x) / size
        root = square_root(mean[:, None] + groups * groups).reshape(x.shape)
        return importance * root

    @abstractmethod
    def encode(self, x: Tensor, w: Tensor | None = None) -> Tensor:
        """x f32 [B, block_values] and its weights, None without an importance -> uint8 blocks."""
