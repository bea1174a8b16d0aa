"""`python -m bench matrix-ops`: one operation, its first results, its check and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_metalmm import _C

from ..devices import CPU
from ..problem import (
    LABELS,
    Problem,
    Setting,
    of_additions,
    of_store,
    rotated,
    unit,
    verdict,
    worst_of,
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
PROBES = ("add", "sub", "mul", "div", "dot")  # of torch.ops.metalmm.probe
OF_ROWS = {"dequantize": "N K", "embedding": "COUNT N K", "swiglu": "M N K"}
OPERATIONS = (*PROBES, *MATMULS, *OF_ROWS)
SIZES = {"gemv": "N K", "gemm": "M N K"} | OF_ROWS
SHOWN = 4
SILU_SLOPE = 1.1  # the largest |silu'| is 1.0998
SILU_ROUNDINGS = 8  # of exp, +, / and the product with up, in f32


def sizes_of(name: str) -> str:
    return "N" if name in PROBES else SIZES[name.partition("-")[0]]


def checked(
    name: str,
    call: Callable[[int], Tensor],
    copies: int,
    picked: Callable[[Tensor], Tensor],
    bound: tuple[Tensor, Tensor],
    work: tuple[float, float],
    **options: Any,
) -> Way:
    """A way whose results `picked` are compared with (exact, bound); work: bytes, flops."""

    def check() -> Record:
        y = call(0)
        total = y.float() if y.device.type == "mps" else y.double()
        first = y.flatten()[:SHOWN].float().tolist()
        found = {"first": first, "checksum": float(total.sum())}
        return found | verdict(worst_of(picked(y), *bound))

    return Way(name, call, copies, check, *work, **options)


def probe(name: str, n: int, setting: Setting) -> list[Way]:
    """Element-wise arithmetic, or the dot product, of two vectors of n."""
    dtype, g = setting.dtype, torch.Generator().manual_seed(n)
    x, x2 = (torch.randn(n, generator=g).to(dtype) for _ in range(2))
    copies = setting.copies(2 * x.nbytes)
    operands = [rotated(t.to(setting.device.type), copies) for t in (x, x2)]
    a, b = x.double(), x2.double()
    if name == "dot":
        exact = torch.dot(a, b).reshape(1)
        error = of_additions(n, torch.dot(a.abs(), b.abs()))
    else:
        compute = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[name]
        exact = compute(a, b)
        error = unit(torch.float32) * exact.abs()
    work = (x.nbytes * (2.0 if name == "dot" else 3.0), n * (2.0 if name == "dot" else 1.0))
    return [
        checked(
            name,
            lambda i: ops.probe(operands[0][i], operands[1][i], name),
            copies,
            lambda y: y.reshape(-1),
            (exact, of_store(exact, error, dtype)),
            work,
        )
    ]


def rounds_w(setting: Setting, problem: dict[str, Any]) -> bool:
    """Whether W is rounded to the dtype of x: by torch's matmul, and by half tiles of a GPU."""
    strategy = setting.device.strategy(**problem, dtype=LABELS[setting.dtype])
    if strategy == "dense" or setting.device.type == "cpu":
        return strategy == "dense"
    return setting.dtype is torch.float16 and bool(_C.strategy(strategy)["rounds_to_half"])


def bound_of(name: str, m: int, problem: Problem, format: str) -> tuple[Tensor, Tensor]:
    """(exact, bound) of x[M, K] W[rows, K]ᵀ."""
    (n, k), setting = (problem.shape.n, problem.shape.k), problem.setting
    x, w = problem.x(m).to(setting.dtype).double(), problem.decoded(problem.packed(format), format)
    size = x.abs() @ w.abs().t()
    error = of_additions(k, size)
    if rounds_w(setting, {"m": m, "n": n, "k": k, "format": format, "strategy": MATMULS[name]}):
        error += unit(setting.dtype) * size
    exact = x @ w.t()
    return exact, of_store(exact, error, setting.dtype)


def matmul(name: str, m: int, problem: Problem, format: str) -> list[Way]:
    """y[M, N] = x[M, K] W[N, K]ᵀ, W packed; M = 1 for gemv."""
    (n, k), setting, strategy = (problem.shape.n, problem.shape.k), problem.setting, MATMULS[name]
    packed, x = problem.packed(format), problem.x(m).to(setting.dtype)
    copies = setting.copies(packed.nbytes)
    weights, given = rotated(packed.to(setting.device.type), copies), x.to(setting.device.type)

    def call(i: int) -> Tensor:
        if name == "gemv":
            return ops.gemv(given[0], weights[i], format).unsqueeze(0)  # type: ignore[no-any-return]
        return ops.gemm(given, weights[i], format, strategy=strategy)  # type: ignore[no-any-return]

    read = float(packed.nbytes + x.nbytes + m * n * x.element_size())
    exact = bound_of(name, m, problem, format)
    picked = problem.rows.to(setting.device.type)
    return [checked(name, call, copies, lambda y: y[:, picked], exact, (read, 2.0 * m * n * k))]


def dequantize(n: int, k: int, problem: Problem, format: str) -> list[Way]:
    """y[N, K] = W. Bytes: W read, y written."""
    setting, packed = problem.setting, problem.packed(format)
    copies = setting.copies(packed.nbytes)
    weights = rotated(packed.to(setting.device.type), copies)
    exact, rows = problem.decoded(packed, format), problem.rows.to(setting.device.type)
    bound = of_store(exact, torch.zeros(()), setting.dtype)
    work = (float(packed.nbytes + n * k * setting.dtype.itemsize), float(n * k))

    def call(i: int) -> Tensor:
        return ops.dequantize(weights[i], format, dtype=setting.dtype)  # type: ignore[no-any-return]

    return [checked("dequantize", call, copies, lambda y: y[rows], (exact, bound), work)]


def embedding(count: int, n: int, k: int, problem: Problem, format: str) -> list[Way]:
    """y[COUNT, K] = W[ids], ids random, others in each call. Bytes: rows of W read, y written."""
    setting, packed = problem.setting, problem.packed(format)
    weight = packed.to(setting.device.type)
    copies = setting.copies(count * packed.shape[1])
    ids = torch.randint(n, (copies, count), generator=torch.Generator().manual_seed(n))
    some = min(count, len(problem.rows))
    ids[:, :some] = problem.rows[:some]
    put, exact = ids.to(setting.device.type), problem.decoded(packed, format)[:some]
    bound = of_store(exact, torch.zeros(()), setting.dtype)
    work = (float(count * (packed.shape[1] + k * setting.dtype.itemsize)), float(count * k))

    def call(i: int) -> Tensor:
        return ops.embedding(put[i], weight, format, dtype=setting.dtype)  # type: ignore[no-any-return]

    return [checked("embedding", call, copies, lambda y: y[:some], (exact, bound), work)]


def swiglu(m: int, n: int, k: int, problem: Problem, format: str) -> list[Way]:
    """y[M, N] = silu(x Wgᵀ) * (x Wuᵀ), gate and up packed; beside it the same as three calls.

    The error of the two products reaches the result through |silu'| <= 1.1. Beyond the rows of the
    fused kernel a GPU may multiply f16 x by W rounded to f16.
    """
    setting = problem.setting
    pair = problem.packed(format), ops.quantize(problem.w.flip(0), format)
    copies = setting.copies(2 * pair[0].nbytes)
    gates, ups = (rotated(w.to(setting.device.type), copies) for w in pair)
    x = problem.x(m).to(setting.dtype)
    given = x.to(setting.device.type)
    both = [problem.decoded(w, format) for w in pair]
    g, u = (x.double() @ w.t() for w in both)
    sizes = [x.double().abs() @ w.abs().t() for w in both]
    in_tiles = setting.dtype is torch.float16 and not _C.is_fused("swiglu_up", m)
    of_w = unit(torch.float16) if in_tiles and setting.device != CPU else 0.0
    dg, du = (of_additions(k, size) + of_w * size for size in sizes)
    exact = silu(g) * u
    error = SILU_SLOPE * dg * (u.abs() + du) + silu(g).abs() * du
    error += SILU_ROUNDINGS * unit(torch.float32) * exact.abs()

    def unfused(i: int) -> Tensor:
        gate, other = (ops.linear(given, w[i], None, format) for w in (gates, ups))
        return silu(gate) * other

    def call(i: int) -> Tensor:
        return ops.swiglu(given, gates[i], ups[i], format, format)  # type: ignore[no-any-return]

    rows = problem.rows.to(setting.device.type)
    bound = (exact, of_store(exact, error, setting.dtype))
    read = float(2 * pair[0].nbytes + x.nbytes + m * n * x.element_size())
    of = {"of_unfused": "unfused"}
    work = (read, 4.0 * m * n * k)
    fused = checked("swiglu", call, copies, lambda y: y[:, rows], bound, work, against=of)
    return [fused, Way("unfused", unfused, copies)]


def cell(operation: str, sizes: list[int], format: str, setting: Setting) -> Cell:
    """The operation that the command line names. ValueError: the sizes do not fit it."""
    wanted = sizes_of(operation).split()
    if len(sizes) != len(wanted) or min(sizes) < 1:
        raise ValueError(f"{operation}: sizes {sizes}; takes {' '.join(wanted)}, each at least 1")
    about: Record = {"operation": operation, "sizes": sizes, "dtype": LABELS[setting.dtype]}
    title = f"{operation} {' '.join(map(str, sizes))}, {about['dtype']}"
    if operation in PROBES:
        ways = probe(operation, *sizes, setting)
    else:
        n, k = sizes[-2:]
        check_formats([format], [k])
        problem = Problem(Shape(f"{n}x{k}", n, k), setting)
        about |= {"format": format}
        title += f", W in {format}"
        if operation in OF_ROWS:
            rows = {"dequantize": dequantize, "embedding": embedding, "swiglu": swiglu}[operation]
            ways = rows(*sizes, problem, format)
        else:
            ways = matmul(operation, 1 if operation == "gemv" else sizes[0], problem, format)
    return Cell("matrix-op", title, about, ways, setting.device)


def run(run: Run) -> Iterator[Record]:
    args = run.args
    yield from run.cells([cell(args.operation, args.sizes, args.format, run.setting)])
