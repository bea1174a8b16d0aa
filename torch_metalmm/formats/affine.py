"""MLX affine formats: codes of 2 to 8 bits with a scale and a bias per group of values."""

from __future__ import annotations

import torch
from torch import Tensor

from ._base import Format
from ._bits import as_bytes, codes_to_stream, stream_to_codes
from ._planes import sizes_of
from ._search import elements_first, f32, groups_first, ordered_sum, to_code

ROW_ALIGNMENT = 16
TRIALS = 33

_SUFFIX = {torch.float16: "", torch.bfloat16: "_bf16", torch.float32: "_f32"}


class Affine(Format):
    """w = scale * q + bias, product and sum rounded to f32 one after the other, q in 0..2**bits-1.

    A row: codes (little-endian bit stream, K * bits / 8 bytes) | scales (K / group of dtype) |
    biases (the same) | zeros up to a multiple of 16 bytes.

    Quantizer, f32, per group, n = 2**bits - 1: s = max((max - min) / n, 1e-7f); if |min| > |max|
    edge = min, else edge = max and s = -s; z = rint(edge / s); if z != 0 then s = edge / z and
    bias = edge, else bias = 0; q = clamp(rint((x - bias) / s), 0, n); s and bias are rounded to
    dtype only when stored. With an importance w, this is the first of several trials, of which the
    least sum of w * (decoded - x)^2 is stored: `_search`.
    """

    weighs = True

    def __init__(self, bits: int, group: int, dtype: torch.dtype) -> None:
        self.name = f"affine{bits}_g{group}{_SUFFIX[dtype]}"
        self.bits = bits
        self.dtype = dtype
        self.block_values = group
        self.block_bytes = group * bits // 8 + 2 * dtype.itemsize
        if group > 32:
            self.fallback = f"affine{bits}_g{group // 2}{_SUFFIX[dtype]}"

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values, padding included. ValueError as Format.row_bytes."""
        return -(-super().row_bytes(k) // ROW_ALIGNMENT) * ROW_ALIGNMENT

    def pack(self, codes: Tensor, scales: Tensor, biases: Tensor) -> Tensor:
        """The tensors of an MLX layer -> uint8 [N, row_bytes(K)], no bit changed.

        codes uint32 [N, K * bits / 32], scales and biases of self.dtype [N, K / group].
        ValueError if a shape or dtype does not fit.
        """
        of_groups = {"scales": scales, "biases": biases}
        n, row_bytes = sizes_of(self, self.bits, codes, self.block_values, self.dtype, of_groups)
        planes = [as_bytes(plane) for plane in (codes, scales, biases)]
        unused = row_bytes - sum(plane.shape[1] for plane in planes)
        return torch.cat([*planes, planes[0].new_zeros(n, unused)], 1)

    def unpack(self, packed: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inverse of pack: (codes uint32, scales, biases)."""
        self._check_packed(packed, k)
        code_bytes = k * self.bits // 8
        plane = k // self.block_values * self.dtype.itemsize
        used = torch.split(packed[:, : code_bytes + 2 * plane], [code_bytes, plane, plane], 1)
        codes, *others = (p.clone(memory_format=torch.contiguous_format) for p in used)
        scales, biases = (p.view(self.dtype) for p in others)
        return codes.view(torch.uint32), scales, biases

    def _encode_rows(self, x: Tensor, importance: Tensor | None = None) -> Tensor:
        high = 2**self.bits - 1
        groups = x.reshape(x.shape[0], -1, self.block_values)
        lo, hi = groups.amin(dim=2), groups.amax(dim=2)
        s = torch.maximum((hi - lo) / high, f32(1e-7, x))
        low_edge = lo.abs() > hi.abs()
        edge = torch.where(low_edge, lo, hi)
        s = torch.where(low_edge, s, -s)
        zero = (edge / s).round()
        has_zero = zero != 0
        s = torch.where(has_zero, edge / zero, s)
        bias = torch.where(has_zero, edge, torch.zeros_like(edge))
        q = to_code((groups - bias[:, :, None]) / s[:, :, None], 0, high)
        if importance is not None:
            s, bias, q = self._search(x, importance, s, bias, q)
        codes = codes_to_stream(q.to(torch.uint8).reshape(x.shape[0], -1), self.bits)
        return self.pack(codes.view(torch.uint32), s.to(self.dtype), bias.to(self.dtype))

    def _search(
        self, x: Tensor, importance: Tensor, s: Tensor, bias: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best of the trial given, s and bias [R, G] and q [R, G, group], and TRIALS others.

        Trial t: l = clamp(rint(((t / 8 - 1) + n) / (max - min) * (x - min)), 0, n); s and bias are
        the weighted least squares of s * l + bias = x, as search_asymmetric's scale' and lo' before
        its `if`; both are rounded to dtype, and q = clamp(rint((x - bias) / s), 0, n). It replaces
        the best if det > 0 and its sum w * e * e, e = (s * q + bias) - x, is less.
        """
        high, size = 2**self.bits - 1, self.block_values
        xt, w = elements_first(x, size), elements_first(importance.expand_as(x), size)
        lo, hi = xt.amin(dim=0), xt.amax(dim=0)
        sum_w, sum_x = ordered_sum(w), ordered_sum(w * xt)

        def error(s: Tensor, bias: Tensor, q: Tensor) -> Tensor:
            e = s * q + bias - xt
            return ordered_sum(w * e * e)

        kept, low = self._rounded(s.flatten()), self._rounded(bias.flatten())
        codes = q.reshape(-1, size).t().contiguous()
        best = error(kept, low, codes)
        for t in range(TRIALS):
            inv = (f32(t / 8 - 1, x) + high) / (hi - lo)
            code = to_code(inv * (xt - lo), 0, high)
            wq = w * code
            s1, s2, sx = ordered_sum(wq), ordered_sum(wq * code), ordered_sum(wq * xt)
            det = sum_w * s2 - s1 * s1
            scale = self._rounded((sum_w * sx - sum_x * s1) / det)
            offset = self._rounded((s2 * sum_x - s1 * sx) / det)
            code = to_code((xt - offset) / scale, 0, high)
            this = error(scale, offset, code)
            better = (det > 0) & (this < best)
            kept, low = torch.where(better, scale, kept), torch.where(better, offset, low)
            codes, best = torch.where(better, code, codes), torch.where(better, this, best)
        return kept.reshape(s.shape), low.reshape(s.shape), groups_first(codes, x.shape[0])

    def _rounded(self, t: Tensor) -> Tensor:
        """f32 -> f32 of the nearest value of dtype."""
        return t.to(self.dtype).float()

    def _decode_rows(self, packed: Tensor, k: int) -> Tensor:
        codes, scales, biases = self.unpack(packed, k)
        q = stream_to_codes(codes.view(torch.uint8), self.bits).float()
        groups = q.reshape(q.shape[0], -1, self.block_values)
        w = scales.float()[:, :, None] * groups + biases.float()[:, :, None]
        return w.reshape(q.shape[0], k)


AFFINE = tuple(
    Affine(bits, group, dtype)
    for bits in (2, 3, 4, 5, 6, 8)
    for group in (32, 64, 128)
    for dtype in _SUFFIX
)
