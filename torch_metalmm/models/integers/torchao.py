"""torchao: nibbles and a float to add (Int4Tensor), or a byte for each code (the other two).

Int4Tensor, of the packing format "plain": w = scale q + zero_point with q in -8 .. 7. For q + 8,
unsigned, the bias is zero_point - 8 scale, rounded to f32: exact for bf16 unless scale and
zero_point differ by a factor of 2**12 and more.
IntxUnpackedToInt8Tensor, Int8Tensor: w = scale (q - zero_point), q an int8 of perhaps fewer bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...formats._bits import as_bytes
from .affine import Codes, NoFormat, Rows, affine_rows, from_stream, times_zero
from .checks import check

# The dtypes that a zero_point of integers may have, that of the scales among them.
_NUMBERS = (torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32)


def torchao_rows(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    """W[N, K] of a tensor of torchao.

    t: qdata uint8 or int8 [N, K / 2], even columns in the low nibbles, scale and zero_point float
    [G, N]; or qdata int8 [N, K], scale float [N, G], perhaps zero_point [N, G] of integers.
    ValueError: tensors that contradict each other. NoFormat: a size without an affine format, or
    activations that are multiplied before.
    """
    if "act_pre_scale" in t:
        raise NoFormat("act_pre_scale multiplies activations, which is not done here")
    qdata = t.get("qdata")
    if qdata is not None and qdata.dtype == torch.int8 and tuple(qdata.shape) == (n, k):
        return _bytes(t, n, k)
    return _nibbles(t, n, k)


def _nibbles(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    qdata = check(t, "qdata", (torch.uint8, torch.int8), (n, k // 2))
    scale = check(t, "scale", None, (None, n)).t()
    zero = check(t, "zero_point", None, (scale.shape[1], n)).t()
    unsigned = as_bytes(qdata) ^ 0x88  # a nibble of 4 signed bits plus 8
    return affine_rows(from_stream(unsigned, 4, k), scale, zero.float() - 8 * scale.float())


def _bytes(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    scale = check(t, "scale", None, (n, None))
    zero = torch.zeros_like(scale, dtype=torch.float32)
    if "zero_point" in t:
        zero = check(t, "zero_point", _NUMBERS, (n, scale.shape[1])).float()
        if not torch.equal(zero, zero.round()):
            raise NoFormat("zero_point must be of integers where codes have a byte each")
    q = t["qdata"]
    low, high = (int(value) for value in torch.aminmax(q)) if q.numel() else (0, 0)
    bits = max(2, (-1 - low).bit_length() + 1, high.bit_length() + 1)  # enough for all codes
    half = 2 ** (bits - 1)
    codes = Codes(n, k, bits, lambda rows: (q[rows].to(torch.int16) + half).to(torch.uint8))
    return affine_rows(codes, scale, times_zero(scale, zero + half))
