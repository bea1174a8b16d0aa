"""HQQ: codes of groups along K, packed from rows that lie far apart; zeros may be fractions.

w = scale (q - zero). Here w is HQQ's value in f32 arithmetic. HQQ rounds q - zero, and then w, to
its compute dtype, so that its w differs by a relative error of 2u + u², u being the unit roundoff.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .affine import Codes, Rows, affine_rows, times_zero
from .checks import check, integer

# name of the packing: (its dtype, codes of a word, bits of a code)
PACKINGS = {
    "8bit_u8": (torch.uint8, 1, 8),
    "4bit_u8": (torch.uint8, 2, 4),
    "3bit_32": (torch.int32, 10, 3),
    "2bit_u8": (torch.uint8, 4, 2),
    "1bit_u8": (torch.uint8, 8, 1),
}


def hqq_rows(t: Mapping[str, Tensor], n: int, k: int, packing: str) -> Rows:
    """W[N, K] of an HQQ layer quantized along K (axis 1).

    t: W_q of the packing's dtype, or its bytes viewed as another; scale, zero float [N * G, 1].
    ValueError: tensors that contradict each other, a packing or size without an affine format.
    """
    if packing not in PACKINGS:
        raise ValueError(f"packing is {packing!r}, known are {', '.join(PACKINGS)}")
    dtype, count, bits = PACKINGS[packing]
    if "W_q" not in t:
        raise ValueError("W_q is missing")
    scale = check(t, "scale", None, (None, 1))
    zero = check(t, "zero", None, (len(scale), 1))
    groups = integer("groups of a row", len(scale), n)
    size = integer("group size", k, groups)
    rows = -(-len(scale) // count)
    packed = check({"W_q": t["W_q"].contiguous().view(dtype)}, "W_q", dtype, (rows, size))
    # Word r holds the groups r, r + rows, r + 2 rows, ..., the first in its highest bits.
    shifts = range((count - 1) * bits, -1, -bits)
    codes = torch.cat([((packed >> s) & (2**bits - 1)).to(torch.uint8) for s in shifts])
    codes = codes[: len(scale)].reshape(n, k)
    scales, zeros = scale.reshape(n, groups), zero.reshape(n, groups)
    return affine_rows(Codes(n, k, bits, lambda r: codes[r]), scales, times_zero(scales, zeros))
