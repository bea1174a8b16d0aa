"""torchao's Int4Tensor (packing format "plain"): signed nibbles along a row, and a float to add.

w = scale q + zero_point with q in -8 .. 7. For q + 8, unsigned, the bias is zero_point - 8 scale,
rounded to f32: exact for bf16 unless scale and zero_point differ by a factor of 2**12 and more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .affine import NoFormat, Rows, affine_rows, from_stream
from .checks import check


def torchao_rows(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    """W[N, K] of an Int4Tensor.

    t: qdata uint8 or int8 [N, K / 2], even columns in the low nibbles; scale and zero_point float
    [G, N]. ValueError: tensors that contradict each other, a size without an affine format.
    """
    if "act_pre_scale" in t:
        raise NoFormat("act_pre_scale multiplies activations, which is not done here")
    qdata = check(t, "qdata", (torch.uint8, torch.int8), (n, k // 2))
    scale = check(t, "scale", None, (None, n)).t()
    zero = check(t, "zero_point", None, (scale.shape[1], n)).t()
    unsigned = qdata.contiguous().view(torch.uint8) ^ 0x88  # a nibble of 4 signed bits plus 8
    return affine_rows(from_stream(unsigned, 4, k), scale, zero.float() - 8 * scale.float())
