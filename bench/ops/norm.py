"""`python -m bench norm`: what a norm before a product and a residual after it cost in one op.

norm_linear against rms_norm and then linear, linear with a residual against linear and then add, at
few rows of x and for every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import formats

from ..problem import (
    LABELS,
    Setting,
    copied_rows,
    of_additions,
    of_store,
    rotated,
    unit,
    verdict,
    worst_of,
)
from ..runner import Cell, Record, Run, Way, named
from ..shapes import Shape, parse_ints, parse_shape

ops = torch.ops.metalmm
EPS = 1e-5
ROUNDINGS = 8  # of the square root, the quotient and the products of the norm, in f32


class Data:
    """W, x, the norm's weight and the residual of one format and shape, on the device."""

    def __init__(self, shape: Shape, format: str, m: int, setting: Setting) -> None:
        self.shape, self.format, self.m, self.setting = shape, format, m, setting
        make = torch.Generator().manual_seed(shape.n * 31 + shape.k)
        put: dict[str, Any] = {"device": setting.device.type, "dtype": setting.dtype}
        pattern, self.decoded, self.picks = copied_rows(shape.n, shape.k, format, make)
        packed = pattern.to(setting.device.type)[self.picks.to(setting.device.type)]
        self.weights = rotated(packed, setting.copies(packed.nbytes))
        self.x = torch.randn(m, shape.k, generator=make).to(**put)
        self.g = (torch.rand(shape.k, generator=make) + 0.5).to(**put)
        self.residual = torch.randn(m, shape.n, generator=make).to(**put)

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """By name; call(i) takes copy i of W."""
        x, g, residual, format, w = self.x, self.g, self.residual, self.format, self.weights
        linear, norm, both = ops.linear.default, ops.rms_norm.default, ops.norm_linear.default
        return {
            "linear": lambda i: linear(x, w[i], None, format),
            "rms_norm": lambda i: norm(x, g, EPS),
            "norm_linear": lambda i: both(x, g, EPS, 0.0, w[i], None, format),
            "norm_then_linear": lambda i: linear(norm(x, g, EPS), w[i], None, format),
            "residual": lambda i: linear(x, w[i], None, format, None, residual),
            "linear_then_add": lambda i: residual + linear(x, w[i], None, format),
        }

    def check(self, name: str, call: Callable[[int], Tensor]) -> Record:
        """norm_linear, or linear with a residual.

        The bound lets the norm be rounded to the dtype of x, and W too where x is f16: the plan may
        take two passes, and a matrix kernel.
        """
        dtype, k = self.setting.dtype, self.shape.k
        x, g, residual = (t.cpu().double() for t in (self.x, self.g, self.residual))
        r = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        half = 0.0 if dtype is torch.float32 else 2 * unit(dtype)
        given, added = (x * r * g, 0.0) if name == "norm_linear" else (x, residual)
        exact = (given @ self.decoded.t())[:, self.picks] + added
        size = (given.abs() @ self.decoded.abs().t())[:, self.picks]
        error = 2 * of_additions(k, size) + (half + ROUNDINGS * unit(torch.float32)) * size
        error += unit(torch.float32) * exact.abs()
        y = call(len(self.weights) - 1)
        return verdict(worst_of(y, exact, of_store(exact, error, dtype)))

    def cell(self) -> Cell:
        against = {"norm_linear": "norm_then_linear", "residual": "linear_then_add"}
        calls, ways = self.calls(), []
        for name, call in calls.items():
            other = against.get(name)
            check = (lambda n=name, c=call: self.check(n, c)) if other else None
            of = {"of_two_ops": other} if other else {}
            # The table says how much of the time of two ops one takes.
            ways.append(Way(name, call, len(self.weights), check, against=of))
        s = self.shape
        about = {"format": self.format, "n": s.n, "k": s.k, "m": self.m, "w": f"{s.n}×{s.k}"}
        title = f"A norm before a product, a residual after it, x in {LABELS[self.setting.dtype]}"
        return Cell("norm", title, about, ways, self.setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every shape, format whose block divides K, and M."""
    args = run.args
    yield from run.cells(
        (
            Data(shape, name, m, run.setting).cell()
            for shape in [parse_shape(s) for s in args.shapes.split(",")]
            for name in named(args.formats)
            if shape.k % formats.get(name).block_values == 0
            for m in parse_ints(args.m)
        ),
        has_roof=False,
    )
