"""The variants of torch that torch_metalmm is compared with in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .problem import Problem, Rounding, Variant, rotated, unit

GROUP = 64


class TorchDense:
    """F.linear with W, x and y in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = "F.linear " + {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]

    def missing(self) -> str | None:
        return None

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        w = problem.w.to(self.dtype)
        weights = rotated(w, problem.copies(w.nbytes))
        linear = torch.nn.functional.linear

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(self.dtype)
            return lambda i: linear(given, weights[i])

        exact = self.dtype is torch.float32
        yield Variant(
            engine="torch",
            name=self.name,
            weight_bytes=w.nbytes,
            copies=len(weights),
            bind=bind,
            decoded=lambda: w[problem.rows].double(),
            rounding=Rounding() if exact else Rounding.to(self.dtype),
        )


class TorchInt4:
    """aten::_weight_int4pack_mm_for_cpu: 4-bit codes, bf16 scale and zero per 64, x in bf16."""

    def missing(self) -> str | None:
        op = "_convert_weight_to_int4pack_for_cpu"
        return None if hasattr(torch.ops.aten, op) else "this torch has no int4 CPU kernel"

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        if problem.shape.k % GROUP or problem.shape.n % 16:
            return
        codes, scales, zeros = quantize_int4(problem.w)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        planes = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous()
        bytes = packed.nbytes + planes.nbytes
        count = problem.copies(bytes)
        weights = list(zip(rotated(packed, count), rotated(planes, count), strict=True))
        op = torch.ops.aten._weight_int4pack_mm_for_cpu

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.bfloat16()
            return lambda i: op(given, weights[i][0], GROUP, weights[i][1])

        rows = problem.rows
        steps = (codes[rows] - 8).double().unflatten(1, (-1, GROUP))
        scale, zero = scales[rows].double(), zeros[rows].double()
        decoded = (steps * scale.unsqueeze(-1) + zero.unsqueeze(-1)).flatten(1)

        yield Variant(
            engine="torch",
            name=f"torch int4pack g{GROUP} bf16",
            weight_bytes=bytes,
            copies=count,
            bind=bind,
            decoded=lambda: decoded,
            rounding=Rounding.to(torch.bfloat16),
        )


def quantize_int4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W -> codes int32 [N, K], scales, zeros bf16 [N, K / 64]; w = (code - 8) scale + zero."""
    groups = w.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min_(1e-8).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round_()
    return codes.clamp_(-8, 7).add_(8).int().flatten(1), scales, zeros


def int8_activations(block: int) -> Rounding:
    """x rounded to multiples of its block's maximum / 127, the factor held in f16."""

    def x_error(x: Tensor) -> Tensor:
        largest = x.abs().unflatten(-1, (-1, block)).amax(-1, keepdim=True)
        step = largest / 127 * (0.5 + 127 * unit(torch.float16))
        return step.expand(*step.shape[:-1], block).flatten(-2)

    return Rounding(x_error)
