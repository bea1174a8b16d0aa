"""The vector kernels of metal/ on the lockstep emulator: the decode of each format, steps of K, ids
that the host would refuse. tests/ops has their products."""

from __future__ import annotations

import re

import pytest
import torch
from backends import compiled_dtype
from inputs import activations, random_weight
from oracle import FORMATS, spec
from plan_cases import STRATEGIES, codecs, pieces, strategies_used, weaves
from shaders import NAMES, execute, linear, memory_of
from torch import Tensor

from bench.shaders import cells
from torch_metalmm import _C, formats

pytestmark = pytest.mark.shaders

KERNELS = tuple(name for name in STRATEGIES if name.startswith("gemv"))


def codec_of(name: str) -> str:
    return re.sub(r"_g\d+.*", "", name)


def step(name: str) -> int:
    """Values of K that a simdgroup takes at a time: a piece for each lane."""
    return _C.SIMD_WIDTH * pieces()[codec_of(name)]


def two_loops(name: str) -> int:
    """K at which every lane loops twice and some of them a third time."""
    block = formats.get(name).block_values
    return 2 * step(name) + (block if block > 1 else 13)


def picked(name: str, k: int) -> Tensor:
    """Places in a row: each of a block, in one block or another, and some between."""
    span = max(64, min(256, formats.get(name).block_values))
    blocks = k // span
    each = {span * (i % blocks) + i for i in range(span)}
    return torch.tensor(sorted({*each, *range(0, k, 37), *range(k - 8, k)}))


@pytest.mark.every_format
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FORMATS)
def test_one_hot_gives_the_weight(name: str, kernel: str) -> None:
    """x = e_k gives W[:, k], rounded once, for every place of a block."""
    k, dtype = two_loops(name), compiled_dtype(name, kernel)
    if kernel == "gemv":  # each format of a module has another
        dtype = [*NAMES][FORMATS.index(name) % len(NAMES)]
    packed = random_weight(name, 3, k)
    at = picked(name, k)
    x = torch.zeros(len(at), k, dtype=dtype)
    x[torch.arange(len(at)), at] = 1
    wrong = (linear(kernel, name, packed, x) != spec(name, packed, k).T[at].to(dtype)).nonzero()
    assert len(wrong) == 0, (dtype, wrong[:3].tolist())


# {what the order of lanes follows from: a format}
ORDERS = {(pieces()[codec_of(name)], weaves().get(codec_of(name))): name for name in FORMATS}


@pytest.mark.every_format
@pytest.mark.parametrize("name", ORDERS.values())
def test_x_in_the_order_of_lanes_changes_no_bit(name: str) -> None:
    """Rows of floats that arrange_x puts in the order of gemv_batched's lanes, which read them as
    they lie where W is dense: in whole passes, and in one that is not full."""
    k, n = two_loops(name), 64
    packed, x = random_weight(name, n, k), activations(8, k)
    alone = linear("gemv", name, packed, x, chip=_C.CUDA)
    for m in (2, 7, 8):
        y = linear("gemv_batched", name, packed, x[:m], chip=_C.CUDA)
        assert torch.equal(y, alone[:m]), m


def test_rows_with_gaps_are_put_in_the_order_of_lanes() -> None:
    """x that begins at no multiple of 16 bytes, rows 3 values apart."""
    m, n, k = 3, 64, 768
    packed, x = random_weight("q4_k", n, k), activations(m, k)
    memory = memory_of(x, gap=3, offset=1)
    buffers = {"x": memory, "weight": packed, "y": torch.full((m, n), torch.nan)}
    sizes = {"m": m, "n": n, "k": k, "format": "q4_k", "x_stride": k + 3}
    y = execute("linear", buffers, _C.CUDA, strategy="gemv_batched", **sizes)
    assert torch.equal(y, linear("gemv", "q4_k", packed, x, chip=_C.CUDA))


def test_ids_out_of_range_stay_inside_the_table() -> None:
    """The host checks ids; the kernel, if it is given a wrong one, reads no other memory."""
    packed = random_weight("q4_0", 4, 32)
    w, ids = spec("q4_0", packed, 32), torch.tensor([-1, 4, 2**40, -(2**40)])
    y = torch.empty(4, 32)
    execute("embedding", {"weight": packed, "ids": ids, "y": y}, m=4, n=4, k=32, format="q4_0")
    assert torch.equal(y, w[[0, 3, 3, 0]])


@pytest.mark.parametrize("op", ["expert_linear", "expert_up", "expert_down"])
def test_ids_out_of_range_are_the_nearest_expert(op: str) -> None:
    """The same of 3 experts of 4 rows."""
    packed, ids = random_weight("q4_0", 12, 32), torch.tensor([-1, 3, 2**40, -(2**62)])
    buffers = {"x": activations(4, 32), "x2": torch.ones(4, 1), "weight": packed}
    buffers |= {"weight2": packed.flip(0)}
    sizes = dict.fromkeys(("stride", "stride2"), 4 * packed.shape[1])
    sizes |= {"experts": 3, "float_scores": True}
    got, want = (
        execute(
            op, buffers | {"ids": of, "y": torch.full((4, 4), torch.nan)},
            m=4, n=4, k=32, format="q4_0", experts=sizes,
        )
        for of in (ids, ids.clamp(0, 2))
    )  # fmt: skip
    assert torch.equal(got, want) and not got.isnan().any()


# What a simdgroup of gemv_large_k walks at a step: as many units as its lanes reach.
STEPS = """#include <metal_stdlib>
#include "kernels/gemv.h"
#include "entry.h"
#include "formats/all.h"
#define MM_FORMAT(name, Struct)                                                             \\
  extern "C" __attribute__((used)) constant uint step_##name = metalmm::kSimdWidth /        \\
      metalmm::Struct::Pieces::kLanes * metalmm::Walk<metalmm::Struct>::kUnit;
#include "formats/each.h"
"""


def test_long_k_is_counted_in_steps_of_the_kernel() -> None:
    """The K from which M4 Max splits it among 8 simdgroups has one step of the kernel for each."""
    kernel = dict(re.findall(r"\bstep_(\w+) = (\d+);", cells.compile_text(STEPS)))
    assert list(kernel) == codecs()
    simdgroups = _C.strategy("gemv_large_k")["threads"] // _C.SIMD_WIDTH
    for name in formats.names():
        codec = re.sub(r"_g\d+.*", "", name)
        long = simdgroups * int(kernel[codec])
        for k, wanted in ((long, "gemv_large_k"), (long - formats.get(name).block_values, "gemv")):
            plan = _C.plan(n=2048, k=k, format=name, chip="m4-max")
            assert strategies_used(plan)[0] == wanted, (name, k, plan["reason"])
