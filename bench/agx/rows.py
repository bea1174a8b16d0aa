"""Several rows of x: what a weight costs the vector kernels and the tile, and which costs less.

A kernel is compiled for the pass that plan() makes of so many rows, and counted as code.py does. A
weight that a kernel decodes in several passes over M costs as often; that of a tile costs the same
for 8 rows of x whatever there are. A product of two 8 x 8 matrices, two multiply-adds in Mesa's
code, takes 16 slots (docs/chip-model.md).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torch_metalmm import _C

from ..shaders import passes, tiles
from ..tables import Table
from . import kernels
from .code import Code

FORMATS = ("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4")  # a pass has up to 8 rows of x
FORMATS += ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "affine4", "affine8")  # up to 4
SHOWN = (2, 4, 8)
MOST = 16
# gemm_small: weights that a lane decodes for 32 products, and slots of a product in Mesa's code.
_TILE_WEIGHTS, _TILE_PRODUCTS, _COUNTED_SLOTS = 64, 32, 2


class Cost(NamedTuple):
    """Cost of a weight, for all rows of x."""

    instructions: float
    cycles: float


def _pass(strategy: str, codec: str, m: int) -> passes.Pass:
    asked = {"m": m, "n": 4096, "k": 4096, "format": passes.codecs()[codec], "dtype": "f16"}
    plan = _C.plan(strategy=strategy, chip="m1-max", **asked)
    return next(one for one in plan["passes"] if one["kernel"].startswith(strategy))


@functools.cache
def _code(strategy: str, codec: str, batch: int) -> Code:
    """The machine code of a pass of so many rows of x."""
    return kernels.compile_pass(_pass(strategy, codec, max(batch, 1)))


def vector(codec: str, m: int) -> Cost:
    """gemv of one row, gemv_batched of more."""
    strategy = "gemv" if m == 1 else "gemv_batched"
    one = _pass(strategy, codec, m)
    batch = one["constants"]["batch"]
    code, times = _code(strategy, codec, batch), one["grid"][0]
    # Beside rows of x that are kept a turn has as many rows of W as one of gemv.
    turn = "gemv" if batch <= _C.KEPT_ROWS else strategy
    each = times / kernels.weights()[f"{turn}_{codec}"]
    return Cost(len(code.loop) * each, code.cycles * each)


def tile(codec: str, m: int) -> Cost:
    """gemm_small, without the pass that may arrange x."""
    one = _pass("gemm_small", codec, m)
    code, times = _code("gemm_small", codec, one["constants"]["batch"]), one["grid"][0]
    products = _TILE_PRODUCTS * one["constants"]["batch"] // 8
    cycles = code.cycles + products * (tiles.PRODUCT_CYCLES - _COUNTED_SLOTS)
    loop = len(code.loop) - products * (_COUNTED_SLOTS - 1)
    return Cost(loop * times / _TILE_WEIGHTS, cycles * times / _TILE_WEIGHTS)


def threshold(vectors: Sequence[float], tiled: Sequence[float]) -> int:
    """So many rows that the vector kernel up to there and the tile beyond cost least in all, each M
    from 1 on as one."""
    best = [min(pair) for pair in zip(vectors, tiled, strict=True)]
    taken = (vectors[:m] + tiled[m:] for m in range(len(best) + 1))
    sums = [sum(t / b for t, b in zip(one, best, strict=True)) for one in taken]
    return sums.index(min(sums))


def planned(codec: str) -> int:
    """Up to how many rows plan() takes the vector kernels of an M1."""
    asked = {"n": 4096, "k": 4096, "format": passes.codecs()[codec], "dtype": "f16", "chip": "m1"}
    kernels_of = {
        m: [one["kernel"] for one in _C.plan(m=m, **asked)["passes"]] for m in range(1, MOST + 1)
    }
    return max(m for m, names in kernels_of.items() if any("gemv" in name for name in names))


def table() -> Table:
    """A row for each format. RuntimeError, BuildError: a compiler's message."""
    each = [(f, m) for f in FORMATS for m in range(1, MOST + 1)]
    vectors = {(f, m): vector(f, m) for f, m in each}
    tiled = {(f, m): tile(f, m) for f, m in each}
    rows = []
    for f in FORMATS:
        one = vectors[f, 1]
        ratios = [vectors[f, m].instructions / one.instructions for m in SHOWN]
        cycles = [f"{vectors[f, m].cycles:.2f}" for m in (1, *SHOWN, MOST)]
        least = threshold(
            [vectors[f, m].cycles for m in range(1, MOST + 1)],
            [tiled[f, m].cycles for m in range(1, MOST + 1)],
        )
        shown = [f"{r:.2f}" for r in ratios]
        of_tile = [f"{tiled[f, m].cycles:.2f}" for m in (8, MOST)]
        rows.append(
            [f, f"{one.instructions:.2f}", *shown, *cycles, *of_tile, str(least), str(planned(f))]
        )
    columns = ["W", "instructions, M = 1", *(f"M = {m}, of that" for m in SHOWN)]
    columns += [f"cycles, M = {m}" for m in (1, *SHOWN, MOST)]
    columns += [f"tile, {m} rows" for m in (8, MOST)] + ["vector up to M", "plan()"]
    return Table("Several rows of x, f16: a weight", columns, rows)
