"""`python -m bench matrix-ops` for what is no product of one W: dequantize, embedding, swiglu."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from torch_metalmm import _C

from ..devices import CPU
from ..problem import Problem, Setting, of_additions, of_store, rotated, unit
from ..shapes import Shape
from .operation import Operation

ops = torch.ops.metalmm
SILU_SLOPE = 1.1  # the largest |silu'| is 1.0998
SILU_ROUNDINGS = 8  # of exp, +, / and the product with up, in f32


def dequantize(n: int, k: int, setting: Setting, format: str) -> Operation:
    """y[N, K] = W. Bytes: W read, y written."""
    problem = Problem(Shape(f"{n}x{k}", n, k), setting)
    packed = problem.packed(format)
    copies = setting.copies(packed.nbytes)
    weights = rotated(packed.to(setting.device.type), copies)
    exact = problem.decoded(packed, format)
    return Operation(
        call=lambda i: ops.dequantize(weights[i], format, dtype=setting.dtype),
        copies=copies,
        checked=lambda y: y[problem.rows.to(y.device)],
        exact=exact,
        bound=of_store(exact, torch.zeros(()), setting.dtype),
        bytes=float(packed.nbytes + n * k * setting.dtype.itemsize),
        flops=float(n * k),
    )


def embedding(count: int, n: int, k: int, setting: Setting, format: str) -> Operation:
    """y[COUNT, K] = W[ids], ids random, others in each call. Bytes: rows of W read, y written."""
    problem = Problem(Shape(f"{n}x{k}", n, k), setting)
    packed = problem.packed(format)
    weight = packed.to(setting.device.type)
    copies = setting.copies(count * packed.shape[1])
    ids = torch.randint(n, (copies, count), generator=torch.Generator().manual_seed(n))
    checked = min(count, len(problem.rows))
    ids[:, :checked] = problem.rows[:checked]
    put = ids.to(setting.device.type)
    exact = problem.decoded(packed, format)[:checked]
    return Operation(
        call=lambda i: ops.embedding(put[i], weight, format, dtype=setting.dtype),
        copies=copies,
        checked=lambda y: y[:checked],
        exact=exact,
        bound=of_store(exact, torch.zeros(()), setting.dtype),
        bytes=float(count * (packed.shape[1] + k * setting.dtype.itemsize)),
        flops=float(count * k),
    )


def swiglu(m: int, n: int, k: int, setting: Setting, format: str) -> Operation:
    """y[M, N] = silu(x Wgᵀ) * (x Wuᵀ), gate and up packed; timed beside the same as three calls.

    The error of the two products reaches the result through |silu'| <= 1.1. Beyond the rows of the
    fused kernel a GPU may multiply f16 x by W rounded to f16.
    """
    problem = Problem(Shape(f"{n}x{k}", n, k), setting)
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

    return Operation(
        call=lambda i: ops.swiglu(given, gates[i], ups[i], format, format),
        copies=copies,
        checked=lambda y: y[:, problem.rows.to(y.device)],
        exact=exact,
        bound=of_store(exact, error, setting.dtype),
        bytes=float(2 * pair[0].nbytes + x.nbytes + m * n * x.element_size()),
        flops=4.0 * m * n * k,
        unfused=unfused,
    )
