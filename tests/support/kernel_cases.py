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
from expert_kernels import expert_call
from inputs import generator, packed_weight, uniform
from oracle import spec
from plan_cases import stored, strategies_used, strategy_of
from recorder import recorded
from recurrent_calls import RECURRENT, Run
from torch import Tensor

from torch_metalmm import _C, formats
from torch_metalmm.testing import emulated

ops = torch.ops.metalmm

# What the CUDA engine plans for, so that the emulator runs the same kernels.
CHIP, CORES = _C.CUDA, 132
PER_KERNEL = 10
DTYPES = formats.DTYPES
PROBES = ("elementwise_add", "elementwise_sub", "elementwise_mul", "elementwise_div", "dot")
# Rows of x: what a strategy is for, beyond its tile.
MOST_ROWS = {"gemv_batched": 16, "swiglu_up": 2, "swiglu_down": 2, "gemm_small": 20}
MOST_ROWS |= {"gemm": 70, "gemm_tiled": 70, "act_mul": 40}
ACTIVATIONS = tuple(_C.activations())


@dataclass(frozen=True)
class Case:
    """run(put) makes the call, put moving its operands to the engine.

    `x`: its activations, then bias or c; `weights`: W, or gate and up, f32; `scales`: of product
    and of c.
    """

    kernel: str
    run: Run
    x: tuple[Tensor, ...] = ()
    weights: tuple[Tensor, ...] = ()
    activation: str = ""
    scales: tuple[float, float] | None = None


def format_of(kernel: str, strategy: str, pick: random.Random) -> str:
    """A format that the kernel decodes: any group and type of scales of an affine one."""
    codec = kernel[len(strategy) + 1 :].rpartition("_")[0] or "q8_0"
    return pick.choice([n for n in formats.names() if n == codec or n.startswith(codec + "_g")])


@cache
def gemm_rows(name: str) -> int:
    """The fewest rows of x that plan() gives to gemm; of f32, which torch's matmul never takes."""
    sizes = {"n": 64, "k": 1024, "format": name, "dtype": "f32", "chip": CHIP}
    plans = (_C.plan(m=m, **sizes) for m in range(1, 100))
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
    if strategy in ("rms_norm", "add_rms_norm"):
        return norm_case(kernel, strategy, dtype, pick)
    if strategy == "hadamard":
        x = uniform(dtype, pick.randint(1, 40), 32 * pick.randint(1, 9), seed=(kernel, number))
        return Case(kernel, lambda put: ops.hadamard(put(x)), (x,))
    if strategy == "rope":
        return rope_case(kernel, dtype, pick)
    if strategy == "rope_tables":
        return tables_case(kernel, dtype, pick)
    if strategy == "route":
        return route_case(kernel, dtype, pick)
    if strategy in RECURRENT:
        return Case(kernel, *RECURRENT[strategy](kernel, dtype, pick))
    if strategy == "rope_append":
        return append_case(kernel, format_of(kernel, strategy, pick), dtype, pick)
    if strategy.startswith("attention_"):
        return attention_case(kernel, strategy, dtype, pick)
    if strategy == "arrange_x":
        k = 32 * pick.randint(1, 30)
        if dtype == torch.float32:
            # Pieces of both sizes, weaves of each: a case of each number has another.
            name = ("q4_0", "q4_k", "q6_k", "q8_0", "affine4_g64")[number % 5]
            k = values_of_k(formats.get(name).block_values, number, pick)
            mnk = pick.randint(7, 8), 20 * CORES, k
            return matmul_case(kernel, "gemv_batched", name, mnk, dtype, pick)
        mnk = pick.randint(9, 32), pick.randint(1, 70), k
        return matmul_case(kernel, "gemm_small", "q8_0", mnk, dtype, pick)
    name = format_of(kernel, strategy, pick)
    k = values_of_k(formats.get(name).block_values, number, pick)
    n = pick.randint(1, 70)
    if strategy.startswith("expert_"):
        return Case(kernel, *expert_call(kernel, strategy, name, (n, k), dtype, pick))
    if strategy in ("embedding", "dequantize"):
        return rows_case(kernel, strategy, name, (n, k), dtype, pick)
    least = {"gemv_batched": 2, "act_mul": gemm_rows(name)}.get(strategy, 1)
    m = pick.randint(least, MOST_ROWS.get(strategy, 3))
    if strategy == "split_reduce":
        k *= 8  # two parts at least
    return matmul_case(kernel, strategy, name, (m, n, k), dtype, pick)


def probe_case(kernel: str, strategy: str, dtype: torch.dtype, pick: random.Random) -> Case:
    op, n = strategy.removeprefix("elementwise_"), pick.randint(1, 3000)
    x, x2 = (uniform(dtype, n, seed=(kernel, n, i)) for i in range(2))
    return Case(kernel, lambda put: ops.probe(put(x), put(x2), op), (x, x2))


def norm_case(kernel: str, strategy: str, dtype: torch.dtype, pick: random.Random) -> Case:
    m, k = pick.randint(1, 4), pick.randint(1, 9000)
    x, second = (uniform(dtype, m, k, seed=(kernel, m, k, i)) for i in range(2))
    g = uniform(dtype, k, seed=(kernel, k, "g")) if pick.random() < 0.7 else None
    offset = float(pick.randint(0, 1) if g is not None else 0)

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        weight = None if g is None else put(g)
        if strategy == "add_rms_norm":
            return torch.cat(ops.add_rms_norm(put(x), put(second), weight, 1e-5, offset))
        out: Tensor = ops.rms_norm(put(x), weight, 1e-5, offset, put(second), put(second))
        return out

    return Case(kernel, run, (x, second))


def rope_case(kernel: str, dtype: torch.dtype, pick: random.Random) -> Case:
    batch, positions, heads, kv_heads = (pick.randint(1, 4) for _ in range(4))
    dim = pick.randint(1, 160)
    rotated = 2 * pick.randint(0, dim // 2)
    seed = (kernel, batch, positions, heads, kv_heads, dim, rotated)
    qkv = uniform(dtype, batch, positions, (heads + 2 * kv_heads) * dim, seed=seed)
    angle_dtype = pick.choice([dtype, torch.float32])
    cos, sin = (uniform(angle_dtype, 1, positions, rotated, seed=(seed, i)) for i in range(2))
    g, interleaved = uniform(dtype, dim, seed=(seed, "g")), pick.random() < 0.5

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        made = ops.rope(
            put(qkv), put(cos), put(sin), heads, kv_heads, None, put(g), None, 1e-5, 1.0,
            interleaved,
        )  # fmt: skip
        return torch.cat([t.flatten() for t in made])

    return Case(kernel, run, (qkv,))


def tables_case(kernel: str, dtype: torch.dtype, pick: random.Random) -> Case:
    """Positions of three axes."""
    batch, length, count = pick.randint(1, 3), pick.randint(1, 9), pick.randint(1, 70)
    flags = {"twice": pick.random() < 0.7}
    flags["interleaved"] = flags["twice"] and pick.random() < 0.5
    where = generator(kernel, batch, length, count)
    positions = torch.randint(1 << 17, (3, batch, length), generator=where)
    axes, freq = (
        torch.randint(3, (count,), generator=where),
        uniform(torch.float32, count, seed=kernel).abs(),
    )

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        made = ops.rope_tables(put(positions), put(freq), put(axes), **flags, dtype=dtype)
        return torch.cat(made)

    return Case(kernel, run, (positions,))


def route_case(kernel: str, dtype: torch.dtype, pick: random.Random) -> Case:
    """Weights and ids, of logits whose order no rounding changes."""
    m, groups, size = pick.randint(1, 9), pick.choice([1, 1, 3, 8]), pick.randint(2, 20)
    n, kept = groups * size, pick.randint(1, groups)
    k, is_sigmoid = pick.randint(1, min(31, kept * size)), pick.random() < 0.5
    rows = torch.stack([torch.randperm(n, generator=generator(kernel, m, i)) for i in range(m)])
    x, bias = (rows / 32).to(dtype), uniform(torch.float32, n, seed=(kernel, n, "bias")) / 64
    shared = uniform(torch.float32, m, 1, seed=(kernel, m, "shared"))
    given: dict[str, Any] = {"groups": groups, "kept_groups": kept, "renormalise": True}
    given |= {"scoring": "sigmoid" if is_sigmoid else "softmax"}

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        weights, ids = ops.route(put(x), k, choice_bias=put(bias), shared=put(shared), **given)
        return torch.cat([weights, ids.float()])

    return Case(kernel, run, (x,))


def append_case(kernel: str, name: str, dtype: torch.dtype, pick: random.Random) -> Case:
    """q and the memory of the cache. Without heads of q: cache_append."""
    batch, positions, kv_heads = (pick.randint(1, 4) for _ in range(3))
    heads = pick.randint(0, 4)
    block = formats.get(name).block_values
    dim = pick.randint(1, 160) if block == 1 else block * pick.randint(1, 6)
    rotated, capacity = 2 * pick.randint(0, dim // 2), positions + pick.randint(0, 9)
    seed = (kernel, batch, positions, heads, kv_heads, dim, rotated)
    qkv = uniform(dtype, batch, positions, (heads + 2 * kv_heads) * dim, seed=seed)
    cos, sin = (uniform(dtype, 1, positions, rotated, seed=(seed, i)) for i in range(2))
    slots = torch.tensor(pick.sample(range(capacity), positions))
    row = formats.get(name).row_bytes(dim)
    rows = torch.zeros(2, batch, kv_heads, capacity, row, dtype=torch.uint8)

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        keys, values = put(rows.clone())
        if heads == 0:
            k, v = put(qkv).view(batch, positions, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
            ops.cache_append(keys, values, k, v, put(slots), name, name)
            q = k.new_empty(0)
        else:
            q = ops.rope_append(
                put(qkv), put(cos), put(sin), heads, kv_heads, keys, values, put(slots), name, name
            )
        written = (t.flatten().view(torch.uint8) for t in (q, keys, values))
        return torch.cat([*written]).to(torch.float32)

    return Case(kernel, run, (qkv,))


def attention_case(kernel: str, strategy: str, dtype: torch.dtype, pick: random.Random) -> Case:
    """A cache of packed rows; of the join, more slots than a part has."""
    joins, tiles = strategy == "attention_join", strategy == "attention_tile"
    name = pick.choice(stored()) if joins else format_of(kernel, strategy, pick)
    batch, kv_heads, group = (pick.randint(1, 3) for _ in range(3))
    queries = pick.randint(17, 40) if tiles else 1
    dim, slots = pick.choice((64, 96, 128, 256)), pick.randint(65 if joins else 1, 300)
    seed = (kernel, batch, kv_heads, group, queries, dim, slots)
    q = uniform(dtype, batch, kv_heads * group, queries, dim, seed=seed)
    keys, values = (
        packed_weight(name, batch * kv_heads * slots, dim, (seed, i)).view(
            batch, kv_heads, slots, -1
        )
        for i in range(2)
    )
    length = torch.tensor(pick.randint(1, slots))
    window, softcap = pick.choice((0, 70)), pick.choice((0.0, 30.0))
    softcap = 30.0 if tiles else softcap  # which torch's attention does not have

    def run(put: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = ops.attention(
            put(q), put(keys), put(values), name, name, put(length), scale=0.01, window=window,
            softcap=softcap,
        )  # fmt: skip
        return out

    return Case(kernel, run, (q,))


def rows_case(
    kernel: str, strategy: str, name: str, nk: tuple[int, int], dtype: torch.dtype,
    pick: random.Random,
) -> Case:  # fmt: skip
    n, k = nk
    packed = packed_weight(name, n, k, (kernel, n, k))
    ids = torch.tensor([pick.randrange(n) for _ in range(pick.randint(1, 5))])
    if strategy == "dequantize":
        return Case(kernel, lambda put: ops.dequantize(put(packed), name, k, dtype=dtype))
    count = pick.choice([1, n])
    scale = uniform(pick.choice([dtype, torch.float32]), count, seed=(kernel, "scale"))
    return Case(
        kernel,
        lambda put: ops.embedding(put(ids), put(packed), name, k, dtype=dtype, scale=put(scale)),
    )


def matmul_case(
    kernel: str, strategy: str, name: str, mnk: tuple[int, int, int], dtype: torch.dtype,
    pick: random.Random,
) -> Case:  # fmt: skip
    m, n, k = mnk
    seed = (kernel, mnk)
    packed = packed_weight(name, n, k, seed)
    x, second = (uniform(dtype, m, k, seed=(seed, i)) for i in range(2))
    weights = (spec(name, packed, k),)
    act = pick.choice(ACTIVATIONS)
    if strategy in ("swiglu_up", "act_mul"):
        up = packed_weight(name, n, k, (seed, "up"))
        return Case(
            kernel,
            lambda put: ops.swiglu(put(x), put(packed), put(up), name, name, act),
            (x,), (*weights, spec(name, up, k)), act,
        )  # fmt: skip
    if strategy == "swiglu_down":
        return Case(
            kernel,
            lambda put: ops.swiglu_linear(put(x), put(second), put(packed), None, name, act),
            (x, second), weights, act,
        )  # fmt: skip
    if is_choice_of_a_norm(kernel, name, mnk) and pick.random() < 0.5:
        g = uniform(dtype, k, seed=(seed, "g"))
        return Case(
            kernel,
            lambda put: ops.norm_linear(put(x), put(g), 1e-5, 0.0, put(packed), None, name),
            (x, g), weights,
        )  # fmt: skip
    if pick.random() < 0.5:
        c, alpha, beta = uniform(dtype, m, n, seed=(seed, "c")), 0.75, -1.5
        return Case(
            kernel,
            lambda put: ops.gemm(put(x), put(packed), name, put(c), alpha, beta, strategy),
            (x, c), weights, "", (alpha, beta),
        )  # fmt: skip
    bias = uniform(dtype, n, seed=(seed, "bias"))
    return Case(
        kernel,
        lambda put: ops.linear(put(x), put(packed), put(bias), name, strategy),
        (x, bias), weights,
    )  # fmt: skip


def is_choice_of_a_norm(kernel: str, name: str, mnk: tuple[int, int, int]) -> bool:
    """Whether this kernel is the choice for a product that normalises x."""
    m, n, k = mnk
    if not _C.norm_is_fused(m=m, format=name, chip=CHIP):
        return False
    sizes = {"m": m, "n": n, "k": k, "format": name, "dtype": kernel.rpartition("_")[2]}
    traits = {"norm": True, "norm_weight": True, "chip": CHIP, "gpu": {"cores": CORES}}
    return [p["kernel"] for p in _C.plan(**sizes, **traits)["passes"]] == [kernel]


def planned_kernels(one: Case) -> list[str]:
    """The kernels that the case's call runs on the CUDA engine."""
    with recorded(CHIP, CORES) as calls:
        one.run(lambda t: t)
    return [call[1] for call in calls if call[0] == "set_pipeline"]


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
