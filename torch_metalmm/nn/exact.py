"""Steps of several rows with the bits of single ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Up to so many rows there are kernels that give a row the bits that it has alone, and read W once
# for all (csrc/plan: Problem::exact_rows).
MOST = 8


class _Mode(threading.local):
    on = False


_mode = _Mode()


@contextmanager
def exact_rows(on: bool = True) -> Iterator[None]:
    """Inside, ops of this thread on up to 8 rows of x, or queries, give each the bits that it has
    alone: a strategy of plan(), in place of the fastest. Compiled graphs do not know it."""
    before, _mode.on = _mode.on, on
    torch.ops.metalmm._exact_rows(on)
    try:
        yield
    finally:
        _mode.on = before
        torch.ops.metalmm._exact_rows(before)


def is_exact() -> bool:
    """Whether ops of this thread are asked for the bits of single rows."""
    return not torch.compiler.is_compiling() and _mode.on


def as_one_row(x: Tensor) -> bool:
    """Whether a layer computes x [..., K] as it does a single row."""
    # torch.Size.numel would make a constant of a symbolic size.
    return x.numel() == x.shape[-1] or (is_exact() and x.numel() <= MOST * x.shape[-1])
