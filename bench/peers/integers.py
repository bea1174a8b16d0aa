"""torch's own products with integer weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..devices import CPU, Device
from ..problem import Problem, Rounding, Variant, rotated
from .dense import GROUP

INNER_K_TILES = 8


class TorchInt4:
    """aten::_weight_int4pack_mm: 4-bit codes, bf16 scale and zero per 64, x in bf16."""

    def missing(self, device: Device) -> str | None:
        return None

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        n, k, device = problem.shape.n, problem.shape.k, problem.setting.device
        if k % (16 * INNER_K_TILES) or n % 16:
            return
        codes, scales, zeros = quantize_int4(problem.w)
        packed, op = pack_int4(codes, device)
        planes = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous().to(device.type)
        bytes = packed.nbytes + planes.nbytes
        count = problem.setting.copies(bytes)
        weights = list(zip(rotated(packed, count), rotated(planes, count), strict=True))

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(device.type, torch.bfloat16)
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
            device=device,
            bind=bind,
            decoded=lambda: decoded,
            rounding=Rounding.to(torch.bfloat16),
        )


def pack_int4(codes: Tensor, device: Device) -> tuple[Tensor, Callable[..., Tensor]]:
    """Codes int32 0..15 [N, K] as torch packs them for the device, and the op that multiplies."""
    aten = torch.ops.aten
    if device == CPU:
        packed = aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        return packed, aten._weight_int4pack_mm_for_cpu
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(device.type, torch.uint8)
    return aten._convert_weight_to_int4pack(pairs, INNER_K_TILES), aten._weight_int4pack_mm


def quantize_int4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """W -> codes int32 [N, K], scales, zeros bf16 [N, K / 64]; w = (code - 8) scale + zero."""
    groups = w.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min_(1e-8).bfloat16()
    zeros = (low + 8 * scales.float()).bfloat16()
    codes = ((groups - zeros.float().unsqueeze(-1)) / scales.float().unsqueeze(-1)).round_()
    return codes.clamp_(-8, 7).add_(8).int().flatten(1), scales, zeros


class TorchInt8:
    """aten::_weight_int8pack_mm: a bf16 scale per row, x in bf16."""

    def missing(self, device: Device) -> str | None:
        op = torch.ops.aten._weight_int8pack_mm.default
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), device.type.upper())
        return None if has_kernel else f"this torch has no int8 kernel for {device.type}"

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        device = problem.setting.device
        if problem.shape.n % 32 or problem.shape.k % 32:
            return
        scales = (problem.w.abs().amax(1) / 127).bfloat16()
        codes = (problem.w / scales.float().unsqueeze(1)).round_().clamp_(-128, 127).char()
        weights = rotated(codes.to(device.type), problem.setting.copies(codes.nbytes))
        factors = scales.to(device.type)
        op = torch.ops.aten._weight_int8pack_mm

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(device.type, torch.bfloat16)
            return lambda i: op(given, weights[i], factors)

        rows = problem.rows
        yield Variant(
            engine="torch",
            name="torch int8pack bf16",
            weight_bytes=codes.nbytes + scales.nbytes,
            copies=len(weights),
            device=device,
            bind=bind,
            decoded=lambda: codes[rows].double() * scales[rows].double().unsqueeze(1),
            rounding=Rounding.to(torch.bfloat16),
        )
