"""One weight matrix, the variants that multiply by it, and the check each passes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torch_metalmm import formats

from .devices import CPU, Device
from .shapes import Shape

CHECKED_ROWS = 256
COLD_FACTOR = 3  # copies of W fill this many last-level caches
CONFIDENCE = 8.0
PATTERN_ROWS = 64  # rows of a W that are quantized where the others are copies of them
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LABELS = {dtype: name for name, dtype in DTYPES.items()}
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to dtype."""
    return 2.0 ** -_DIGITS[dtype]


def of_additions(k: int, size: Tensor) -> Tensor:
    """The error of sums of k products whose magnitudes add up to `size`, in f32.

    c sqrt(K) u size: K additions in any order with independent errors (Higham and Mary 2019: c = 8
    is exceeded with probability 1e-10; the worst case has K in place of c sqrt(K)).
    """
    return CONFIDENCE * math.sqrt(k + 2) * unit(torch.float32) * size


def of_store(exact: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """`error` of a result, and what one rounding to dtype adds."""
    return error + unit(dtype) * (exact.abs() + error) + torch.finfo(dtype).smallest_normal


def worst_of(given: Tensor, exact: Tensor, bound: Tensor) -> float:
    """The largest |given - exact| in units of its bound; infinite for a NaN."""
    ratio = (given.cpu().double() - exact).abs() / bound
    return math.inf if bool(ratio.isnan().any()) else float(ratio.max())


def verdict(worst: float) -> dict[str, Any]:
    """What a record says of the largest error in units of its bound."""
    return {"worst": worst, "ok": worst <= 1.0}


def copied_rows(
    n: int, k: int, format: str, make: torch.Generator, rows: int = PATTERN_ROWS
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` quantized random rows, the same in f64, and which of them each of n rows is."""
    rows = min(n, rows)
    values = torch.randn(rows, k, generator=make).mul_(0.02)
    pattern = cast(Tensor, torch.ops.metalmm.quantize(values, format))
    decoded = formats.get(format).dequantize(pattern, k).double()
    return pattern, decoded, torch.randint(rows, (n,), generator=make)


@dataclass(frozen=True)
class Setting:
    """What the command line chose, the same for all matrices of a run."""

    threads: int
    cold_bytes: int  # the copies of one W are at least this large together
    dtype: torch.dtype = torch.float32
    device: Device = CPU
    strategy: str | None = None

    def copies(self, weight_bytes: int) -> int:
        """How many copies of a W of this size are enough."""
        return max(1, math.ceil(self.cold_bytes / weight_bytes))


@dataclass(frozen=True)
class Problem:
    """A dense random W[N, K] that every variant quantizes for itself."""

    shape: Shape
    setting: Setting

    @cached_property
    def w(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.shape.n * 31 + self.shape.k)
        return torch.randn(self.shape.n, self.shape.k, generator=generator).mul_(0.02)

    @cached_property
    def rows(self) -> Tensor:
        """The rows that are checked: all, or CHECKED_ROWS evenly spaced, both ends included."""
        n = self.shape.n
        return torch.linspace(0, n - 1, min(n, CHECKED_ROWS), dtype=torch.float64).round().long()

    def packed(self, format: str) -> Tensor:
        """W by the native quantizer; of a format that is only read, random blocks.

        Bit 6 of no byte of those is set, so that an f16 scale is finite wherever it is.
        """
        f = formats.get(format)
        if f.packs:
            return cast(Tensor, torch.ops.metalmm.quantize(self.w, format))
        shape = self.shape.n, f.row_bytes(self.shape.k)
        generator = torch.Generator().manual_seed(self.shape.n * 31 + self.shape.k)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0xBF

    def decoded(self, packed: Tensor, format: str) -> Tensor:
        """The checked rows of a packed W, by the specification, in f64."""
        return formats.get(format).dequantize(packed[self.rows], self.shape.k).double()

    def x(self, m: int) -> Tensor:
        """Activations f32 [m, K], on the CPU."""
        return torch.randn(m, self.shape.k, generator=torch.Generator().manual_seed(m))


@dataclass(frozen=True)
class Rounding:
    """What an engine rounds, from which the bound of its error follows.

    x_error(x f64 [M, K]) is the largest |change| of each activation before the product; None:
    activations do not change. y is rounded to `out` once.
    """

    x_error: Callable[[Tensor], Tensor] | None = None
    out: torch.dtype = torch.float32

    @staticmethod
    def to(dtype: torch.dtype) -> Rounding:
        """x and y rounded to dtype."""
        return Rounding(lambda x: x.abs() * unit(dtype), dtype)


@dataclass(frozen=True)
class Variant:
    """One way to compute y[M, N] = x · Wᵀ.

    bind(x f32 [M, K] on the CPU) prepares the activations, untimed, and returns call(i) -> y with
    copy i of W. decoded() is W[problem.rows] in f64 on the CPU, as the engine has it.
    """

    engine: str
    name: str
    weight_bytes: int
    copies: int
    bind: Callable[[Tensor], Callable[[int], Tensor]]
    decoded: Callable[[], Tensor]
    rounding: Rounding = Rounding()
    format: str = ""
    device: Device = CPU  # whose clock times it
    max_m: int | None = None  # slow peers stop here
    # The strategy that runs M rows of x, where it is known.
    strategy: Callable[[int], str | None] = lambda m: None


class Engine(Protocol):
    """A source of variants."""

    def missing(self, device: Device) -> str | None:
        """Why the engine cannot run on that device; None if it can."""
        ...

    def variants(self, problem: Problem, formats: Sequence[str]) -> Iterator[Variant]:
        """The variants that fit the problem. W is quantized and copied here."""
        ...


def rotated(packed: Tensor, copies: int) -> list[Tensor]:
    """`packed` and copies - 1 clones."""
    return [packed, *(packed.clone() for _ in range(copies - 1))]


class Checker:
    """Compares variants of a problem with float64 on the rows problem.rows.

    |y - y64| <= dx |W|ᵀ + c sqrt(K) u (|x| |W|ᵀ) + u_out |y64|: what the engine says it rounds, the
    additions, one rounding of y.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._decoded: dict[str, Tensor] = {}

    def __call__(
        self, variant: Variant, x: Tensor, call: Callable[[int], Tensor]
    ) -> dict[str, Any]:
        """The first and the last copy: the larger error = |y - y64| / |y64|, Frobenius, and the
        larger |y - y64| / bound of an element."""
        rows, rounding = self.problem.rows, variant.rounding
        w = self._decoded.get(variant.name)
        if w is None:
            w = self._decoded[variant.name] = variant.decoded()
        x64, wt = x.double(), w.t()
        y64 = x64 @ wt
        bound = of_additions(x.shape[1], x64.abs() @ wt.abs())
        if rounding.x_error is not None:
            bound += rounding.x_error(x64) @ wt.abs()
        bound = of_store(y64, bound, rounding.out)
        found = []
        for i in {0, variant.copies - 1}:
            y = call(i)
            y = y[:, rows.to(y.device)].cpu().double()
            found.append((worst_of(y, y64, bound), float((y - y64).norm() / y64.norm())))
        worst, error = max(found)
        return {"error": error, **verdict(worst)}
