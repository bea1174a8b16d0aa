"""A check of `metalmm doctor`, and how its result is judged.

Every reference is the specification (torch_metalmm.formats) and float64 on the CPU, never the
engine under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import formats

N, K = 96, 512  # size of W, where a check asks for no other


class Skipped(Exception):
    """A check that this machine cannot run; the message says why."""


@dataclass(frozen=True)
class Found:
    """The error of a result, the largest that rounding explains, and what else to tell."""

    error: float
    bound: float
    note: str = ""


Prepared = tuple[Callable[[], Tensor], Callable[[Tensor], Found]]


@dataclass(frozen=True)
class Check:
    """A computation on a device: prepare() gives what is run and timed, and a judge of its result.

    prepare() raises Skipped where this machine cannot run it. heavy: it takes seconds on a CPU, or
    gigabytes.
    """

    name: str
    prepare: Callable[[], Prepared]
    heavy: bool = False


def synchronize(device: str) -> None:
    """Wait until the device has done what was queued."""
    if device != "cpu":
        getattr(torch, device).synchronize()


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, f32 on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_and_decoded(name: str, n: int = N, k: int = K, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A packed weight [n, k] on the CPU and, in f64, what the specification decodes it to."""
    packed = formats.get(name).quantize(random(n, k, seed=seed))
    return packed, formats.get(name).dequantize(packed, k).double()


def compare(y: Tensor, x: Tensor, w: Tensor, start: Tensor | None = None) -> Found:
    """y against x Wᵀ (+ start): the largest error over |x| |W|ᵀ, and what rounding may make of it.

    Every product and sum in f32; the weights, the product where `start` joins it, and the result in
    the dtype of x.
    """
    x64 = x.cpu().double()
    want, scale = x64 @ w.T, x64.abs() @ w.abs().T
    if start is not None:
        want, scale = want + start.cpu().double(), scale + start.cpu().double().abs()
    return worst(y, want, scale, x.shape[-1] * 2.0**-23 + 2 * torch.finfo(x.dtype).eps)


def exactly(y: Tensor, want: Tensor) -> Found:
    """y against values that are stored and loaded, not computed."""
    return worst(y, want.double(), torch.ones_like(want, dtype=torch.float64), 0.0)


def worst(y: Tensor, want: Tensor, scale: Tensor, bound: float) -> Found:
    """The largest |y - want| / scale; where it is too large, the element that has it, in words."""
    given = y.cpu().double()
    errors = torch.nan_to_num((given - want).abs() / scale, nan=torch.inf)
    error = errors.max().item()
    if error <= bound:
        return Found(error, bound)
    at = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)]
    wrong, all_of = int((errors > bound).sum()), errors.numel()
    pair = given[tuple(at)].item(), want[tuple(at)].item()
    note = f"{wrong} of {all_of} values, the worst at {at}: {pair[0]:.9g}, not {pair[1]:.9g}"
    return Found(error, bound, note)
