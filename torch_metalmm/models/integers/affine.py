"""Integer codes with a scale and a zero for each group -> the bytes of an affine format.

No weight is rounded: scale (q - zero) becomes scale q + bias, bias = -scale zero. With a scale in
f16 or bf16 and a zero of up to 8 bits each of these products and sums has at most 21 significant
bits, so that f32 holds them all. With a scale in f32 both products and the sum are rounded: w is
within 2**-24 (|scale q| + |scale zero| + |w|), but for terms of 2**-48, of its value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import formats
from ...formats._base import row_slices
from ...formats._bits import as_bytes, codes_to_stream, stream_to_codes

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (128, 64, 32)


class NoFormat(ValueError):
    """The tensors are valid, but no affine format has their values."""


@dataclass(frozen=True)
class Rows:
    """A weight W[N, K] as QuantLinear.from_packed takes it, and the order of its columns."""

    format: str
    weight: Tensor  # uint8 [N, row_bytes]
    input_order: Tensor | None = None  # int64 [K], see QuantLinear; None: as they are


@dataclass(frozen=True)
class Codes:
    """Unsigned codes of a W[N, K], asked for some rows at a time.

    from_stream decodes no more than these, for all codes take 2 to 4 times the memory of their
    stream. AWQ's and HQQ's rows lie across words, and are slices of codes decoded at once.
    """

    n: int
    k: int
    bits: int
    rows: Callable[[slice], Tensor]  # uint8 [rows, K], each below 2**bits


def from_stream(stream: Tensor, bits: int, k: int) -> Codes:
    """Codes of a little-endian bit stream, uint8 [N, K * bits / 8]."""
    return Codes(len(stream), k, bits, lambda rows: stream_to_codes(stream[rows], bits))


def words(tensor: Tensor, bits: int, count: int) -> Tensor:
    """int32 words of rows -> their first `count` codes, uint8 [R, count]; low bits first."""
    stream = as_bytes(tensor)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % bits))
    return stream_to_codes(stream, bits)[:, :count]


def group_size(group: int, k: int) -> int:
    """The size of the affine groups that a group of so many values falls into.

    ValueError: the group does not divide K. NoFormat: 32 does not divide the group.
    """
    if group <= 0 or k % group:
        raise ValueError(f"groups of {group} values do not divide K = {k}")
    for size in _GROUPS:
        if group % size == 0:
            return size
    raise NoFormat(f"groups of {group} values have no affine format: a multiple of 32 has one")


def times_zero(scales: Tensor, zeros: Tensor) -> Tensor:
    """The bias of scale (q - zero): f32 [N, G]. scales and zeros [N, G]."""
    return -(scales.float() * zeros.float())


def columns(groups: Tensor, group: int) -> Tensor | None:
    """The order of columns, int64 [K], in which groups lie one after the other; None: they do.

    groups int [K]: the group of each column (GPTQ's g_idx). ValueError: a group has not `group`
    columns.
    """
    k = len(groups)
    count = k // group
    in_range = bool(((groups >= 0) & (groups < count)).all())
    sizes = torch.bincount(groups.long(), minlength=count) if in_range else None
    if sizes is None or not bool((sizes == group).all()):
        raise ValueError(f"g_idx does not give each of {count} groups {group} of the {k} columns")
    order = groups.long().argsort(stable=True)
    return None if torch.equal(order, torch.arange(k, device=order.device)) else order


def affine_rows(codes: Codes, scales: Tensor, biases: Tensor, order: Tensor | None = None) -> Rows:
    """w = scale q + bias in an affine format.

    scales float [N, G], biases f32 [N, G], G groups of K / G columns. Where every bias is a number
    of the dtype of the scales the format keeps that dtype (a symmetric quantizer's zero is a power
    of two), else both are f32. A group of more than 128 values becomes several of the same scale.
    order: the columns of the result are those of `codes` in this order, int64 [K].
    NoFormat: no affine format has the sizes. ValueError: a scale is NaN, infinite or no float.
    """
    n, k, groups = codes.n, codes.k, scales.shape[1]
    if k == 0 or groups == 0 or k % groups:
        raise ValueError(f"scales {list(scales.shape)} are no groups of K = {k} values")
    size = group_size(k // groups, k)
    if not scales.is_floating_point() or not bool(torch.isfinite(scales).all()):
        raise ValueError(f"scales must be finite floats, got {scales.dtype} with NaN or Inf")
    if not bool(torch.isfinite(biases).all()):
        raise ValueError("a scale times its zero is beyond f32")
    if scales.dtype not in (torch.float16, torch.bfloat16) or not torch.equal(
        biases.to(scales.dtype).float(), biases
    ):
        scales, biases = scales.float(), biases.float()
    bits = next((b for b in _BITS if b >= codes.bits), None)
    if bits is None:
        raise NoFormat(f"codes of {codes.bits} bits have no affine format, 8 bits are the most")
    spec = formats.affine(bits, size, scales.dtype)
    copies = k // groups // size
    planes = [t.to(scales.dtype).repeat_interleave(copies, 1) for t in (scales, biases)]
    stream = torch.empty(n, k * bits // 8, dtype=torch.uint8, device=scales.device)
    for rows in row_slices(n, k):
        q = codes.rows(rows)
        stream[rows] = codes_to_stream(q if order is None else q[:, order], bits)
    return Rows(spec.name, spec.pack(stream.view(torch.uint32), *planes), order)
