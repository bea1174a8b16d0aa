"""`python -m bench matrix-ops`: one operation, its first results, its check and its time."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_metalmm import _C, formats

from ..peers.dense import LABELS
from ..problem import Problem, Setting, of_additions, of_store, rotated, unit
from ..roofs.roof import Roof
from ..shapes import Shape
from ..tables import digits, percent
from ..timing import interleave
from .operation import Operation
from .row_ops import dequantize, embedding, swiglu

Record = dict[str, Any]
MATMULS = {  # name -> strategy, what the engine chooses if None
    "gemv": None,
    "gemm-naive": "gemm_naive",
    "gemm-tiled": "gemm_tiled",
    "gemm": "gemm",
    "gemm-dense": "dense",
}
ROW_OPS = {"dequantize": dequantize, "embedding": embedding, "swiglu": swiglu}
PROBES = ("add", "sub", "mul", "div", "dot")  # of torch.ops.metalmm.probe
OPERATIONS = (*PROBES, *MATMULS, *ROW_OPS)
SIZES = {"gemv": "N K", "gemm": "M N K"}
SIZES |= {"dequantize": "N K", "embedding": "COUNT N K", "swiglu": "M N K"}
SHOWN = 4


def sizes_of(name: str) -> str:
    return "N" if name in PROBES else SIZES[name.partition("-")[0]]


def probe(name: str, n: int, setting: Setting) -> Operation:
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
    return Operation(
        call=lambda i: torch.ops.metalmm.probe(operands[0][i], operands[1][i], name),
        copies=copies,
        checked=lambda y: y.reshape(-1),
        exact=exact,
        bound=of_store(exact, error, dtype),
        bytes=float(x.nbytes * (2 if name == "dot" else 3)),
        flops=float(n * (2 if name == "dot" else 1)),
    )


def rounds_w(setting: Setting, problem: dict[str, Any]) -> bool:
    """Whether W is rounded to the dtype of x: by torch's matmul, and by half tiles of a GPU."""
    strategy = setting.device.strategy(**problem, dtype=LABELS[setting.dtype])
    if strategy == "dense" or setting.device.type == "cpu":
        return strategy == "dense"
    return setting.dtype is torch.float16 and bool(_C.strategy(strategy)["rounds_to_half"])


def matmul(name: str, m: int, problem: Problem, format: str) -> Operation:
    """y[M, N] = x[M, K] W[N, K]ᵀ, W packed; M = 1 for gemv."""
    (n, k), setting, rows = (problem.shape.n, problem.shape.k), problem.setting, problem.rows
    block, strategy, ops = formats.get(format).block_values, MATMULS[name], torch.ops.metalmm
    if k % block:
        raise ValueError(f"K = {k} is not a multiple of the block of {format}, {block}")
    packed, x = problem.packed(format), problem.x(m).to(setting.dtype)
    copies = setting.copies(packed.nbytes)
    weights, given = rotated(packed.to(setting.device.type), copies), x.to(setting.device.type)
    decoded = problem.decoded(packed, format)
    size = x.double().abs() @ decoded.abs().t()
    error = of_additions(k, size)
    if rounds_w(setting, {"m": m, "n": n, "k": k, "format": format, "strategy": strategy}):
        error += unit(setting.dtype) * size

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
        bound=of_store(exact, error, setting.dtype),
        bytes=float(packed.nbytes + x.nbytes + m * n * x.element_size()),
        flops=2.0 * m * n * k,
    )


def build(args: argparse.Namespace, setting: Setting) -> Operation:
    """The operation that the command line names. ValueError: the sizes do not fit it."""
    sizes = sizes_of(args.operation).split()
    if len(args.sizes) != len(sizes) or min(args.sizes) < 1:
        raise ValueError(
            f"{args.operation}: sizes {args.sizes}; takes {' '.join(sizes)}, each at least 1"
        )
    if args.operation in PROBES:
        return probe(args.operation, *args.sizes, setting)
    if args.operation in ROW_OPS:
        return ROW_OPS[args.operation](*args.sizes, setting, args.format)
    m, n, k = (1, *args.sizes) if args.operation == "gemv" else args.sizes
    return matmul(args.operation, m, Problem(Shape(f"{n}x{k}", n, k), setting), args.format)


def run(args: argparse.Namespace, setting: Setting, roof: Roof) -> Iterator[Record]:
    """One record: results, check, time and rates."""
    op, device = build(args, setting), setting.device
    y = op.call(0)
    got = op.checked(y).cpu().double()
    worst = float(((got - op.exact).abs() / op.bound).max())
    record: Record = {
        "kind": "matrix-op",
        "operation": args.operation,
        "sizes": args.sizes,
        "format": "" if args.operation in PROBES else args.format,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "first": y.flatten()[:SHOWN].float().tolist(),
        "checksum": float(y.double().sum()) if device.type != "mps" else float(y.float().sum()),
        "worst": worst,
        "ok": worst <= 1,
    }
    if record["ok"]:
        timed = {"op": device.timed(op.call, op.copies), **roof.timed()}
        if op.unfused:
            timed["unfused"] = device.timed(op.unfused, op.copies)
        timings = interleave(timed, args.repetitions)
        gbs, gflops = roof.reached(timings)
        t, samples = timings["op"].median, timed["op"].samples
        record.update(us=t * 1e6, sigma_us=statistics.pstdev(samples) * 1e6, count=len(samples))
        record.update(gbs=op.bytes / t / 1e9, gflops=op.flops / t / 1e9)
        record.update(roof_gbs=gbs, roof_gflops=gflops)
        if op.unfused:
            record["unfused_us"] = timings["unfused"].median * 1e6
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
        us = digits(r["us"], 4)
        roofs = f"{digits(r['roof_gbs'], 4)} GB/s, {digits(r['roof_gflops'], 4)} GFLOP/s"
        in_memory = r["gbs"] / r["roof_gbs"] > r["gflops"] / r["roof_gflops"]
        roof = "memory" if in_memory else "arithmetic"
        out += [
            f"time      {us} µs, σ {digits(r['sigma_us'])} µs, median of {r['count']}",
            f"rate      {digits(r['gbs'], 4)} GB/s, {digits(r['gflops'], 4)} GFLOP/s",
            f"roof      {percent(r['percent'])} of the {roof} roof ({roofs} in this run)",
        ]
        if "unfused_us" in r:
            times = digits(r["unfused_us"] / r["us"])
            out.append(f"unfused   {digits(r['unfused_us'], 4)} µs, × {times}")
    return out
