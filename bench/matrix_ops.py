"""`python -m bench matrix-ops`: one operation, its first results, its check and its time."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import formats
from torch_metalmm.ops import PROBES

from .devices import Device
from .problem import CHECKED_ROWS, COLD_FACTOR, CONFIDENCE, rotated, unit
from .roof import Roof
from .timing import interleave

Record = dict[str, Any]
MATMULS = {  # name -> strategy, what the engine chooses if None
    "gemv": None,
    "gemm-naive": "gemm_naive",
    "gemm-tiled": "gemm_tiled",
    "gemm": "gemm",
}
OPERATIONS = (*PROBES, *MATMULS)
SIZES = {"gemv": "N K", "gemm": "M N K"}
SHOWN = 4


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


def sizes_of(name: str) -> str:
    return "N" if name in PROBES else SIZES[name.partition("-")[0]]


def rounded(exact: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """`bound`, and one rounding of a result of that much error to dtype."""
    return bound + unit(dtype) * (exact.abs() + bound) + torch.finfo(dtype).smallest_normal


def probe(name: str, n: int, dtype: torch.dtype, device: Device) -> Operation:
    """Element-wise arithmetic, or the dot product, of two vectors of n."""
    x, x2 = (torch.randn(n, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2))
    copies = max(1, -(-COLD_FACTOR * device.cache_bytes // (2 * x.nbytes)))
    operands = [rotated(t.to(device.type), copies) for t in (x, x2)]
    a, b = x.double(), x2.double()
    if name == "dot":
        exact = torch.dot(a, b).reshape(1)
        bound = CONFIDENCE * (n + 2) ** 0.5 * unit(torch.float32) * torch.dot(a.abs(), b.abs())
    else:
        compute = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[name]
        exact = compute(a, b)
        bound = unit(torch.float32) * exact.abs()
    return Operation(
        call=lambda i: torch.ops.metalmm.probe(operands[0][i], operands[1][i], name),
        copies=copies,
        checked=lambda y: y.reshape(-1),
        exact=exact,
        bound=rounded(exact, bound, dtype),
        bytes=float(x.nbytes * (2 if name == "dot" else 3)),
        flops=float(n * (2 if name == "dot" else 1)),
    )


def matmul(
    name: str, m: int, n: int, k: int, format: str, dtype: torch.dtype, device: Device
) -> Operation:
    """y[M, N] = x[M, K] W[N, K]ᵀ, W packed; M = 1 for gemv."""
    spec, strategy, ops = formats.get(format), MATMULS[name], torch.ops.metalmm
    if k % spec.block_values:
        raise ValueError(f"K = {k} is not a multiple of the block of {format}, {spec.block_values}")
    g = torch.Generator().manual_seed(n * 31 + k)
    packed = ops.quantize(torch.randn(n, k, generator=g).mul_(0.02), format)
    x = torch.randn(m, k, generator=g).to(dtype)
    copies = max(1, -(-COLD_FACTOR * device.cache_bytes // packed.nbytes))
    weights, given = rotated(packed.to(device.type), copies), x.to(device.type)
    rows = torch.linspace(0, n - 1, min(n, CHECKED_ROWS), dtype=torch.float64).round().long()
    decoded = spec.dequantize(packed[rows], k).double()
    size = x.double().abs() @ decoded.abs().t()
    bound = CONFIDENCE * (k + 2) ** 0.5 * unit(torch.float32) * size
    if dtype is torch.float16:  # half tiles of the matrix unit hold W in 11 bits
        bound += unit(dtype) * size

    def call(i: int) -> Tensor:
        if name == "gemv":
            return ops.gemv(given[0], weights[i], format).unsqueeze(0)
        return ops.gemm(given, weights[i], format, strategy=strategy)

    exact = x.double() @ decoded.t()
    return Operation(
        call=call,
        copies=copies,
        checked=lambda y: y[:, rows.to(y.device)],
        exact=exact,
        bound=rounded(exact, bound, dtype),
        bytes=float(packed.nbytes + x.nbytes + m * n * x.element_size()),
        flops=2.0 * m * n * k,
    )


def build(args: argparse.Namespace, device: Device, dtype: torch.dtype) -> Operation:
    """The operation that the command line names. ValueError: the sizes do not fit it."""
    sizes = sizes_of(args.operation).split()
    if len(args.sizes) != len(sizes) or min(args.sizes) < 1:
        raise ValueError(
            f"{args.operation}: sizes {args.sizes}; takes {' '.join(sizes)}, each at least 1"
        )
    if args.operation in PROBES:
        return probe(args.operation, *args.sizes, dtype, device)
    m, n, k = (1, *args.sizes) if args.operation == "gemv" else args.sizes
    return matmul(args.operation, m, n, k, args.format, dtype, device)


def run(
    args: argparse.Namespace, device: Device, dtype: torch.dtype, roof: Roof
) -> Iterator[Record]:
    """One record: results, check, time and rates."""
    op = build(args, device, dtype)
    y = op.call(0)
    got = op.checked(y).cpu().double()
    worst = float(((got - op.exact).abs() / op.bound).max())
    record: Record = {
        "kind": "matrix-op",
        "operation": args.operation,
        "sizes": args.sizes,
        "format": args.format if args.operation in MATMULS else "",
        "dtype": str(dtype).removeprefix("torch."),
        "first": y.flatten()[:SHOWN].float().tolist(),
        "checksum": float(y.double().sum()) if device.type != "mps" else float(y.float().sum()),
        "worst": worst,
        "ok": worst <= 1,
    }
    if record["ok"]:
        timed = {"op": device.timed(op.call, op.copies), **roof.timed()}
        timings = interleave(timed, args.repetitions)
        gbs, gflops = roof.reached(timings)
        t, samples = timings["op"].median, timed["op"].samples
        record.update(us=t * 1e6, sigma_us=statistics.pstdev(samples) * 1e6, count=len(samples))
        record.update(gbs=op.bytes / t / 1e9, gflops=op.flops / t / 1e9)
        record.update(roof_gbs=gbs, roof_gflops=gflops)
        record["percent"] = max(op.bytes / t / gbs, op.flops / t / gflops) / 1e7
    yield record


def lines(r: Record) -> list[str]:
    """The record for people."""
    format = f", W in {r['format']}" if r["format"] else ""
    out = [
        f"{r['operation']} {' '.join(map(str, r['sizes']))}, {r['dtype']}{format}",
        f"first     {', '.join(f'{v:.6g}' for v in r['first'])}",
        f"checksum  {r['checksum']:.9g}",
        f"check     {'ok' if r['ok'] else 'WRONG'}: largest error {r['worst']:.2g} of its bound",
    ]
    if r["ok"]:
        in_memory = r["gbs"] / r["roof_gbs"] > r["gflops"] / r["roof_gflops"]
        out += [
            f"time      {r['us']:.2f} µs, σ {r['sigma_us']:.2f} µs, median of {r['count']}",
            f"rate      {r['gbs']:.4g} GB/s, {r['gflops']:.4g} GFLOP/s",
            f"roof      {r['percent']:.0f} % of the {'memory' if in_memory else 'arithmetic'} roof"
            f" ({r['roof_gbs']:.4g} GB/s, {r['roof_gflops']:.4g} GFLOP/s in this run)",
        ]
    return out
