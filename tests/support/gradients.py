"""Gradients of an op beside those of a function in float64, by autograd of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from backends import Backend, leaf
from oracle import U
from torch import Tensor

TERMS = 64  # K of the calls


def same_gradients(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: list[Tensor],
    backend: Backend,
) -> None:
    """First and second derivatives agree to the rounding of a few dozen sums of TERMS each."""
    moved = [leaf(t, backend) for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]

    def derivatives(f: Callable[..., Any], at: list[Tensor]) -> list[Tensor]:
        y = f(*at)
        outputs = y if isinstance(y, tuple) else (y,)
        total = sum((t * torch.cos(t.detach())).sum() for t in outputs)
        first = torch.autograd.grad(total, at, create_graph=True)
        norm = sum(d.square().sum() for d in first)
        is_curved = norm.requires_grad
        second = torch.autograd.grad(norm, at, allow_unused=True) if is_curved else ()
        return [*first, *(d for d in second if d is not None)]

    got, want = derivatives(op, moved), derivatives(reference, exact)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        error, size = (
            float(t.norm()) for t in (a.detach().cpu().double() - b.detach(), b.detach())
        )
        print(f"error / bound = {error / (64 * TERMS * U * size + 1e-30):.3g}")
        assert error <= 64 * TERMS * U * size
