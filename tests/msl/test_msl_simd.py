"""Every simd_* and quad_* function of the stand-in against Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from operator import and_, or_, xor

import pytest
import torch
from msl_kernels import HEAD, LANES, Batch

from torch_metalmm.testing import MetalSource

FLOATS = [float((i * 7 + 3) % 11 - 5) for i in LANES]
INTS = [(i * 37 + 11) % 64 for i in LANES]
GROUPS = [("simd", 32), ("quad", 4)]

REDUCTIONS: dict[str, tuple[str, Callable[[list], float]]] = {
    "sum": ("float", sum),
    "product": ("float", prod),
    "min": ("float", min),
    "max": ("float", max),
    "and": ("int", lambda v: reduce(and_, v)),
    "or": ("int", lambda v: reduce(or_, v)),
    "xor": ("int", lambda v: reduce(xor, v)),
}
PREFIXES = [(k, n) for k in ("inclusive", "exclusive") for n in ("sum", "product")]
SHUFFLES: dict[str, Callable[[int, int], int]] = {
    "shuffle(v, ushort((lane * 3 + 1) % W))": lambda i, w: i // w * w + (i * 3 + 1) % w,
    "broadcast(v, 2)": lambda i, w: i // w * w + 2,
    "broadcast_first(v)": lambda i, w: i // w * w,
    "shuffle_xor(v, 3)": lambda i, w: i ^ 3,
    "shuffle_up(v, 1)": lambda i, w: i - 1 if i % w else i,
    "shuffle_down(v, 2)": lambda i, w: i + 2 if i % w + 2 < w else i,
    "shuffle_rotate_up(v, 1)": lambda i, w: i // w * w + (i - 1) % w,
    "shuffle_rotate_down(v, 3)": lambda i, w: i // w * w + (i + 3) % w,
}
FILLS = {"up": -1, "down": 1}
MODULO = [(1, 8), (3, 16)]  # of simd_shuffle_and_fill: by, and the width of a run


def vote(width: int) -> dict[str, list[int]]:
    odd = sum(1 << j for j in range(1, width, 2))
    group = "simd" if width == 32 else "quad"
    return {
        f"ulong({group}_ballot(lane % 2 == 1))": [odd if odd < 1 << 31 else odd - (1 << 32)] * 32,
        f"{group}_any(lane == 5)": [int(width == 32 or i // 4 == 1) for i in LANES],
        f"{group}_all(lane >= 4)": [int(width == 4 and i >= 4) for i in LANES],
        f"{group}_is_first()": [int(i % width == 0) for i in LANES],
        f"ulong({group}_active_threads_mask())": [-1 if width == 32 else 15] * 32,
        f"{group}_ballot(lane < 4).all()": [int(width == 4 and i < 4) for i in LANES],
        f"{group}_ballot(lane < 32).all()": [1] * 32,
        f"{group}_vote({group}_ballot(lane == 5)).any()": [
            int(width == 32 or i // 4 == 1) for i in LANES
        ],
    }


def shuffle(group: str, width: int, call: str) -> str:
    return f"{group}_{call.replace('W', str(width))}"


def fill(group: str, direction: str, by: int = 1, modulo: int = 0) -> str:
    more = f", {modulo}" if modulo else ""
    return f"{group}_shuffle_and_fill_{direction}(v, v + 100, {by}{more})"


BATCH = Batch(
    [(f"{g}_{n}(v)", t) for g, _ in GROUPS for n, (t, _) in REDUCTIONS.items()]
    + [(f"{g}_prefix_{k}_{n}(v)", "float") for g, _ in GROUPS for k, n in PREFIXES]
    + [(shuffle(g, w, c), "float") for g, w in GROUPS for c in SHUFFLES]
    + [(fill(g, d), "float") for g, _ in GROUPS for d in FILLS]
    + [(fill("simd", d, *m), "float") for d in FILLS for m in MODULO]
    + [(e, "int") for _, w in GROUPS for e in vote(w)]
    + [(f"simd_{n}(v)", t) for n in ("sum", "max") for t in ("half", "bfloat", "short", "char")]
    + [("simd_is_helper_thread()", "int"), ("simd_sum(int4(v)).z", "int")]
    + [("simd_shuffle_xor(float3(v, v + 1, 2 * v), 1).y", "float")]
)


def groups(width: int) -> list[list[int]]:
    return [LANES[i : i + width] for i in range(0, 32, width)]


@pytest.mark.parametrize(("group", "width"), GROUPS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(group: str, width: int, name: str) -> None:
    type_, f = REDUCTIONS[name]
    values = [float((i * 5) % 3 + 1) for i in LANES] if name == "product" else FLOATS
    values = INTS if type_ == "int" else values
    want = [f([values[j] for j in g]) for g in groups(width) for _ in g]
    assert BATCH(f"{group}_{name}(v)", type_, values) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("type_", ["half", "bfloat", "short", "char"])
def test_reductions_of_narrow_types(type_: str) -> None:
    values = [i % 4 - 1 for i in LANES]  # whose sums are exact
    assert BATCH("simd_sum(v)", type_, values) == [sum(values)] * 32
    assert BATCH("simd_max(v)", type_, values) == [2] * 32


@pytest.mark.parametrize(("group", "width"), GROUPS)
@pytest.mark.parametrize(("kind", "name"), PREFIXES)
def test_prefixes(group: str, width: int, kind: str, name: str) -> None:
    values = [float(i % 2 + 1) for i in LANES]
    f, last = sum if name == "sum" else prod, int(kind == "inclusive")
    want = [f(values[j] for j in g[: n + last]) for g in groups(width) for n in range(width)]
    assert BATCH(f"{group}_prefix_{kind}_{name}(v)", "float", values) == want


@pytest.mark.parametrize(("group", "width"), GROUPS)
@pytest.mark.parametrize("call", SHUFFLES)
def test_shuffles(group: str, width: int, call: str) -> None:
    want = [FLOATS[SHUFFLES[call](i, width)] for i in LANES]
    assert BATCH(shuffle(group, width, call), "float", FLOATS) == want


@pytest.mark.parametrize("direction", FILLS)
@pytest.mark.parametrize(
    ("group", "width", "by", "modulo"),
    [("simd", 32, 1, 0), ("quad", 4, 1, 0)] + [("simd", 32, *m) for m in MODULO],
)
def test_shuffle_and_fill(group: str, width: int, by: int, modulo: int, direction: str) -> None:
    run, want = modulo or width, []
    for i in LANES:
        at = i % run + by * FILLS[direction]
        source = FLOATS if 0 <= at < run else [v + 100 for v in FLOATS]
        want.append(source[i // run * run + at % run])
    assert BATCH(fill(group, direction, by, modulo), "float", FLOATS) == want


@pytest.mark.parametrize("width", [32, 4])
def test_votes(width: int) -> None:
    for call, values in vote(width).items():
        assert BATCH(call, "int", INTS) == values, call


def test_vectors_and_helpers() -> None:
    assert BATCH("simd_sum(int4(v)).z", "int", INTS) == [sum(INTS)] * 32
    want = [FLOATS[i ^ 1] + 1 for i in LANES]
    assert BATCH("simd_shuffle_xor(float3(v, v + 1, 2 * v), 1).y", "float", FLOATS) == want
    assert BATCH("simd_is_helper_thread()", "int", INTS) == [0] * 32


def test_threads_that_have_returned_take_no_part() -> None:
    """What Metal says of active threads, where a launch allows inactive ones: two simdgroups."""
    source = MetalSource(
        f"""{HEAD}kernel void k(device int* y, uint i [[thread_position_in_grid]]) {{
  if (i % 3 == 0) return;
  device int* row = y + 4 * i;
  row[0] = simd_sum(int(i)); row[1] = popcount(uint(ulong(simd_active_threads_mask())));
  row[2] = simd_is_first(); row[3] = simd_prefix_exclusive_sum(1);
}}"""
    )
    y = torch.full((2, 32, 4), -1, dtype=torch.int32)
    source.function("k")(1, 64, [y], allow_inactive=True)
    for simdgroup, rows in enumerate(y):
        ids = [32 * simdgroup + i for i in LANES]
        active = [i for i in ids if i % 3]
        for i, row in zip(ids, rows.tolist(), strict=True):
            first = int(i == active[0])
            assert row == (
                [sum(active), len(active), first, active.index(i)] if i % 3 else [-1] * 4
            )
