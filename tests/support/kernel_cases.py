"""Random calls that run a given kernel of the shader library, on any engine of shaders.

Operands are made of integers, the same on every machine and in every version of torch: so the
emulator's results can be computed on one machine, `python tests/support/kernel_cases.py FILE`, and
compared with on another.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from oracle import generator, random_weight, spec
from plan_cases import strategies_used, strategy_of
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.testing import emulated

ops = torch.ops.metalmm

# What the CUDA engine plans for, so that the emulator runs the same kernels.
CHIP, CORES = _C.CUDA_PLANS_FOR, 132
PER_KERNEL = 10
DTYPES = formats.DTYPES
PROBES = ("elementwise_add", "elementwise_sub", "elementwise_mul", "elementwise_div", "dot")
# Rows of x: what a strategy is for, beyond its tile.
MOST_ROWS = {"gemv_batched": 16, "swiglu_up": 2, "swiglu_down": 2, "gemm_small": 20}
MOST_ROWS |= {"gemm": 70, "gemm_tiled": 70, "silu_mul": 40}


@dataclass(frozen=True)
class Case:
    """run(put) makes the call, put moving its operands to the engine; problem is what is planned.

    `x`: its activations, then bias or c; `weights`: W, or gate and up, f32.
    """

    kernel: str
    problem: dict[str, Any]
    run: Callable[[Callable[[Tensor], Tensor]], Tensor]
    x: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()


def uniform(dtype: torch.dtype, *shape: int, seed: object) -> Tensor:
    """Multiples of 2^-20 in [-4, 4)."""
    whole = torch.randint(-(2**22), 2**22, shape, generator=generator("uniform", seed))
    return (whole.float() / 2**20).to(dtype)


def packed_weight(name: str, n: int, k: int, seed: object) -> Tensor:
    """uint8 [n, row_bytes]."""
    if formats.get(name).block_values == 1:
        return formats.get(name).quantize(uniform(torch.float32, n, k, seed=seed))
    return random_weight(name, n, k, seed)


def format_of(kernel: str, strategy: str, pick: random.Random) -> str:
    """A format that the kernel decodes: any group and type of scales of an affine one."""
    codec = kernel[len(strategy) + 1 :].rpartition("_")[0] or "q8_0"
    return pick.choice([n for n in formats.names() if n == codec or n.startswith(codec + "_g")])


@cache
def gemm_rows(name: str) -> int:
    """The fewest rows of x that plan() gives to gemm."""
    plans = (_C.plan(m=m, n=64, k=1024, format=name, chip=CHIP) for m in range(1, 100))
    return next(m for m, plan in enumerate(plans, 1) if "gemm" in strategies_used(plan))


def values_of_k(block: int, number: int, pick: random.Random) -> int:
    """K of a case. Blocks of 2-byte fields are read 8 bytes at a time where their number is a
    multiple of 4, of 4 where it is even, else of 2: the first three cases are one of each.
    """
    if block == 1:
        return pick.randint(1, 800)
    fours = 256 // block  # K up to 1024
    blocks = (4 * pick.randint(1, fours), 4 * pick.randint(0, fours - 1) + 2)
    odd = 2 * pick.randint(0, 2 * fours - 1) + 1
    return block * (*blocks, odd, pick.randint(1, 4 * fours))[min(number, 3)]


def case(kernel: str, number: int) -> Case:
    """The number-th random call of a kernel."""
    strategy, dtype = strategy_of(kernel), DTYPES[kernel.rpartition("_")[2]]
    pick = random.Random(f"{kernel} {number}")
    if strategy in PROBES:
        return probe_case(kernel, strategy, dtype, pick)
    name = format_of(kernel, strategy, pick)
    k = values_of_k(formats.get(name).block_values, number, pick)
    n = pick.randint(1, 70)
    if strategy in ("embedding", "dequantize"):
        return rows_case(kernel, strategy, name, (n, k), dtype, pick)
    least = {"gemv_batched": 2, "silu_mul": gemm_rows(name)}.get(strategy, 1)
    m = pick.randint(least, MOST_ROWS.get(strategy, 3))
    if strategy == "split_reduce":
        k *= 8  # two parts at least
    return matmul_case(kernel, strategy, name, (m, n, k), dtype, pick)


def probe_case(kernel: str, strategy: str, dtype: torch.dtype, pick: random.Random) -> Case:
    op, n = strategy.removeprefix("elementwise_"), pick.randint(1, 3000)
    x, x2 = (uniform(dtype, n, seed=(kernel, n, i)) for i in range(2))
    sizes = {"k": n} if op == "dot" else {"n": n}
    return Case(kernel, {"op": op, **sizes}, lambda put: ops.probe(put(x), put(x2), op), (x, x2))


def rows_case(
    kernel: str, strategy: str, name: str, nk: tuple[int, int], dtype: torch.dtype,
    pick: random.Random,
) -> Case:  # fmt: skip
    n, k = nk
    packed = packed_weight(name, n, k, (kernel, n, k))
    ids = torch.tensor([pick.randrange(n) for _ in range(pick.randint(1, 5))])
    problem = {"op": strategy, "n": n, "k": k, "m": len(ids), "format": name}
    if strategy == "embedding":
        return Case(
            kernel, problem, lambda put: ops.embedding(put(ids), put(packed), name, k, dtype=dtype)
        )
    return Case(kernel, problem, lambda put: ops.dequantize(put(packed), name, k, dtype=dtype))


def matmul_case(
    kernel: str, strategy: str, name: str, mnk: tuple[int, int, int], dtype: torch.dtype,
    pick: random.Random,
) -> Case:  # fmt: skip
    m, n, k = mnk
    seed = (kernel, mnk)
    packed = packed_weight(name, n, k, seed)
    x, second = (uniform(dtype, m, k, seed=(seed, i)) for i in range(2))
    weights = (spec(name, packed, k),)
    problem = {"op": strategy, "m": m, "n": n, "k": k, "format": name}
    if strategy in ("swiglu_up", "silu_mul"):
        up = packed_weight(name, n, k, (seed, "up"))
        if strategy == "silu_mul":  # the last of three plans
            problem = {"op": "silu_mul", "n": m * n, "k": k}
        return Case(
            kernel, problem, lambda put: ops.swiglu(put(x), put(packed), put(up), name, name),
            (x,), (*weights, spec(name, up, k)),
        )  # fmt: skip
    if strategy == "swiglu_down":
        return Case(
            kernel, problem,
            lambda put: ops.swiglu_linear(put(x), put(second), put(packed), None, name),
            (x, second), weights,
        )  # fmt: skip
    problem |= {"op": "linear", "strategy": strategy}
    if pick.random() < 0.5:
        c, alpha, beta = uniform(dtype, m, n, seed=(seed, "c")), 0.75, -1.5
        return Case(
            kernel, problem | {"c": True, "alpha": alpha, "beta": beta},
            lambda put: ops.gemm(put(x), put(packed), name, put(c), alpha, beta, strategy),
            (x, c), weights,
        )  # fmt: skip
    bias = uniform(dtype, n, seed=(seed, "bias"))
    return Case(
        kernel, problem | {"bias": True},
        lambda put: ops.linear(put(x), put(packed), put(bias), name, strategy),
        (x, bias), weights,
    )  # fmt: skip


def planned_kernels(one: Case) -> list[str]:
    """The kernels of the case's plan."""
    sizes = dict(one.problem)
    op, dtype = sizes.pop("op"), one.kernel.rpartition("_")[2]
    plan = _C.plan(op, chip=CHIP, gpu={"cores": CORES}, dtype=dtype, **sizes)
    return [p["kernel"] for p in plan["passes"]]


def emulate(kernel: str) -> list[Tensor]:
    """The results of the kernel's cases on the emulator."""
    with emulated(chip=CHIP, cores=CORES):
        return [case(kernel, i).run(lambda t: t) for i in range(PER_KERNEL)]


def main(arguments: list[str]) -> None:
    """FILE: records the emulator. cuda I N: runs one case of every N-th kernel, the I-th first."""
    names = _C.kernel_names()
    if arguments[0] != "cuda":
        torch.save({kernel: emulate(kernel) for kernel in names}, arguments[0])
        return
    names = names[int(arguments[1]) :: int(arguments[2])]
    for kernel in names:
        case(kernel, 0).run(lambda t: t.cuda())
    torch.cuda.synchronize()
    print("ran", len(names))


if __name__ == "__main__":
    main(sys.argv[1:])
