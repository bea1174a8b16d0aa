"""What the short runs share by which fuse_ finds and confirms what a module computes.

Random numbers are the same at every call, whatever the caller's generator, device and dtype are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Unknown(Exception):
    """The layer does something that no recipe says."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal f32 numbers on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def numbers(below: int, *shape: int, seed: int = 0) -> Tensor:
    """Whole numbers from 0 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(below, shape, generator=generator, device="cpu", dtype=torch.long)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in eval mode; every training flag is put back."""
    training = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, was_training in training:
            m.training = was_training
