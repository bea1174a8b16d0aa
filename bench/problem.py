"""One weight matrix, the variants that multiply by it, and the bounds that results are held to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_metalmm import formats

from .devices import CPU, Device

CHECKED_ROWS = 256
COLD_FACTOR = 3  # copies of W fill this many last-level caches
CONFIDENCE = 8.0
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
LABELS = {dtype: name for name, dtype in DTYPES.items()}
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


# ---- shapes of the weights of real models, by name; lists of the command line


@dataclass(frozen=True)
class Shape:
    """W[N, K] of one layer."""

    name: str
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


NAMED = {
    s.name: s
    for s in (
        Shape("tiny", 512, 1024),
        Shape("attn", 4096, 4096),  # q and o of Llama 7B and 8B
        Shape("kv", 1024, 4096),  # Llama 8B
        Shape("up", 11008, 4096),  # Llama 7B
        Shape("down", 4096, 11008),
        Shape("head", 32000, 4096),
        Shape("up-8b", 14336, 4096),  # Llama 8B
        Shape("down-8b", 4096, 14336),
        Shape("head-8b", 128256, 4096),
    )
}
BY_SIZE = {str(s): s for s in NAMED.values()}


def parse_shape(text: str) -> Shape:
    """A name of NAMED, or NxK. ValueError: anything else."""
    text = text.strip().lower().replace("×", "x")
    if text in NAMED:
        return NAMED[text]
    if text in BY_SIZE:
        return BY_SIZE[text]
    n, x, k = text.partition("x")
    if not (x and n.isdigit() and k.isdigit() and int(n) > 0 and int(k) > 0):
        raise ValueError(f"shape {text!r}; must be NxK or one of {', '.join(NAMED)}")
    return Shape(text, int(n), int(k))


def parse_ints(text: str, least: int = 1) -> tuple[int, ...]:
    """The integers of "1,4,8-10,8k", each once; k is 1024. ValueError: anything else, or less."""
    out: list[int] = []
    for part in text.lower().split(","):
        found = re.fullmatch(r"(\d+)(k?)(?:-(\d+))?", part.strip())
        first = int(found[1]) * (1024 if found[2] else 1) if found else -1
        numbers = range(first, int(found[3] or first) + 1) if found else range(0)
        if first < least or not numbers:
            raise ValueError(
                f"{part!r}; must be whole numbers of at least {least}, as 4, 8k or 1-8"
            )
        out.extend(numbers)
    return tuple(dict.fromkeys(out))


def parse_product(option: str, text: str, names: str) -> tuple[int, ...]:
    """The integers of "32x8x128", as many as `names` has. ValueError: anything else."""
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) != len(names.split("x")) or not all(p.isdigit() and int(p) for p in parts):
        raise ValueError(f"{option}: {text!r}; must be {names}, each at least 1")
    return tuple(map(int, parts))


def parse_names(text: str) -> tuple[str, ...]:
    """The names of "a, B", in lower case, each once."""
    return tuple(dict.fromkeys(p.strip().lower() for p in text.split(",") if p.strip()))


# ---- bounds


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to dtype."""
    return 2.0 ** -_DIGITS[dtype]


def lost(dtype: torch.dtype) -> float:
    """The largest relative error of a value that is rounded to dtype after f32; 0 for f32."""
    return 0.0 if dtype is torch.float32 else unit(dtype)


def of_additions(k: int, size: Tensor) -> Tensor:
    """The error of sums of k products whose magnitudes add up to `size`, in f32.

    c sqrt(K) u size: K additions in any order with independent errors (Higham and Mary 2019: c = 8
    is exceeded with probability 1e-10; the worst case has K in place of c sqrt(K)).
    """
    return CONFIDENCE * math.sqrt(k + 2) * unit(torch.float32) * size


class Bounded(NamedTuple):
    """Values in f64, and the largest error that a computation of each in f32 may make."""

    exact: Tensor
    error: Tensor

    def stored(self, dtype: torch.dtype) -> Bounded:
        """After one rounding to dtype."""
        rounding = unit(dtype) * (self.exact.abs() + self.error)
        return self._replace(error=self.error + rounding + torch.finfo(dtype).smallest_normal)

    def verdict(self, given: Tensor) -> dict[str, Any]:
        """The largest error of `given` in units of its bound, as a record has it."""
        ratio = (given.cpu().double() - self.exact).abs() / self.error
        worst = math.inf if bool(ratio.isnan().any()) else float(ratio.max())
        return {"worst": worst, "ok": worst <= 1.0}


def rotated(packed: Tensor, copies: int) -> list[Tensor]:
    """`packed` and copies - 1 clones."""
    return [packed, *(packed.clone() for _ in range(copies - 1))]


@dataclass(frozen=True)
class Setting:
    """The choices of the command line, the same for all matrices of a run."""

    threads: int
    cold_bytes: int  # the copies of one W are at least this large together
    dtype: torch.dtype = torch.float32
    device: Device = CPU
    strategy: str | None = None

    def copies(self, weight_bytes: int) -> int:
        """How many copies of a W of this size are enough."""
        return max(1, math.ceil(self.cold_bytes / weight_bytes))

    def put(self, t: Tensor) -> Tensor:
        """On the device, numbers in the dtype of x."""
        return t.to(self.device.type, self.dtype if t.is_floating_point() else t.dtype)


@dataclass(frozen=True)
class Rounding:
    """The roundings of an engine, from which the bound of its error follows.

    x_error(x f64 [M, K]) is the largest |change| of each activation before the product; None:
    activations do not change. y is rounded to `out` once.
    """

    x_error: Callable[[Tensor], Tensor] | None = None
    out: torch.dtype = torch.float32

    @staticmethod
    def to(dtype: torch.dtype, times: int = 1) -> Rounding:
        """x, or x and W where times is 2, and y rounded to dtype."""
        if dtype is torch.float32:
            return Rounding()
        return Rounding(lambda x: x.abs() * unit(dtype) * times, dtype)

    @staticmethod
    def blocks(block: int, scale: torch.dtype = torch.float16, top: int = 127) -> Rounding:
        """x rounded to multiples of its block's maximum / top, the factor held in `scale`."""

        def x_error(x: Tensor) -> Tensor:
            largest = x.abs().unflatten(-1, (-1, block)).amax(-1, keepdim=True)
            step = largest / top * (0.5 + top * unit(scale))
            return step.expand(*step.shape[:-1], block).flatten(-2)

        return Rounding(x_error)


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
    max_m: int | None = None  # torch.mv takes one row
    # The strategy that runs M rows of x, where it is known.
    strategy: Callable[[int], str | None] = lambda m: None


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

    def fits(self, names: Sequence[str]) -> list[str]:
        """The formats of these whose blocks divide K, as they are called."""
        found = map(formats.get, names)
        return [f.name for f in found if self.shape.k % f.block_values == 0]

    def packed(self, format: str) -> Tensor:
        """W by the native quantizer; of a format that is only read, random blocks.

        Bit 6 of no byte of those is set, so that an f16 scale is finite wherever it is.
        """
        f = formats.get(format)
        if f.packs:
            return torch.ops.metalmm.quantize(self.w, format)
        shape = self.shape.n, f.row_bytes(self.shape.k)
        generator = torch.Generator().manual_seed(self.shape.n * 31 + self.shape.k)
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0xBF

    def decoded(self, packed: Tensor, format: str) -> Tensor:
        """The checked rows of a packed W, by the specification, in f64."""
        return formats.get(format).dequantize(packed[self.rows], self.shape.k).double()

    def x(self, m: int) -> Tensor:
        """Activations f32 [m, K], on the CPU."""
        return torch.randn(m, self.shape.k, generator=torch.Generator().manual_seed(m))

    def variant(
        self,
        engine: str,
        name: str,
        operands: Sequence[Tensor],
        product: Callable[..., Tensor],
        dtype: torch.dtype,
        decoded: Callable[[], Tensor],
        **others: Any,
    ) -> Variant:
        """A variant of torch tensors: `operands` are W as it has it, so many copies of each that no
        cache of the device holds them; product(x, *operands) takes x in dtype, which is what it
        rounds to unless `others` of Variant's fields say."""
        device, size = self.setting.device, sum(t.nbytes for t in operands)
        count = self.setting.copies(size)
        copies = [*zip(*(rotated(t.to(device.type), count) for t in operands), strict=True)]

        def bind(x: Tensor) -> Callable[[int], Tensor]:
            given = x.to(device.type, dtype)
            return lambda i: product(given, *copies[i])

        others = {"rounding": Rounding.to(dtype)} | others
        return Variant(engine, name, size, len(copies), bind, decoded, device=device, **others)


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
        if variant.name not in self._decoded:
            self._decoded[variant.name] = variant.decoded()
        w, rounding, x64 = self._decoded[variant.name], variant.rounding, x.double()
        wanted = Bounded(x64 @ w.t(), of_additions(x64.shape[1], x64.abs() @ w.abs().t()))
        if rounding.x_error is not None:
            wanted = Bounded(wanted.exact, wanted.error + rounding.x_error(x64) @ w.abs().t())
        wanted = wanted.stored(rounding.out)
        found = []
        for i in {0, variant.copies - 1}:
            y = call(i)
            y = y[:, self.problem.rows.to(y.device)].cpu().double()
            error = float((y - wanted.exact).norm() / wanted.exact.norm())
            found.append({"error": error, **wanted.verdict(y)})
        return max(found, key=lambda one: (one["worst"], one["error"]))
