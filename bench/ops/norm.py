"""`python -m bench norm`: what a norm before a product and a residual after it cost in one op.

norm_linear against rms_norm and then linear, linear with a residual against linear and then add, at
few rows of x and for every format: the results are checked, then all are timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import formats

from ..problem import Setting, of_additions, of_store, rotated, unit
from ..shapes import Shape, parse_names
from ..timing import Timing, interleave

ops = torch.ops.metalmm
EPS = 1e-5
PATTERN_ROWS = 64  # rows that are quantized; those of W are copies of them, in random order
ROUNDINGS = 8  # of the square root, the quotient and the products of the norm, in f32
Record = dict[str, Any]


def named(text: str) -> Sequence[str]:
    """The formats of --formats: "all", or "one" of each kind: affine with groups of 64."""
    every = [name for name in formats.names() if formats.get(name).packs]
    if text == "one":
        return [n for n in every if not n.startswith("affine") or n.endswith("_g64")]
    return every if text == "all" else parse_names(text)


class Cell:
    """W, x, the norm's weight and the residual of one format and shape, on the device."""

    def __init__(self, shape: Shape, format: str, m: int, setting: Setting) -> None:
        self.shape, self.format, self.setting = shape, format, setting
        make = torch.Generator().manual_seed(shape.n * 31 + shape.k)
        put: dict[str, Any] = {"device": setting.device.type, "dtype": setting.dtype}
        rows = min(shape.n, PATTERN_ROWS)
        pattern = ops.quantize(torch.randn(rows, shape.k, generator=make).mul_(0.02), format)
        self.decoded = formats.get(format).dequantize(pattern, shape.k).double()
        self.picks = torch.randint(rows, (shape.n,), generator=make)
        packed = pattern.to(setting.device.type)[self.picks.to(setting.device.type)]
        self.weights = rotated(packed, setting.copies(packed.nbytes))
        self.x = torch.randn(m, shape.k, generator=make).to(**put)
        self.g = (torch.rand(shape.k, generator=make) + 0.5).to(**put)
        self.residual = torch.randn(m, shape.n, generator=make).to(**put)

    def calls(self) -> dict[str, Callable[[int], Tensor]]:
        """By the names of the columns; call(i) takes copy i of W."""
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

    def worst(self, calls: dict[str, Callable[[int], Tensor]]) -> float:
        """The largest error of norm_linear and of linear with a residual, in units of its bound.

        The bound lets the norm be rounded to the dtype of x, and W too where x is f16: the plan may
        take two passes, and a matrix kernel.
        """
        dtype, k = self.setting.dtype, self.shape.k
        x, g, residual = (t.cpu().double() for t in (self.x, self.g, self.residual))
        r = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        half = 0.0 if dtype is torch.float32 else 2 * unit(dtype)
        ratios = []
        for name, given, added in (("norm_linear", x * r * g, 0.0), ("residual", x, residual)):
            exact = (given @ self.decoded.t())[:, self.picks] + added
            size = (given.abs() @ self.decoded.abs().t())[:, self.picks]
            error = 2 * of_additions(k, size) + (half + ROUNDINGS * unit(torch.float32)) * size
            error += unit(torch.float32) * exact.abs()
            bound = of_store(exact, error, dtype)
            y = calls[name](len(self.weights) - 1).cpu().double()
            ratios.append(float(((y - exact).abs() / bound).max()))
        return max(ratios)


def ratio(one: Timing, other: Timing) -> list[float]:
    """[the least, the median, the most] that the quartiles allow of one's time over the other's."""
    return [one.q1 / other.q3, one.median / other.median, one.q3 / other.q1]


def measure(cell: Cell, m: int, repetitions: int) -> Record:
    """One record: check, and times."""
    calls, setting, shape = cell.calls(), cell.setting, cell.shape
    worst = cell.worst(calls)
    dtype = str(setting.dtype).removeprefix("torch.")
    record: Record = {"kind": "norm", "format": cell.format, "n": shape.n, "k": shape.k, "m": m}
    record |= {"dtype": dtype, "worst": worst, "ok": worst <= 1}
    if record["ok"]:
        copies, device = len(cell.weights), setting.device
        timed = {name: device.timed(call, copies) for name, call in calls.items()}
        t = interleave(timed, repetitions)
        record |= {f"{name}_us": 1e6 * t[name].median for name in calls}
        record["norm_ratio"] = ratio(t["norm_linear"], t["norm_then_linear"])
        record["residual_ratio"] = ratio(t["residual"], t["linear_then_add"])
    return record


def run(
    shapes: Sequence[Shape],
    names: Sequence[str],
    ms: Sequence[int],
    setting: Setting,
    repetitions: int,
    progress: Callable[[str], None],
) -> Iterator[Record]:
    """A record for every shape, format whose block divides K, and M."""
    for shape in shapes:
        for name in names:
            if shape.k % formats.get(name).block_values:
                continue
            for m in ms:
                progress(f"{shape} {name} M={m}")
                yield measure(Cell(shape, name, m, setting), m, repetitions)
