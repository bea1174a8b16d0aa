"""What `python -m bench matrix-ops` checks and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Operation:
    """call(i) computes with copy i of the operands; exact is float64, of the outputs `checked`."""

    call: Callable[[int], Tensor]
    copies: int
    checked: Callable[[Tensor], Tensor]
    exact: Tensor
    bound: Tensor
    bytes: float
    flops: float
    unfused: Callable[[int], Tensor] | None = None  # the same by several calls, timed beside it
