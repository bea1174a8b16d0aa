"""Every plan: the reviewed ones, and what all of them keep, for GPUs that are not here.

`PYTHONPATH=.:tests/support python tests/plan/test_plan.py` rewrites plans.txt: a changed choice is
then a diff.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CHIPS, DTYPES, MS, NKS, pieces, stored, strategy_of, weaves

from torch_metalmm import _C, formats
from torch_metalmm.tools import explain

pytestmark = pytest.mark.quick

ACTIVATIONS = tuple(_C.activations())
GOLDEN = Path(__file__).with_name("plans.txt")
FORMATS = formats.names()
KERNELS = set(_C.kernel_names())
ROPES = ("rope", "rope_append")
# test_plan_attention.py and test_plan_experts.py have the others; these two take few sizes.
OTHERS = ("attention", "causal_conv", "gated_delta", "hadamard", "route", "ssm_scan")
OPS = [op for op in _C.ops() if op not in OTHERS and not op.startswith("expert_")]


def line(plan: dict[str, Any]) -> str:
    passes: list[str] = []
    for one in plan["passes"]:
        grid = "x".join(map(str, one["grid"]))
        constants = ",".join(str(v) for v in one["constants"].values())
        passes.append(
            f"{one['kernel']} {grid} x {one['group'][0]} {one['threadgroup_bytes']}B [{constants}]"
        )
    if dense := plan["dense"]:
        panels = Counter(passes[: dense["panels"]])  # in order: all but the last are equal
        decoded = " + ".join(f"{count} x {text}" for text, count in panels.items()) or "W"
        multiplied = f"{decoded} -> torch's matmul of {dense['rows']} rows"
        passes[: dense["panels"]] = [multiplied]
    if sdpa := plan["sdpa"]:
        traits = [name for name in ("is_causal", "is_masked") if sdpa[name]]
        panels = "x".join(str(sdpa[name]) for name in ("sequences", "heads", "queries"))
        passes.append(" ".join(("torch's attention of", panels, *traits)))
    for scratch in ("arranged", "workspace"):
        if plan[f"{scratch}_bytes"]:
            passes.append(f"{scratch} {plan[f'{scratch}_bytes']}")
    return " ; ".join(passes)


def alike(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """A line for each size and plan: the names that have it."""
    names: dict[tuple[str, str], list[str]] = {}
    for size, name, plan in rows:
        names.setdefault((size, plan), []).append(name)
    return [f"{size} {' '.join(of)}: {plan}" for (size, plan), of in names.items()]


def of_format(name: str, dtype: str, plan: dict[str, Any]) -> str:
    """The plan with * for the format and the dtype in the names of kernels."""
    codec = re.sub(r"_g\d+.*", "", name)
    return line(plan).replace(f"_{codec}_{dtype} ", "_* ").replace(f"_{dtype} ", "_* ")


def linear_lines() -> Iterator[str]:
    yield "# linear of q4_k and f16, the chips that have a plan"
    yield from alike(
        (f"{m}x{n}x{k}", chip, line(_C.plan(m=m, n=n, k=k, format="q4_k", chip=chip)))
        for n, k in NKS
        for m in MS
        for chip in CHIPS
    )
    yield from ("", "# linear on m4-max, the formats and dtypes that have a plan")
    sizes = {"n": 1000, "k": 4096, "chip": "m4-max", "bias": True}
    rows = [(m, f, DTYPES[(i + m) % 3]) for i, f in enumerate(FORMATS) for m in (1, 4, 12, 33)]
    yield from alike(
        (f"{m}x1000x4096", f"{f}_{t}", of_format(f, t, _C.plan(m=m, format=f, dtype=t, **sizes)))
        for m, f, t in sorted(rows, key=lambda row: row[0])
    )


Case = tuple[str, str, dict[str, Any]]  # what it is called, op, arguments of plan()
NORM = {"norm": True, "norm_weight": True}
ROPE = {"heads": 32, "kv_heads": 8, "rotated": 128, "positions": 7, "angle_rows": 7}
ROUTES = ({}, {"renormalise": True})
ROUTES += ({"groups": 8, "kept_groups": 4, "sigmoid": True, "choice_bias": True},)
EXPERTS: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("expert_up", 8, {"sharing": 8, "limit": 7.0, "is_oai": True}),
    ("expert_linear", 8, {"sharing": 8}),
    ("expert_down", 1, {"choices": 8}),
    ("expert_tiles", 40 * 228, {"tile_rows": 40}),
)


def cases() -> Iterator[Case]:
    """Of m4-max, f16 and q8_0, where they do not say others."""
    for dtype in DTYPES:
        for m in (47, 48, 512):
            sizes = {"m": m, "n": 14336, "k": 4096, "format": "q4_k", "bias": m < 512}
            yield f"{m} rows, {dtype}", "linear", sizes | {"dtype": dtype, "chip": _C.CUDA}
    for op in OPS:
        for forced in (None, *_C.strategies(op)):
            name = "q8_0" if op == "rope_append" else "affine4_g64_f32"
            sizes = {"m": 3, "n": 200, "k": 8192, "format": name, "chip": "m2"}
            yield str(forced or "auto"), op, sizes | {"strategy": forced}
    for name, m in product(("q4_0", "q4_k"), (1, 2, 4)):
        if _C.norm_is_fused(m=m, format=name, chip="m4-max"):
            sizes = {"m": m, "n": 4096, "k": 4096, "format": name, "offset": float(m - 1)}
            yield f"{name} norm {m}", "linear", sizes | NORM
    for name in ACTIVATIONS:
        sizes = {"m": 1, "n": 14336, "k": 4096, "format": "q4_0", "norm": True}
        yield name, "swiglu_up", sizes | {"activation": name}
    for flags in ({}, {"q_norm": True, "k_norm": True}, {"interleaved": True, "v_apart": True}):
        yield " ".join(flags), "rope", {"m": 21, "k": 128, "rope": ROPE | flags}
    for name in stored():
        yield name, "rope_append", {"m": 21, "n": 900, "k": 128, "format": name, "rope": ROPE}
    conv = {"positions": 70, "width": 4, "bias": True, "silu": True}
    yield "", "causal_conv", {"m": 210, "n": 8192, "k": 4, "conv": conv}
    yield "gate", "rms_norm", {"m": 21, "k": 128, "gate": True, "norm_weight": True}
    delta = {"heads": 32, "key_heads": 16, "positions": 7}
    yield "", "gated_delta", {"m": 21, "n": 128, "k": 128, "delta": delta}
    scan = {"heads": 64, "groups": 8, "positions": 7}
    for gate in (False, True):
        sizes = {"m": 21, "n": 64, "k": 128, "ssm": scan, "gate": gate}
        yield "gate" * gate, "ssm_scan", sizes
    yield "", "hadamard", {"n": 4096 * 3}
    tables = {"rows": 3, "twice": True, "interleaved": True, "axes": True}
    yield "axes", "rope_tables", {"m": 21, "k": 64, "tables": tables}
    for flags in ROUTES:
        yield " ".join(flags), "route", {"m": 21, "n": 256, "k": 8, "route": flags}
    for op, m, flags in EXPERTS:
        sizes = {"m": m, "n": 768, "k": 2048, "format": "q4_k", "experts": {"experts": 128} | flags}
        tiles = op == "expert_tiles"
        yield f"{m} rows", op, sizes | {"bias": not tiles, "y_f32": tiles}
    few = [({}, "m4-max", "q8_0", q, n) for q in (1, 2, 5, 16, 512) for n in (64, 1000, 131072)]
    filled = ((16, 8704), (17, 17), (512, 512), (512, 8704), (512, 131072))
    for name, (queries, slots) in product(("f16", "q8_0"), filled):
        few.append(({"filled": True}, _C.CUDA, name, queries, slots))
    for flags, chip, name, queries, slots in few:
        sizes = {"heads": 32, "kv_heads": 8, "queries": queries} | flags
        asked = {"n": slots, "k": 128, "format": name, "chip": chip, "attention": sizes}
        yield f"{chip} {name} {queries} of {slots} slots", "attention", asked


def golden_lines() -> list[str]:
    head = "# threadgroups x threads, threadgroup bytes, [k,group,scale_type,epilogue,batch,bounds]"
    return [head, "", *linear_lines(), "", "# every op"] + [
        f"{op} {label}: {line(_C.plan(op, **{'format': 'q8_0', 'chip': 'm4-max'} | asked))}"
        for label, op, asked in cases()
    ]


def test_golden() -> None:
    """The plans of ten chips for the shapes we measure are those that were reviewed."""
    wanted = GOLDEN.read_text().splitlines()
    for want, got in zip(wanted, golden_lines(), strict=True):
        assert got == want, "on purpose? PYTHONPATH=.:tests/support python tests/plan/test_plan.py"


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(["linear"] * 10 + OPS))
    fmt = formats.get(draw(st.sampled_from(stored() if op == "rope_append" else FORMATS)))
    small = st.integers(0, 70)
    blocks = draw(st.integers(0, 300) | st.sampled_from([16384 // fmt.block_values, 1 << 12]))
    y_f32 = op == "linear" and draw(st.booleans())
    has_epilogue = op in ("linear", "swiglu_down") and not y_f32
    has_c = has_epilogue and draw(st.booleans())
    m = draw(small | st.integers(0, 5000) | st.sampled_from(MS))
    strategy = draw(st.none() | st.sampled_from(_C.strategies(op)))
    chip = draw(st.sampled_from(explain.chips()))
    fused = op == "swiglu_up" or _C.norm_is_fused(m=m, format=fmt.name, chip=chip)
    takes_norm = _C.strategy(strategy)["takes_norm"] if strategy else fused
    has_norm = op in ("linear", "swiglu_up") and takes_norm and draw(st.booleans())
    heads = {"heads": draw(st.integers(1, 70)), "kv_heads": draw(st.integers(1, 9))}
    return {
        "op": op,
        "m": m,
        "n": draw(small | st.integers(0, 300_000)),
        "k": blocks * fmt.block_values,
        "format": fmt.name,
        "dtype": draw(st.sampled_from(DTYPES)),
        "chip": chip,
        "bias": has_epilogue and draw(st.booleans()),
        "c": has_c,
        "alpha": draw(st.sampled_from([1.0, 0.5])) if has_c else 1.0,
        "beta": draw(st.sampled_from([0.0, 2.0])) if has_c else 0.0,
        "y_f32": y_f32,
        "strategy": strategy,
        "norm": has_norm,
        "norm_weight": has_norm and draw(st.booleans()),
        "offset": draw(st.sampled_from([0.0, 1.0])),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "rope": {**heads, "angle_rows": m} if op in ROPES else {},
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


def tile_is_of_matrices(one: dict[str, Any]) -> bool:
    name = one["kernel"]
    return name.startswith("gemm_") and not name.startswith(("gemm_tiled", "gemm_naive"))


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
        # A tile loads its first step in any case: without K nothing of it is there. Those of the
        # matrix units ask for the end of M always.
        always = (name == "k" and p[name] == 0) or (name == "m" and tile_is_of_matrices(one))
        assert has_tail == (p[name] % tile > 0 or always)
    assert constants["k"] == p["k"]


def epilogue(p: dict[str, Any]) -> int:
    has = {"bias": p["bias"], "c": p["c"] and p["beta"] != 0, "alpha": p["alpha"] != 1}
    return sum(_C.EPILOGUE_BITS[name] for name, is_there in has.items() if is_there)


def functions(p: dict[str, Any]) -> int:
    """The bits of what is done to x or to a gate."""
    weight = p["norm_weight"]
    has = {"norm": p["norm"], "norm_weight": weight, "norm_offset": weight and p["offset"] != 0}
    bits = sum(_C.EPILOGUE_BITS[name] for name, is_there in has.items() if is_there)
    return bits + _C.EPILOGUE_BITS["activation"] * ACTIVATIONS.index(p["activation"])


def check_flat(p: dict[str, Any], one: dict[str, Any], row: dict[str, Any], reduces: bool) -> None:
    per_row = ceil(p["k"] / row["values"])
    heads = p["rope"].get("heads", 1) + 2 * p["rope"].get("kv_heads", 1)
    items = {
        **dict.fromkeys(ROPES, p["m"] * heads * 32),
        "embedding": p["m"] * per_row,
        "rope_tables": p["m"] * p["k"],
        "dequantize": p["n"] * per_row,
    }.get(p["op"], ceil(p["n"] / row["values"]))
    if reduces:
        items = ceil(p["m"] * p["n"] / row["values"])
        assert one["constants"]["epilogue"] == epilogue(p)
        assert one["kernel"] == f"split_reduce_{'f32' if p['y_f32'] else p['dtype']}"
    assert one["grid"][1:] == [1, 1]
    assert covers(one["grid"][0], row["threads"], items)


def check_dense(p: dict[str, Any], plan: dict[str, Any]) -> None:
    """Panels hold every row once, each beginning as aligned as W; what joins the sums is a pass."""
    dense, passes = plan["dense"], plan["passes"]
    joins = epilogue(p) > 0
    rows = [one["args"]["n"] for one in passes[: dense["panels"]]]
    assert len(passes) == dense["panels"] + joins
    apart = joins and plan["chip"] == _C.CUDA and p["dtype"] != "f32"
    assert plan["workspace_bytes"] == (4 * p["m"] * p["n"] if apart else 0)
    if joins:
        check_flat(p, passes[-1], _C.strategy("split_reduce"), reduces=True)
        assert passes[-1]["args"]["parts"] == apart
    assert bool(rows) == (p["k"] > 0 and p["format"] != p["dtype"])
    assert sum(rows) == p["n"] if rows else dense["rows"] == p["n"]
    assert all(n == dense["rows"] and n % 16 == 0 for n in rows[:-1])
    values = formats.DTYPES[p["dtype"]].itemsize * p["k"]
    assert all(n * values <= max(128 << 20, 16 * values) for n in rows)
    for one in passes[: len(rows)]:
        assert one["kernel"].startswith("dequantize_") and one["kernel"].endswith(f"_{p['dtype']}")
        assert one["args"]["w_stride"] == formats.get(p["format"]).row_bytes(p["k"])
        sizes = p | {"op": "dequantize", "n": one["args"]["n"]}
        check_flat(sizes, one, _C.strategy("dequantize"), reduces=False)


def check_arranged(p: dict[str, Any], plan: dict[str, Any]) -> None:
    """A pass before the tiles of more than 8 rows writes all of x, rounded up to whole tiles and
    steps, in runs of 16 bytes; before gemv_batched of floats, on NVIDIA, rounded up to steps."""
    assert plan["main"] == (plan["arranged_bytes"] > 0)
    main = plan["passes"][plan["main"]]
    strategy, bits = strategy_of(main["kernel"]), _C.BOUNDS_BITS
    batch, bounds = main["constants"]["batch"], main["constants"]["bounds"]
    tiles = strategy == "gemm_small" and batch > 8
    cores = (_C.gpu(p["chip"]) | p["gpu"])["cores"]
    vectors = strategy == "gemv_batched" and p["dtype"] == "f32" and plan["chip"] == _C.CUDA
    codec = re.sub(r"_g\d+.*", "", p["format"])
    is_far = pieces()[codec] == 32 == weaves().get(codec, 32)  # a line for each lane
    vectors &= codec not in formats.DTYPES
    vectors &= p["m"] * p["n"] >= (64 if is_far else 128) * cores
    kept = _C.EPILOGUE_BITS["norm"] | _C.EPILOGUE_BITS["partial"]
    vectors &= main["constants"]["epilogue"] & kept == 0
    assert bool(plan["main"]) == ((tiles or vectors) and p["k"] > 0)
    assert (bounds & bits["arranged_x"] > 0) == (plan["main"] == 1 and vectors)
    if plan["main"]:
        step = 32 * pieces()[codec] if vectors else _C.strategy(strategy)["k"]
        values = ceil(p["k"] / step) * step
        rows = p["m"] if vectors else main["grid"][0] * batch
        item = formats.DTYPES[p["dtype"]].itemsize
        one = plan["passes"][0]
        assert one["kernel"] == f"arrange_x_{p['dtype']}"
        assert one["args"]["count"] == rows * values * item // 16
        assert covers(one["grid"][0], one["group"][0], one["args"]["count"])
        assert one["grid"][1:] == [1, 1] and plan["arranged_bytes"] == rows * values * item
        assert one["args"]["x_stride"] == p["k"]
        assert main["args"]["x_stride"] == (values if vectors else p["k"])
        assert one["constants"]["batch"] == batch and one["constants"]["k"] == p["k"]
        own = one["constants"]["bounds"]
        assert own & bits["k"] == (bits["k"] if p["k"] % step else 0)
        is_aligned = p["k"] * item % 16 == 0 or p["m"] <= 1
        assert own & bits["aligned_x"] == (bits["aligned_x"] if is_aligned else 0)
        assert bounds & bits["aligned_x"] if vectors else (own ^ bounds) & bits["aligned_x"] == 0


@settings(max_examples=1000)
@given(problems())
def test_invariants(p: dict[str, Any]) -> None:
    """Tiles cover each output once, parts of K are whole blocks, limits hold, kernels exist."""
    try:
        plan = _C.plan(**p)
    except ValueError as error:
        # The only ways a well-formed problem is refused.
        few = re.match(r".* bytes of threadgroup memory", str(error))
        assert few or re.match(
            r"threads: \d{10,} does not fit 32 bits|strategy: dense multiplies K = \d{5,}",
            str(error),
        )
        return
    gpu = _C.gpu(p["chip"]) | p["gpu"]
    assert all(one["threadgroup_bytes"] <= gpu["max_threadgroup_memory"] for one in plan["passes"])
    if plan["dense"]:
        check_dense(p, plan)
        return
    assert p["strategy"] != "dense" or not plan["passes"]
    if plan["passes"]:
        check_arranged(p, plan)
    for i, one in enumerate(plan["passes"], -plan["main"]):
        assert one["kernel"] in KERNELS
        assert all(size > 0 for size in one["grid"])
        name = strategy_of(one["kernel"])
        row = _C.strategy(name)
        assert one["group"] == [row["threads"], 1, 1]
        assert row["threads"] <= gpu["max_threads"] and row["threads"] % _C.SIMD_WIDTH == 0
        if row["family"] == "matmul":
            check_matmul(p, one, row)
            last = one is plan["passes"][-1]
            sums = not last or (p["y_f32"] and p["dtype"] != "f32")
            bits = _C.EPILOGUE_BITS["partial"] if sums else epilogue(p)
            assert one["constants"]["epilogue"] == bits + functions(p)
        elif row["family"] == "groups":
            assert one["grid"] == [p["m"], 1, 1]
        elif row["family"] != "single" and i >= 0:
            check_flat(p, one, row, reduces=i == 1)
        if p["strategy"] and i == 0 and p["strategy"] != "split_reduce":
            assert name == _C.strategy(p["strategy"])["kernels"]
    parts = plan["passes"][plan["main"]]["args"]["parts"] if plan["passes"] else 1
    is_split = bool(plan["passes"]) and (parts > 1 or p["strategy"] == "split_reduce")
    assert len(plan["passes"]) == plan["main"] + (2 if is_split else bool(plan["passes"]))
    assert plan["workspace_bytes"] == (4 * parts * p["m"] * p["n"] if is_split else 0)
    if p["strategy"] == "split_reduce" and parts == 1 and plan["passes"]:
        step = _C.strategy(strategy_of(plan["passes"][plan["main"]]["kernel"]))["k"]
        assert p["k"] <= max(step, formats.get(p["format"]).block_values)


def test_every_matmul_strategy_takes_every_m() -> None:
    """Forced, a strategy computes any number of rows: what its kernel cannot hold becomes grid."""
    for strategy in set(_C.strategies("linear")) - {"split_reduce", "dense"}:
        for m in (1, 2, 17, 130, 100_000):
            one = _C.plan(m=m, n=5, k=64, format="q4_0", chip="m3", strategy=strategy)
            one = one["passes"][one["main"]]
            check_matmul({"m": m, "n": 5, "k": 64, "format": "q4_0"}, one, _C.strategy(strategy))


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(golden_lines()) + "\n")
