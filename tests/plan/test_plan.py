"""Every plan: the reviewed ones, and what all of them keep, for GPUs that are not here.

`PYTHONPATH=.:tests/support python tests/plan/test_plan.py` rewrites plans.txt: a changed choice is
then a diff.
"""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CHIPS, DTYPES, MS, NKS, codecs, strategy_of, strategy_rows

from torch_metalmm import _C, formats
from torch_metalmm.tools import explain

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).with_name("plans.txt")
FORMATS = formats.names()
KERNELS = set(_C.kernel_names())


def line(plan: dict[str, Any]) -> str:
    passes = []
    for one in plan["passes"]:
        grid = "x".join(map(str, one["grid"]))
        constants = ",".join(str(v) for v in one["constants"].values())
        passes.append(
            f"{one['kernel']} {grid} x {one['group'][0]} {one['threadgroup_bytes']}B [{constants}]"
        )
    workspace = f" ; workspace {plan['workspace_bytes']}" if plan["workspace_bytes"] else ""
    return " ; ".join(passes) + workspace


def golden_lines() -> list[str]:
    out = [
        "# threadgroups x threads, threadgroup bytes, [k,group,scale_type,epilogue,batch,bounds]"
    ]
    for chip in CHIPS:
        for n, k in NKS:
            out += ["", f"# {chip}, linear, N={n} K={k}, q4_k, f16"]
            out += [
                f"{chip} {m}x{n}x{k}: {line(_C.plan(m=m, n=n, k=k, format='q4_k', chip=chip))}"
                for m in MS
            ]
    out += ["", "# m4-max, every format"]
    for i, name in enumerate(FORMATS):
        for m in (1, 4, 12, 33):
            act = DTYPES[(i + m) % 3]
            plan = _C.plan(m=m, n=1000, k=4096, format=name, dtype=act, chip="m4-max", bias=True)
            out.append(f"{name} {act} {m}x1000x4096 bias: {line(plan)}")
    out += ["", "# m2, every op and every strategy it takes"]
    for op in _C.ops():
        for strategy in (None, *_C.strategies(op)):
            plan = _C.plan(
                op, m=3, n=200, k=8192, format="affine4_g64_f32", chip="m2", strategy=strategy
            )
            out.append(f"{op} {strategy or 'auto'} 3x200x8192: {line(plan)}")
    return out


def test_golden() -> None:
    """The plans of ten chips for the shapes we measure are those that were reviewed."""
    wanted = GOLDEN.read_text().splitlines()
    for want, got in zip(wanted, golden_lines(), strict=True):
        assert got == want, "on purpose? PYTHONPATH=.:tests/support python tests/plan/test_plan.py"


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(["linear"] * 10 + _C.ops()))
    fmt = formats.get(draw(st.sampled_from(FORMATS)))
    small = st.integers(0, 70)
    blocks = draw(st.integers(0, 300) | st.sampled_from([16384 // fmt.block_values, 1 << 12]))
    y_f32 = op == "linear" and draw(st.booleans())
    has_epilogue = op in ("linear", "swiglu_down") and not y_f32
    has_c = has_epilogue and draw(st.booleans())
    return {
        "op": op,
        "m": draw(small | st.integers(0, 5000) | st.sampled_from(MS)),
        "n": draw(small | st.integers(0, 300_000)),
        "k": blocks * fmt.block_values,
        "format": fmt.name,
        "dtype": draw(st.sampled_from(DTYPES)),
        "chip": draw(st.sampled_from(explain.chips())),
        "bias": has_epilogue and draw(st.booleans()),
        "c": has_c,
        "alpha": draw(st.sampled_from([1.0, 0.5])) if has_c else 1.0,
        "beta": draw(st.sampled_from([0.0, 2.0])) if has_c else 0.0,
        "y_f32": y_f32,
        "strategy": draw(st.none() | st.sampled_from(_C.strategies(op))),
        "gpu": draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "cores": st.integers(1, 200),
                    "max_threadgroup_memory": st.sampled_from([0, 1024, 8192, 16384, 65536]),
                },
            )
        ),
    }


def covers(tiles: int, tile: int, size: int) -> bool:
    """Whether so many tiles hold every index once, and none is empty."""
    return tiles * tile >= size > (tiles - 1) * tile


def check_matmul(p: dict[str, Any], one: dict[str, Any], row: dict[str, Any]) -> None:
    tiles_m, tiles_n, parts = one["grid"]
    args, constants = one["args"], one["constants"]
    rows_of_x = constants["batch"] or row["m"]
    assert rows_of_x <= row["m"]
    assert covers(tiles_m, rows_of_x, p["m"])
    assert covers(tiles_n, row["n"], p["n"])
    assert parts == args["parts"]
    assert parts == 1 or covers(parts, args["k_per_part"], p["k"])
    if parts > 1:
        assert args["k_per_part"] % formats.get(p["format"]).block_values == 0
        assert args["k_per_part"] % row["k"] == 0
    else:
        assert args["k_per_part"] == p["k"]
    for name, tile in (("n", row["n"]), ("m", rows_of_x), ("k", row["k"])):
        has_tail = constants["bounds"] & _C.BOUNDS_BITS[name] > 0
        assert has_tail == (p[name] % tile > 0)
    assert constants["k"] == p["k"]


def epilogue(p: dict[str, Any]) -> int:
    has = {"bias": p["bias"], "c": p["c"] and p["beta"] != 0, "alpha": p["alpha"] != 1}
    return sum(_C.EPILOGUE_BITS[name] for name, is_there in has.items() if is_there)


def check_flat(p: dict[str, Any], one: dict[str, Any], row: dict[str, Any], reduces: bool) -> None:
    per_row = ceil(p["k"] / row["values"])
    items = {
        "embedding": p["m"] * per_row,
        "dequantize": p["n"] * per_row,
    }.get(p["op"], ceil(p["n"] / row["values"]))
    if reduces:
        items = ceil(p["m"] * p["n"] / row["values"])
        assert one["constants"]["epilogue"] == epilogue(p)
        assert one["kernel"] == f"split_reduce_{'f32' if p['y_f32'] else p['dtype']}"
    assert one["grid"][1:] == [1, 1]
    assert covers(one["grid"][0], row["threads"], items)


@settings(max_examples=1000)
@given(problems())
def test_invariants(p: dict[str, Any]) -> None:
    """Tiles cover each output once, parts of K are whole blocks, limits hold, kernels exist."""
    try:
        plan = _C.plan(**p)
    except ValueError as error:
        # The only ways a well-formed problem is refused.
        few = re.match(r".* bytes of threadgroup memory", str(error))
        assert few or re.match(r"threads: \d{10,} does not fit 32 bits", str(error))
        return
    gpu = _C.gpu(p["chip"]) | p["gpu"]
    for i, one in enumerate(plan["passes"]):
        assert one["kernel"] in KERNELS
        assert one["threadgroup_bytes"] <= gpu["max_threadgroup_memory"]
        assert all(size > 0 for size in one["grid"])
        name = strategy_of(one["kernel"])
        row = _C.strategy(name)
        assert one["group"] == [row["threads"], 1, 1]
        assert row["threads"] <= gpu["max_threads"] and row["threads"] % _C.SIMD_WIDTH == 0
        if row["family"] == "matmul":
            check_matmul(p, one, row)
            last = len(plan["passes"]) == 1
            sums = not last or (p["y_f32"] and p["dtype"] != "f32")
            bits = _C.EPILOGUE_BITS["partial"] if sums else epilogue(p)
            assert one["constants"]["epilogue"] == bits
        elif row["family"] != "single":
            check_flat(p, one, row, reduces=i == 1)
        if p["strategy"] and i == 0 and p["strategy"] != "split_reduce":
            assert name == _C.strategy(p["strategy"])["kernels"]
    parts = plan["passes"][0]["args"]["parts"] if plan["passes"] else 1
    is_split = bool(plan["passes"]) and (parts > 1 or p["strategy"] == "split_reduce")
    assert len(plan["passes"]) == (2 if is_split else bool(plan["passes"]))
    assert plan["workspace_bytes"] == (4 * parts * p["m"] * p["n"] if is_split else 0)
    if p["strategy"] == "split_reduce" and parts == 1 and plan["passes"]:
        step = _C.strategy(strategy_of(plan["passes"][0]["kernel"]))["k"]
        assert p["k"] <= max(step, formats.get(p["format"]).block_values)


def test_kernel_names() -> None:
    """The names are strategies.def times formats.def times the dtypes."""
    wanted = set()
    for strategy, family in strategy_rows().items():
        middles = [f"_{codec}" for codec in codecs()] if family in ("Matmul", "Rows") else [""]
        wanted |= {f"{strategy}{middle}_{act}" for middle in middles for act in DTYPES}
    assert wanted == KERNELS
    assert len(KERNELS) == len(_C.kernel_names())


def test_every_matmul_strategy_takes_every_m() -> None:
    """Forced, a strategy computes any number of rows: what its kernel cannot hold becomes grid."""
    for strategy in set(_C.strategies("linear")) - {"split_reduce"}:
        for m in (1, 2, 17, 130, 100_000):
            one = _C.plan(m=m, n=5, k=64, format="q4_0", chip="m3", strategy=strategy)["passes"][0]
            check_matmul({"m": m, "n": 5, "k": 64, "format": "q4_0"}, one, _C.strategy(strategy))


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(golden_lines()) + "\n")
