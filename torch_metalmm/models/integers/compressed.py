"""compressed-tensors' `pack-quantized`: signed codes as dense int32 words along a row.

w = scale (q - zero_point) with q and zero_point from -2**(bits - 1) on; both are stored with
2**(bits - 1) added. Its own decoding rounds w to the dtype of scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...formats._bits import as_bytes
from .affine import Rows, affine_rows, columns, from_stream, times_zero, words
from .checks import check, integer


def compressed_rows(t: Mapping[str, Tensor], n: int, k: int) -> Rows:
    """W[N, K] of a packed layer, bit for bit.

    t: weight_packed int32 [N, K * bits / 32], weight_scale float [N, G] (or one for all: [1] or
    [1, 1]), perhaps weight_zero_point int32 [ceil(N * bits / 32), G], weight_shape [2] and
    weight_g_idx int [K], the group of each column. 1 to 8 bits; 32 divides K.
    ValueError: tensors that contradict each other, a size without an affine format.
    """
    packed = check(t, "weight_packed", torch.int32, (n, None))
    bits = integer("bits", packed.shape[1] * 32, k)
    if bits > 8:
        raise ValueError(f"weight_packed has {bits} bits a code, at most 8 are known")
    if "weight_shape" in t and t["weight_shape"].tolist() != [n, k]:
        raise ValueError(f"weight_shape is {t['weight_shape'].tolist()}, the layer is [{n}, {k}]")
    scales = t.get("weight_scale")
    if scales is not None and scales.numel() == 1:
        scales = scales.reshape(1, 1).expand(n, 1)
    scales = check(
        {"weight_scale": scales} if scales is not None else {}, "weight_scale", None, (n, None)
    )
    groups = scales.shape[1]
    zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.float32)
    if "weight_zero_point" in t:
        rows = -(-n * bits // 32)
        stored = check(t, "weight_zero_point", torch.int32, (rows, groups))
        zeros = words(stored.t(), bits, n).t().float()
    order = None
    if "weight_g_idx" in t and not bool((t["weight_g_idx"] == -1).all()):  # -1: not in use
        order = columns(
            check(t, "weight_g_idx", (torch.int32, torch.int64), (k,)),
            integer("group size", k, groups),
        )
    stream = from_stream(as_bytes(packed), bits, k)
    return affine_rows(stream, scales, times_zero(scales, zeros), order)
