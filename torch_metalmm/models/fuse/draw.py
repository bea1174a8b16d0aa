"""Random numbers, the same at every call, whatever the caller's generator, device and dtype are."""

from __future__ import annotations

import torch
from torch import Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal f32 numbers on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def numbers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu", dtype=torch.long)
