"""The dense peers: torch's own products, and decoding W before them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_metalmm import formats

from ..devices import CPU, Device
from ..problem import LABELS, Problem, Rounding, Variant, rotated, unit

GROUP = 64  # values per scale, where a peer lets us choose


class TorchDense:
    """F.linear with W, x and y in one dtype."""

    label = "F.linear"
    max_m: int | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def missing(self, device: Device) -> str | None:
        return "slow on the CPU" if device == CPU and self.dtype is torch.float16 else None

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, w)

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        device = problem.setting.device
        w = problem.w.to(self.dtype)
        weights = rotated(w.to(device.type), problem.setting.copies(w.nbytes))

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(device.type, self.dtype)
            return lambda i: self.product(given, weights[i])

        exact = self.dtype is torch.float32
        yield Variant(
            engine="torch",
            name=f"{self.label} {LABELS[self.dtype]}",
            weight_bytes=w.nbytes,
            copies=len(weights),
            device=device,
            bind=bind,
            decoded=lambda: w[problem.rows].double(),
            rounding=Rounding() if exact else Rounding.to(self.dtype),
            max_m=self.max_m,
        )


class TorchMv(TorchDense):
    """torch.mv, for one row of x."""

    label = "torch.mv"
    max_m = 1

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.mv(w, x[0]).unsqueeze(0)


class DequantizeAndMm:
    """torch.ops.metalmm.dequantize, then F.linear: what a loader without fused kernels does."""

    def missing(self, device: Device) -> str | None:
        return None

    def variants(self, problem: Problem, names: Sequence[str]) -> Iterator[Variant]:
        for name in names:
            if problem.shape.k % formats.get(name).block_values == 0:
                yield self._variant(problem, name)

    def _variant(self, problem: Problem, name: str) -> Variant:
        k, setting = problem.shape.k, problem.setting
        ops = torch.ops.metalmm
        packed = problem.packed(name)
        weights = rotated(packed.to(setting.device.type), setting.copies(packed.nbytes))

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given, dtype = x.to(setting.device.type, setting.dtype), setting.dtype
            linear = torch.nn.functional.linear
            return lambda i: linear(given, ops.dequantize(weights[i], name, k, dtype=dtype))

        rounded = unit(setting.dtype) * 2  # of x, and of the decoded W
        exact = setting.dtype is torch.float32
        return Variant(
            engine="torch",
            name=f"dequantize {name} + F.linear",
            format=name,
            weight_bytes=packed.nbytes,
            copies=len(weights),
            device=setting.device,
            bind=bind,
            decoded=lambda: problem.decoded(packed, name),
            rounding=Rounding() if exact else Rounding(lambda x: x.abs() * rounded, setting.dtype),
        )


def int8_activations(block: int, scale: torch.dtype = torch.float16) -> Rounding:
    """x rounded to multiples of its block's maximum / 127, the factor held in `scale`."""

    def x_error(x: Tensor) -> Tensor:
        largest = x.abs().unflatten(-1, (-1, block)).amax(-1, keepdim=True)
        step = largest / 127 * (0.5 + 127 * unit(scale))
        return step.expand(*step.shape[:-1], block).flatten(-2)

    return Rounding(x_error)
