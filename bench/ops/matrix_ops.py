"""`python -m bench matrix-ops`: one operation, its first results, its check and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_metalmm import _C

from ..devices import CPU
from ..problem import (
    LABELS,
    Bounded,
    Problem,
    Setting,
    gated,
    of_additions,
    product,
    rotated,
    unit,
)
from ..runner import Cell, Record, Run, Way, check_formats
from ..shapes import Shape

ops = torch.ops.metalmm
MATMULS = {  # name -> strategy, what the engine chooses if None
    "gemv": None,
    "gemm-naive": "gemm_naive",
    "gemm-tiled": "gemm_tiled",
    "gemm": "gemm",
    "gemm-dense": "dense",
}
PROBES = ("add", "sub", "mul", "div", "dot")  # ops of torch.ops.metalmm.probe
OF_ROWS = {"dequantize": "N K", "embedding": "COUNT N K", "swiglu": "M N K"}
OPERATIONS = (*PROBES, *MATMULS, *OF_ROWS)
SHOWN = 4
SILU_ROUNDINGS = 8  # exp, +, / and the product with up, in f32


def sizes_of(name: str) -> str:
    return "N" if name in PROBES else ({"gemv": "N K"} | OF_ROWS).get(name, "M N K")


class Operation(NamedTuple):
    """call(i) with copy i of the operands; what the values that `picked` takes of it should be."""

    call: Callable[[int], Tensor]
    copies: int
    picked: Callable[[Tensor], Tensor]
    wanted: Bounded  # before the store
    read: float  # bytes
    flops: float
    beside: Mapping[str, Callable[[int], object]] = {}

    def ways(self, name: str, dtype: torch.dtype) -> list[Way]:
        def check() -> Record:
            y = self.call(0)
            total = y.float() if y.device.type == "mps" else y.double()
            first = y.flatten()[:SHOWN].float().tolist()
            found = {"first": first, "checksum": float(total.sum())}
            return found | self.wanted.stored(dtype).verdict(self.picked(y))

        of = {f"of_{other}": other for other in self.beside}
        others = [Way(other, call, self.copies) for other, call in self.beside.items()]
        given = (self.call, self.copies, check, self.read, self.flops)
        return [Way(name, *given, against=of), *others]


def probe(name: str, n: int, setting: Setting) -> Operation:
    """Element-wise arithmetic, or the dot product, of two vectors of n."""
    g = torch.Generator().manual_seed(n)
    x, x2 = (torch.randn(n, generator=g).to(setting.dtype) for _ in range(2))
    copies = setting.copies(2 * x.nbytes)
    left, right = (rotated(setting.put(t), copies) for t in (x, x2))
    a, b = x.double(), x2.double()
    if name == "dot":
        size = torch.dot(a.abs(), b.abs()).reshape(1)
        wanted, moved, flops = Bounded(torch.dot(a, b).reshape(1), of_additions(n, size)), 2.0, 2.0
    else:
        exact = getattr(torch, name)(a, b)
        wanted, moved, flops = Bounded(exact, torch.zeros(())).and_roundings(1), 3.0, 1.0

    def call(i: int) -> Tensor:
        return ops.probe(left[i], right[i], name)

    flat = lambda y: y.reshape(-1)  # noqa: E731
    return Operation(call, copies, flat, wanted, moved * x.nbytes, flops * n)


def rounds_w(setting: Setting, problem: dict[str, Any]) -> bool:
    """Whether W is rounded to the dtype of x: by torch's matmul, and by half tiles of a GPU."""
    strategy = setting.device.strategy(**problem, dtype=LABELS[setting.dtype])
    if strategy == "dense" or setting.device.type == "cpu":
        return strategy == "dense"
    return setting.dtype is torch.float16 and bool(_C.strategy(strategy)["rounds_to_half"])


class Matrix:
    """The operations on one packed W[N, K] of a format."""

    def __init__(self, n: int, k: int, format: str, setting: Setting) -> None:
        self.problem = Problem(Shape(f"{n}x{k}", n, k), setting)
        self.n, self.k, self.format, self.setting = n, k, format, setting
        self.packed = self.problem.packed(format)
        self.decoded = self.problem.decoded(self.packed, format)
        self.rows = setting.put(self.problem.rows)
        self.exact = Bounded(self.decoded, torch.zeros(()))

    def copied(self) -> tuple[list[Tensor], int]:
        weights = [w for (w,) in self.problem.copied([self.packed])]
        return weights, len(weights)

    def moved(self, m: int, matrices: int = 1) -> float:
        """Bytes of W, of m rows of x, and of y."""
        return matrices * self.packed.nbytes + m * (self.n + self.k) * self.setting.dtype.itemsize

    def bound(self, name: str, m: int) -> Bounded:
        """The product x[M, K] W[rows, K]ᵀ and the bound of its error."""
        asked = {"m": m, "n": self.n, "k": self.k, "format": self.format}
        rounds = rounds_w(self.setting, asked | {"strategy": MATMULS[name]})
        x = self.problem.x(m).to(self.setting.dtype)
        return product(x, self.decoded, unit(self.setting.dtype) if rounds else 0.0)

    def matmul(self, name: str, m: int) -> Operation:
        """y[M, N] = x[M, K] W[N, K]ᵀ; M = 1 for gemv."""
        (weights, copies), format = self.copied(), self.format
        given = self.setting.put(self.problem.x(m))

        def call(i: int) -> Tensor:
            if name == "gemv":
                return ops.gemv(given[0], weights[i], format).unsqueeze(0)
            return ops.gemm(given, weights[i], format, strategy=MATMULS[name])

        wanted, flops = self.bound(name, m), 2.0 * m * self.n * self.k
        return Operation(call, copies, lambda y: y[:, self.rows], wanted, self.moved(m), flops)

    def dequantize(self) -> Operation:
        """y[N, K] = W. Bytes: W read, y written."""
        (weights, copies), dtype, size = self.copied(), self.setting.dtype, self.n * self.k

        def call(i: int) -> Tensor:
            return ops.dequantize(weights[i], self.format, dtype=dtype)

        moved = float(self.packed.nbytes + size * dtype.itemsize)
        return Operation(call, copies, lambda y: y[self.rows], self.exact, moved, float(size))

    def embedding(self, count: int) -> Operation:
        """y[COUNT, K] = W[ids], others in each call. Bytes: rows of W read, y written."""
        put, dtype, row = self.setting.put, self.setting.dtype, self.packed.shape[1]
        copies, weight = self.setting.copies(count * row), put(self.packed)
        generator = torch.Generator().manual_seed(self.n)
        ids = torch.randint(self.n, (copies, count), generator=generator)
        some = min(count, len(self.rows))
        ids[:, :some] = self.problem.rows[:some]
        given, wanted = put(ids), Bounded(self.decoded[:some], torch.zeros(()))

        def call(i: int) -> Tensor:
            return ops.embedding(given[i], weight, self.format, dtype=dtype)

        moved = float(count * (row + self.k * dtype.itemsize))
        return Operation(call, copies, lambda y: y[:some], wanted, moved, float(count * self.k))

    def swiglu(self, m: int) -> Operation:
        """y[M, N] = silu(x Wgᵀ) * (x Wuᵀ), gate and up packed; beside it the same as three calls.

        Beyond the rows of the fused kernel a GPU may multiply f16 x by W rounded to f16.
        """
        setting, format = self.setting, self.format
        pair = self.packed, ops.quantize(self.problem.w.flip(0), format)
        copies, x = self.problem.copied(pair), self.problem.x(m).to(setting.dtype)
        given = setting.put(x)
        in_tiles = setting.dtype is torch.float16 and not _C.is_fused("swiglu_up", m)
        of_w = unit(torch.float16) if in_tiles and setting.device != CPU else 0.0
        parts = (product(x, self.problem.decoded(w, format), of_w) for w in pair)
        wanted = gated(*parts).and_roundings(SILU_ROUNDINGS)

        def unfused(i: int) -> Tensor:
            gate, up = (ops.linear(given, w, None, format) for w in copies[i])
            return silu(gate) * up

        def call(i: int) -> Tensor:
            return ops.swiglu(given, *copies[i], format, format)

        work = (self.moved(m, 2), 4.0 * m * self.n * self.k)
        rows, beside = (lambda y: y[:, self.rows]), {"unfused": unfused}
        return Operation(call, len(copies), rows, wanted, *work, beside)


def cell(operation: str, sizes: list[int], format: str, setting: Setting) -> Cell:
    """The operation that the command line names. ValueError: the sizes do not fit it."""
    wanted = sizes_of(operation).split()
    if len(sizes) != len(wanted) or min(sizes) < 1:
        raise ValueError(f"{operation}: sizes {sizes}; takes {' '.join(wanted)}, each at least 1")
    about: Record = {"operation": operation, "sizes": sizes, "dtype": LABELS[setting.dtype]}
    title = f"{operation} {' '.join(map(str, sizes))}, {about['dtype']}"
    if operation in PROBES:
        found = probe(operation, *sizes, setting)
    else:
        check_formats([format], sizes[-1:])
        matrix = Matrix(*sizes[-2:], format, setting)
        about |= {"format": format}
        title += f", W in {format}"
        if operation in OF_ROWS:
            found = getattr(matrix, operation)(*sizes[:-2])
        else:
            found = matrix.matmul(operation, sizes[0] if len(sizes) == 3 else 1)
    return Cell("matrix-op", title, about, found.ways(operation, setting.dtype), setting.device)


def run(run: Run) -> Iterator[Record]:
    args = run.args
    yield from run.cells([cell(args.operation, args.sizes, args.format, run.setting)])
