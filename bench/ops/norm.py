"""`python -m bench norm`: what a norm before a product and a residual after it cost in one op.

norm_linear against rms_norm and then linear, linear with a residual against linear and then add, at
few rows of x and for every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torch_metalmm import formats

from ..problem import LABELS, Bounded, Setting, copied_rows, lost, product, rotated, unit
from ..runner import Cell, Record, Run, Way, named
from ..shapes import Shape, parse_ints, parse_shape

ops = torch.ops.metalmm
EPS = 1e-5
ROUNDINGS = 8  # the square root, the quotient and the products of the norm, in f32
AGAINST = {"norm_linear": "norm_then_linear", "residual": "linear_then_add"}


class Data:
    """W, x, the norm's weight and the residual of one format and shape, on the device."""

    def __init__(self, shape: Shape, format: str, m: int, setting: Setting) -> None:
        self.shape, self.format, self.m, self.setting = shape, format, m, setting
        make = torch.Generator().manual_seed(shape.n * 31 + shape.k)
        pattern, self.decoded, self.picks = copied_rows(shape.n, shape.k, format, make)
        packed = setting.put(pattern)[setting.put(self.picks)]
        self.weights = rotated(packed, setting.copies(packed.nbytes))
        self.x = setting.put(torch.randn(m, shape.k, generator=make))
        self.g = setting.put(torch.rand(shape.k, generator=make) + 0.5)
        self.residual = setting.put(torch.randn(m, shape.n, generator=make))

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
        dtype = self.setting.dtype
        x, g, added = (t.cpu().double() for t in (self.x, self.g, self.residual))
        if name == "norm_linear":
            x, added = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * g, 0.0
        relative = 2 * lost(dtype) + ROUNDINGS * unit(torch.float32)
        y, error = product(x, self.decoded, relative, times=2)
        wanted = Bounded(y[:, self.picks] + added, error[:, self.picks])
        return wanted.and_roundings(1).stored(dtype).verdict(call(len(self.weights) - 1))

    def cell(self) -> Cell:
        ways = []
        for name, call in self.calls().items():
            check, of = None, {}
            if name in AGAINST:
                check = lambda n=name, c=call: self.check(n, c)  # noqa: E731
                of = {"of_two_ops": AGAINST[name]}
            ways.append(Way(name, call, len(self.weights), check, against=of))
        s = self.shape
        about = {"format": self.format, "n": s.n, "k": s.k, "m": self.m, "w": f"{s.n}×{s.k}"}
        title = f"A norm before a product, a residual after it, x in {LABELS[self.setting.dtype]}"
        return Cell("norm", title, about, ways, self.setting.device)


def run(run: Run) -> Iterator[Record]:
    """The records of every shape, format whose block divides K, and M."""
    args = run.args
    cells = (
        Data(shape, name, m, run.setting).cell()
        for shape in [parse_shape(s) for s in args.shapes.split(",")]
        for name in named(args.formats)
        if shape.k % formats.get(name).block_values == 0
        for m in parse_ints(args.m)
    )
    yield from run.cells(cells, has_roof=False)
