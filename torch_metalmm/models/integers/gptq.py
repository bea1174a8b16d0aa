"""GPTQ and AWQ: int32 words of codes beside scales and zeros, W stored as [K, N].

The layouts are those of AutoGPTQ and GPTQModel (checkpoint_format gptq and gptq_v2) and of AutoAWQ
(version gemm). Both give w = scale (q - zero); their own decoding rounds it to the dtype of scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...formats._bits import as_bytes
from .affine import Codes, Rows, affine_rows, columns, from_stream, times_zero, words
from .checks import check, integer

GPTQ_BITS = (2, 3, 4, 8)
# 1 in each code of a word, where codes do not straddle words. GPTQModel subtracts it from whole
# words to make version 1, so that a zero of 0 borrows from the next code.
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
# Column c of eight is nibble _AWQ[c] of its word.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq_rows(t: Mapping[str, Tensor], n: int, k: int, stored_minus_one: bool) -> Rows:
    """W[N, K] of a GPTQ layer, bit for bit.

    t: qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales float [G, N], and
    perhaps g_idx int [K], the group of each column. bits and group size are what the shapes say.
    stored_minus_one: version 1, where qzeros holds zero - 1: of 2, 4 and 8 bits subtracted from
    int32 words, which wrap; of 3 bits from each code, modulo 8.
    ValueError: tensors that contradict each other, a size without an affine format.
    """
    check(t, "qweight", torch.int32, (None, n))
    bits = integer("bits", t["qweight"].shape[0] * 32, k)
    if bits not in GPTQ_BITS:
        raise ValueError(f"qweight has {bits} bits a code, GPTQ has {GPTQ_BITS}")
    scales = check(t, "scales", None, (None, n)).t()
    groups = scales.shape[1]
    qzeros = check(t, "qzeros", torch.int32, (groups, -(-n * bits // 32)))
    if stored_minus_one and bits in _ONES:
        qzeros = qzeros + _ONES[bits]
    zeros = words(qzeros, bits, n).t()
    if stored_minus_one and bits not in _ONES:
        zeros = (zeros + 1) & (2**bits - 1)
    order = None
    if "g_idx" in t:
        size = integer("group size", k, groups)
        order = columns(check(t, "g_idx", (torch.int32, torch.int64), (k,)), size)
    stream = as_bytes(t["qweight"].t())
    return affine_rows(from_stream(stream, bits, k), scales, times_zero(scales, zeros), order)


def awq_rows(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    """W[N, K] of an AWQ layer, bit for bit.

    t: qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales float [G, N], 4 bits a code.
    ValueError: tensors that contradict each other, a size without an affine format.
    """
    across = integer("words of a row", n, 8)
    qweight = check(t, "qweight", torch.int32, (k, across))
    scales = check(t, "scales", None, (None, n)).t()
    zeros = _in_order(check(t, "qzeros", torch.int32, (scales.shape[1], across)))
    codes = _in_order(qweight)
    return affine_rows(Codes(n, k, 4, lambda rows: codes[rows]), scales, times_zero(scales, zeros))


def _in_order(nibbles: Tensor) -> Tensor:
    """Words [R, N / 8] of AWQ -> codes [N, R]."""
    count = nibbles.shape[1] * 8
    codes = words(nibbles, 4, count).view(len(nibbles), -1, 8)[:, :, list(_AWQ)]
    return codes.reshape(len(nibbles), count).t().contiguous()
