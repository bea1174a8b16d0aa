"""Packed layers of which this process has a part: some rows of W, or some columns.

A part is a layer of its own size, in_features and out_features included, and of its own bytes.
`shard` says which part of what it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import formats
from ..formats._bits import as_bytes
from .activations import of_call
from .collective import Ranks, all_gather, all_reduce, copied, on_every_rank
from .embedding import QuantEmbedding
from .linear import QuantLinear

_linear = torch.ops.metalmm.linear.default

Ranges = tuple[tuple[int, int], ...]  # for each rank the first row (column) and the one behind


@dataclass(frozen=True)
class Shard:
    """Which part of W [n, k] a layer has: rows or columns ranges[ranks.rank].

    Ranges of rows may overlap, where ranks share heads of keys and values. dense: the dtype of the
    layer's weight before it was sharded, if that was none of ours.
    """

    ranks: Ranks
    rows: bool
    ranges: Ranges
    n: int
    k: int
    format: str
    dense: torch.dtype | None = None

    @property
    def range(self) -> tuple[int, int]:
        return self.ranges[self.ranks.rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in self.ranges)

    def take(self, leaf: str, whole: Tensor) -> Tensor:
        """This rank's part of the whole layer's tensor of that name: a view of rows, or a copy.

        A dense weight gives its part, of a layer that was dense the bytes in the dtype that it had.
        """
        begin, end = self.range
        if leaf == "bias":
            return whole[begin:end] if self.rows else whole
        if leaf == "input_order":
            return self.of_inputs(whole)
        if whole.is_floating_point():
            part = whole[begin:end] if self.rows else whole[:, begin:end]
            if self.dense is None:
                return part
            return as_bytes(part.to(self.dense))
        if self.rows:
            return whole[begin:end]
        return columns(self.format, whole, self.k, begin, end)

    def of_inputs(self, values: Tensor) -> Tensor:
        """The part of `values` [K] that belongs to this rank's columns; a view."""
        return values if self.rows else values[slice(*self.range)]

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole packed weight of the ranks' parts."""
        if not self.rows:
            return join_columns(self.format, parts, self.k, self.ranges)
        whole = parts[0].new_empty(self.n, *parts[0].shape[1:])
        for part, (begin, end) in zip(parts, self.ranges, strict=True):
            whole[begin:end] = part
        return whole


def columns(format: str, packed: Tensor, k: int, begin: int, end: int) -> Tensor:
    """Columns begin to end - 1 of W [N, k] as packed rows of their own; whole blocks."""
    spec = formats.get(format)
    row = spec.row_bytes(end - begin)
    out = packed.new_empty(packed.shape[0], row)
    spans = _planes(spec, k, begin, end)
    at = 0
    for first, last in spans:
        out[:, at : at + last - first] = packed[:, first:last]
        at += last - first
    out[:, at:] = 0
    return out


def join_columns(format: str, parts: list[Tensor], k: int, ranges: Ranges) -> Tensor:
    """Inverse of columns() for the parts of all ranks."""
    spec = formats.get(format)
    out = parts[0].new_zeros(parts[0].shape[0], spec.row_bytes(k))
    for part, (begin, end) in zip(parts, ranges, strict=True):
        at = 0
        for first, last in _planes(spec, k, begin, end):
            out[:, first:last] = part[:, at : at + last - first]
            at += last - first
    return out


def _planes(spec: formats.Format, k: int, begin: int, end: int) -> list[tuple[int, int]]:
    """The bytes of a row of k values that hold the values begin to end - 1, in their order."""
    spec.row_bytes(begin), spec.row_bytes(end)  # ValueError: they cut a block
    if not isinstance(spec, formats.Affine):
        size, block = spec.block_bytes, spec.block_values
        return [(begin // block * size, end // block * size)]
    group, width = spec.block_values, spec.dtype.itemsize
    scales = k * spec.bits // 8
    biases = scales + k // group * width
    codes = begin * spec.bits // 8, end * spec.bits // 8
    a, b = begin // group * width, end // group * width
    return [codes, (scales + a, scales + b), (biases + a, biases + b)]


class Sharded(nn.Module):
    """The base of layers with a part of a weight."""

    shard: Shard

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """ValueError: weight has not the rows of this rank's part."""
        shard = self.__dict__.get("shard")
        if name == "weight" and param is not None and shard is not None:
            rows = shard.sizes[shard.ranks.rank] if shard.rows else shard.n
            if param.shape[0] != rows:
                part = f"rank {shard.ranks.rank} of {shard.ranks.size} has {rows} of {shard.n} rows"
                raise ValueError(f"weight: {part}; got {list(param.shape)}")
        super().register_parameter(name, param)


class RowsLinear(Sharded, QuantLinear):
    """The rows of W that this rank has: y is this rank's part of the outputs.

    gathered: y is gathered from all ranks, as if the layer were whole.
    """

    gathered = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(entered(self, x))
        return all_gather(y, self.shard.sizes, self.shard.ranks) if self.gathered else y


class ColumnsLinear(Sharded, QuantLinear):
    """The columns of W that this rank has: y is the sum of the ranks' products.

    x is this rank's part of the inputs, or, where `split_input`, all of them. The bias is added
    once, by rank 0.
    """

    split_input = False

    def forward(self, x: Tensor) -> Tensor:
        if self.split_input:
            order = self._buffers["input_order"]
            x = copied(x, self.shard.ranks)
            x = x[..., slice(*self.shard.range)] if order is None else x.index_select(-1, order)
        own, kind, ranks = self._parameters, of_call(self._activations, x), self.shard.ranks
        bias = own["bias"] if ranks.rank == 0 else None
        return all_reduce(_linear(x, own["weight"], bias, self.format, **kind), ranks)


class RowsEmbedding(Sharded, QuantEmbedding):
    """The rows of the vocabulary that this rank has: others' are zeros here, and all are summed."""

    def forward(self, input: Tensor) -> Tensor:
        """IndexError, on every rank: an id on the CPU that is not in the vocabulary. In a compiled
        graph its row is zeros."""
        begin, end = self.shard.range
        if input.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check(input)
        outside = (input < begin) | (input >= end)
        ids = (input - begin).masked_fill(outside, 0)
        y: Tensor = torch.ops.metalmm.embedding(
            ids, self.weight, self.format, self.embedding_dim, dtype=self.dtype
        )
        y = all_reduce(y.masked_fill(outside.unsqueeze(-1), 0), self.shard.ranks)
        scale = self._scale()  # scale of the whole row: a rank rounds no part of it
        return y if scale is None else y * scale

    def _check(self, ids: Tensor) -> None:
        wrong = ids[(ids < 0) | (ids >= self.shard.n)]
        if wrong.numel():
            raise IndexError(
                f"ids: {int(wrong[0])} is out of range; the table has {self.shard.n} rows"
            )


def entered(layer: Any, x: Tensor) -> Tensor:
    """x as the ops of the layer take it: the gradients of a rank's rows are summed over ranks."""
    return copied(x, layer.shard.ranks) if isinstance(layer, RowsLinear) else x


def everywhere(layer: Any, true: bool) -> bool:
    """Whether it is true on every rank that has a part of the layer: they must decide alike."""
    for module in layer.modules():
        if isinstance(module, Sharded):
            return on_every_rank(true, module.weight.device, module.shard.ranks)  # type: ignore
    return true


def is_sharded(model: Any) -> bool:
    """Whether a layer of the model has a part of its weight."""
    return any(isinstance(module, Sharded) for module in model.modules())
