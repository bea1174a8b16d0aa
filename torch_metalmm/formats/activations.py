"""The specification of rounded activations: what a product with activations="int8" or "int16" takes
for x.

A block is 32 consecutive values of a row; with a = max |x| of a block, top = 127 of int8 and
127 * 256 of int16, every operation rounded to f32 and ties to even:

    scale = a / top        code = round(x * (top / a))        x is taken for code * scale

* |code| <= top; the value of largest magnitude has top or -top. Codes of int16 stop at 127 * 256
  because a kernel takes them apart into two of 8 bits, 255 high + low.
* a < top * 2**-126, where the scale would be subnormal: scale and codes are 0.
* NaN or infinity in a block: its scale is NaN, its codes are 0, and results of that row are NaN.

Blocks of 32 suit every packed format, whose blocks are multiples of 32. One scale for 256 values,
as ggml's for K-quants, would save a multiplication for each 32 and lose up to three bits of the
values beside a large one.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
# By the name of an argument `activations`, which is that of the dtype of the codes.
TOP_CODES = {"int8": 127, "int16": 127 * 256}


def smallest(kind: str) -> float:
    """The least maximum of a block that has a scale."""
    return float(TOP_CODES[kind] * 2.0**-126)


def quantize(x: Tensor, kind: str = "int8") -> tuple[Tensor, Tensor]:
    """x f32, f16 or bf16 [..., K] -> codes of the dtype `kind` [..., K], scales f32 [..., K / 32].

    ValueError: K is not a multiple of 32. KeyError: no such kind.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"x: K = {x.shape[-1]} is not a multiple of the block of {BLOCK} values")
    shape = (*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    blocks = x.detach().to(torch.float32).reshape(shape)
    finite = blocks.isfinite().all(-1)
    largest = torch.where(finite, blocks.abs().amax(-1), 0.0)
    used = largest >= smallest(kind)
    top = torch.tensor(float(TOP_CODES[kind]))
    factor = torch.where(used, top / torch.where(used, largest, 1.0), 0.0)
    values = torch.where(finite[..., None], blocks, 0.0)
    codes = (values * factor[..., None]).round().to(getattr(torch, kind))
    scales = torch.where(used, largest / top, 0.0).masked_fill(~finite, torch.nan)
    return codes.flatten(-2), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """codes int8 or int16 [..., K], scales f32 [..., K / 32] -> float64 [..., K], exact."""
    return codes.double() * scales.double().repeat_interleave(BLOCK, -1)
