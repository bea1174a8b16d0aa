"""What plan() chooses, what it passes to kernels, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from places import ROOT
from plan_cases import NKS, STRATEGIES, WIDTH_BITS, strategies_used, strategy_of

from torch_metalmm import _C, formats
from torch_metalmm.tools import explain

pytestmark = pytest.mark.quick

BASELINES = {"gemv_coalesced", "gemm_naive", "gemm_tiled"}
PARTIAL = _C.EPILOGUE_BITS["partial"]


def chosen(**problem: Any) -> set[str]:
    return set(strategies_used(_C.plan(**problem)))


def test_every_strategy_is_reachable() -> None:
    """Each is chosen for something, or is a baseline, which only a name reaches."""
    found: set[str] = set()
    heads = {"k": 128, "n": 512, "format": "q4_0", "chip": "m4-max", "op": "attention"}
    for queries in (1, 40):
        found |= chosen(**heads, attention={"queries": queries})
    found |= chosen(op="causal_conv", n=128, k=4, chip="m4-max", conv={"width": 4})
    found |= chosen(op="gated_delta", n=128, k=128, chip="m4-max")
    found |= chosen(op="ssm_scan", n=64, k=128, chip="m4-max")
    found |= chosen(op="route", n=128, k=8, chip="m4-max")
    found |= chosen(op="hadamard", n=4096, chip="m4-max")
    of_their_own = {"attention", "causal_conv", "gated_delta", "hadamard", "route", "ssm_scan"}
    for op in {*_C.ops()} - of_their_own:
        for m in (16, 128) if op == "expert_tiles" else (1, 2, 16, 20, 128):
            for n, k in (*NKS, (64, 65536)):
                found |= chosen(op=op, m=m, n=n, k=k, format="q4_0", chip="m4-max")
    assert set(STRATEGIES) - found == BASELINES
    # The second pass of the two others, and the first of gemm_small.
    for name in {*STRATEGIES} - {"attention_join", "arrange_x"}:
        ops = [op for op in _C.ops() if name in _C.strategies(op)]
        assert ops, name
        for op in ops:
            k = {"attention": 256, "causal_conv": 1, "route": 8}.get(op, 512)
            k = 256 if op in ("gated_delta", "ssm_scan") else k
            m = 8 if op == "expert_tiles" else 7
            n = 32 if op == "hadamard" else 36
            forced = {"m": m, "n": n, "k": k, "format": "q4_0", "chip": "m1"}
            assert name in chosen(op=op, strategy=name, **forced)


@pytest.mark.parametrize("chip", explain.chips())
def test_the_ladder_of_m(chip: str) -> None:
    """With growing M: gemv, gemv_batched, gemm_small, gemm, each for one range of M."""
    order = ["gemv", "gemv_batched", "gemm_small", "gemm"]
    for format in ("q4_k", "q4_0"):
        seen = []
        for m in range(1, 40):
            plan = _C.plan(m=m, n=14336, k=2048, format=format, chip=chip)
            seen.append(order.index(strategies_used(plan)[plan["main"]]))
        assert seen == sorted(seen) and set(seen) == {0, 1, 2, 3}
        assert seen.count(0) == 1


@pytest.mark.parametrize("chip", explain.chips())
def test_w_is_decoded_once_for_64_rows_of_x(chip: str) -> None:
    """From 17 to 64 rows of x one tile of x, of at most 15 rows more than there are; beyond, as few
    tiles as there can be, as large as each other. Threadgroup memory as the rows need it."""
    for dtype in ("f16", "f32", "bf16"):
        for m in (17, 24, 25, 32, 33, 47, 64, 65, 96, 130, 512):
            sizes = {"m": m, "n": 14336, "k": 2048, "format": "q4_k", "dtype": dtype}
            plan = _C.plan(**sizes, chip=chip, strategy="gemm")
            one = plan["passes"][0]
            rows, tiles = one["constants"]["batch"], one["grid"][0]
            assert tiles == -(-m // 64) and rows % 16 == 0
            assert m <= tiles * rows < m + 16 * tiles
            assert one["threadgroup_bytes"] == 288 * rows


def test_variants_of_gemv() -> None:
    """wide_n over 32768 rows; large_k by chip, where the grid is small and K long enough."""

    def variant(n: int, k: int, format: str, chip: str) -> str:
        return strategies_used(_C.plan(n=n, k=k, format=format, chip=chip))[0]

    for n, k, format, chip, wanted in (
        (32768, 4096, "q4_0", "m4-max", "gemv"),
        (32769, 4096, "q4_0", "m4-max", "gemv_wide_n"),
        (4096, 4096, "q4_0", "m4-max", "gemv"),
        (2048, 4096, "q4_0", "m4-max", "gemv_large_k"),
        (4096, 4096, "q4_0", "m1", "gemv"),
        (4096, 4096, "q4_k", "m4-max", "gemv"),
        (2048, 8192, "q4_k", "m4-max", "gemv_large_k"),
        (1024, 4096, "q4_k", "m4-max", "gemv"),
        (512, 4096, "q4_k", "m4-max", "gemv_large_k"),
        (512, 2048, "q4_k", "m4-max", "gemv"),
        (256, 4096, "q4_0", "m1", "gemv"),
        (256, 8192, "q4_0", "m1", "gemv_large_k"),
    ):
        assert variant(n, k, format, chip) == wanted, (n, k, format, chip)


def test_batches_are_even() -> None:
    """gemv_batched spreads M over its passes: 9 rows are 5 and 4, not 8 and 1."""
    one = _C.plan(m=9, n=4096, k=4096, format="q4_0", chip="m1")["passes"][0]
    assert (one["constants"]["batch"], one["grid"][0]) == (5, 2)


def test_split_k_fills_the_cores() -> None:
    """A grid under the core count is cut along K, and never when it is over."""
    few = _C.plan(m=64, n=256, k=8192, format="q8_0", chip="m4-max")
    parts = few["passes"][0]["args"]["parts"]
    grid = few["passes"][0]["grid"]
    assert grid[0] * grid[1] < 40 <= grid[0] * grid[1] * parts
    assert strategies_used(few)[1] == "split_reduce"
    many = _C.plan(m=512, n=4096, k=8192, format="q8_0", chip="m4-max")
    assert len(many["passes"]) == 1
    # K has two parts of the fewest values, or one and a half: the reason says why, and as asked.
    two: dict[str, Any] = {"m": 64, "n": 64, "format": "q8_0", "chip": "m1"}
    needed, asked = _C.plan(k=1024, **two), _C.plan(k=768, strategy="split_reduce", **two)
    assert "K in 2 parts of 512, for 2 threadgroups are under" in needed["reason"]
    assert "K in 2 parts of 384, as asked" in asked["reason"]
    assert [len(p["passes"]) for p in (needed, asked, _C.plan(k=768, **two))] == [2, 2, 1]


def test_long_pieces_leave_the_vector_kernels_early() -> None:
    """As much of x per weight as short pieces read; some have no registers for 8 rows of W."""

    def last_batched(format: str) -> int:
        plans = {m: chosen(m=m, n=4096, k=4096, format=format, chip="m1") for m in range(2, 25)}
        return max(m for m, names in plans.items() if "gemv_batched" in names)

    assert [last_batched(f) for f in ("q4_0", "affine4_g64", "q4_k")] == [12, 6, 6]
    assert chosen(m=3, n=4096, k=4096, format="q4_k", chip="m4-max") == {"gemm_small"}
    wide = {"q8_0": "gemv_wide_n", "affine4_g64": "gemv_wide_n", "q4_k": "gemv", "q3_k": "gemv"}
    for format, wanted in wide.items():
        assert chosen(n=128256, k=4096, format=format, chip="m4-max") == {wanted}


def test_less_threadgroup_memory_takes_another_kernel() -> None:
    """A GPU with less memory than the tiles need still gets a plan, and is told why."""
    small = {"max_threadgroup_memory": 8192}
    problem: dict[str, Any] = {"m": 128, "n": 4096, "k": 4096, "format": "q4_k", "chip": "m1"}
    assert chosen(**problem, dtype="f32") == {"gemm"}
    plan = _C.plan(**problem, dtype="f32", gpu=small)
    assert strategies_used(plan) == ["gemm_small"]
    assert "18432 bytes" in plan["reason"]
    with pytest.raises(ValueError, match="strategy: gemm needs 18432 .* has 8192"):
        _C.plan(**problem, dtype="f32", gpu=small, strategy="gemm")
    enough = {"max_threadgroup_memory": 18432}
    for strategy in (None, "gemm"):
        plan = _C.plan(**problem, dtype="f32", gpu=enough, strategy=strategy)
        assert strategies_used(plan) == ["gemm"]


def test_fused_swiglu_for_few_rows() -> None:
    for op in ("swiglu_up", "swiglu_down"):
        fused = [_C.is_fused(op, m) for m in (1, 2, 8, 512)]
        assert fused[0] and not fused[-1] and fused == sorted(fused, reverse=True)
    assert not _C.is_fused("linear", 1)


def test_results_in_f32() -> None:
    """The same kernels of f16 x: they leave f32 sums in y, no workspace; split-K adds in f32."""
    problem: dict[str, Any] = {"n": 4096, "k": 4096, "format": "q4_k", "chip": "m4-max"}
    for m in (1, 8, 128):
        rounded = _C.plan(m=m, **problem)["passes"]
        sums = _C.plan(m=m, y_f32=True, **problem)
        assert [one["kernel"] for one in sums["passes"]] == [one["kernel"] for one in rounded]
        assert sums["passes"][0]["constants"]["epilogue"] == PARTIAL
        assert sums["workspace_bytes"] == 0
    split = _C.plan(m=8, y_f32=True, strategy="split_reduce", **problem)
    assert [one["kernel"][-3:] for one in split["passes"]] == ["f16", "f32"]
    assert split["passes"][1]["constants"]["epilogue"] == 0
    wide = _C.plan(m=8, y_f32=True, dtype="f32", **problem)
    assert wide == _C.plan(m=8, dtype="f32", **problem)


@pytest.mark.parametrize("op", ["linear", "swiglu_up", "route", "rope_tables"])
def test_ops_with_a_factor(op: str) -> None:
    (one,) = _C.plan(op, n=32, k=32, format="q4_0", chip="m1", alpha=0.5)["passes"]
    assert one["args"]["alpha"] == 0.5


def test_nothing_to_compute() -> None:
    for op in ("linear", "embedding", "causal_conv", "gated_delta", "ssm_scan"):
        k, least = (1, 1) if op == "causal_conv" else (32, 4)
        for m, n, passes in ((0, 8, 0), (3, 0, op == "embedding"), (1, least, 1)):
            plan = _C.plan(op, m=m, n=n, k=k, format="q4_0", chip="m1")
            assert len(plan["passes"]) == passes, (op, m, n)
    no_heads = {"heads": 0, "kv_heads": 0}
    assert not _C.plan("rope_append", k=32, format="q4_0", chip="m1", rope=no_heads)["passes"]
    # K = 0 is a sum of nothing, and bias: one pass.
    assert len(_C.plan(m=2, n=8, k=0, format="q4_0", chip="m1", bias=True)["passes"]) == 1


def test_arguments() -> None:
    """Strides default to packed rows; group and scales of affine; c only if beta is not 0."""
    fmt = formats.get("affine4_g64_bf16")
    one = _C.plan(m=3, n=5, k=192, format=fmt.name, chip="m1", c=True, beta=0.0)["passes"][0]
    args, constants = one["args"], one["constants"]
    assert (args["x_stride"], args["y_stride"], args["w_stride"]) == (192, 5, fmt.row_bytes(192))
    assert (constants["group"], constants["scale_type"], constants["epilogue"]) == (64, 1, 0)
    strides = {"x_stride": 0, "y_stride": 9, "w_stride": 4000}
    args = _C.plan(m=3, n=5, k=192, format=fmt.name, chip="m1", **strides)["passes"][0]["args"]
    assert {name: args[name] for name in strides} == strides


@pytest.mark.parametrize(
    ("changes", "x", "w"),
    [
        ({}, True, True),
        ({"x_alignment": 4}, False, True),
        ({"x_stride": 33}, False, True),
        ({"x_stride": 33, "m": 1}, True, True),
        ({"w_alignment": 8}, True, False),
        ({"w_stride": 136}, True, False),
        ({"format": "q8_0"}, True, False),
    ],
)
def test_alignment(changes: dict[str, Any], x: bool, w: bool) -> None:
    """Wide loads only where the first byte and the stride allow; of weights, only dense ones."""
    problem = {"m": 2, "n": 4, "k": 64, "format": "f16", "dtype": "f16", "chip": "m1"} | changes
    bounds = _C.plan(**problem)["passes"][0]["constants"]["bounds"]
    aligned = (_C.BOUNDS_BITS[name] for name in ("aligned_x", "aligned_weight"))
    assert tuple(bool(bounds & bit) for bit in aligned) == (x, w)


def bounds_of(changes: dict[str, Any]) -> int:
    """BoundsBits of four rows of four q4_0 blocks, but for the changes."""
    problem = {"m": 2, "n": 4, "k": 128, "format": "q4_0", "chip": _C.CUDA} | changes
    op = problem.pop("op", "linear")
    bounds: int = _C.plan(op, **problem)["passes"][0]["constants"]["bounds"]
    return bounds


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 8),
        ({"k": 64}, 4),
        ({"k": 96}, 2),
        ({"w_alignment": 4}, 4),
        ({"w_alignment": 2}, 2),
        ({"w_stride": 76}, 4),
        ({"w_stride": 74}, 2),
        ({"w_stride": 74, "n": 1}, 8),
        ({"format": "q6_k", "k": 512}, 4),
        ({"format": "q6_k", "k": 512, "op": "dequantize"}, 4),
        ({"op": "swiglu_up", "w2_stride": 76}, 4),
        ({"format": "q4_1"}, 2),
        ({"format": "mxfp4"}, 2),
        ({"format": "f16", "strategy": "gemv"}, 2),
    ],
)
def test_widths_of_blocks(changes: dict[str, Any], width: int) -> None:
    """Blocks of 2-byte fields are read by the largest width at which rows begin and end."""
    assert bounds_of(changes) & WIDTH_BITS[8] == WIDTH_BITS[width]


@pytest.mark.parametrize(
    ("strategy", "width"),
    [("gemv", 4), ("gemv_batched", 4), ("gemm_tiled", 4), ("gemm", 8), ("gemm_small", 8)],
)
def test_vector_kernels_of_macs_read_no_long_blocks(strategy: str, width: int) -> None:
    """Selects would cost them more than loads of 2 bytes do."""
    bounds = bounds_of({"strategy": strategy, "chip": "m4-max"})
    assert bounds & WIDTH_BITS[8] == WIDTH_BITS[width]
    assert bounds_of({"strategy": strategy}) & WIDTH_BITS[8] == WIDTH_BITS[8]
    attention = {"heads": 32, "kv_heads": 8, "queries": 1}
    one = _C.plan("attention", k=128, n=512, format="q8_0", chip="m4-max", attention=attention)
    assert one["passes"][0]["constants"]["bounds"] & WIDTH_BITS[8] == WIDTH_BITS[4]


@pytest.mark.parametrize(
    ("bit", "changes", "is_set"),
    [
        ("subnormals", {"chip": "m1"}, True),
        ("subnormals", {"chip": "m4-max", "strategy": "gemv_batched"}, True),
        ("subnormals", {"chip": "m1", "gpu": {"keeps_subnormals": False}}, False),
        ("subnormals", {"chip": "m1", "format": "f16", "k": 64, "strategy": "gemv"}, False),
        ("subnormals", {"chip": "m1", "strategy": "gemm"}, False),
        ("subnormals", {"chip": _C.CUDA}, False),
        ("packed_rows", {}, True),
        ("packed_rows", {"w_stride": 88}, False),
        ("packed_rows", {"w_stride": 88, "n": 1}, True),
        ("packed_rows", {"op": "swiglu_up"}, True),
        ("packed_rows", {"op": "swiglu_up", "w2_stride": 88}, False),
    ],
)
def test_what_kernels_are_told_of_w(bit: str, changes: dict[str, Any], is_set: bool) -> None:
    """Codes are subnormal halves in packed rows, for vector kernels, on GPUs that keep them; a
    kernel needs no stride where rows of W, and of W2, follow each other."""
    assert bool(bounds_of(changes) & _C.BOUNDS_BITS[bit]) == is_set


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"k": 100}, "k: 100 is not a multiple of the 32 values of a block of q4_0"),
        (
            {"k": 2**30, "format": "f32"},
            "k: 1073741824 values of f32 are 4294967296 bytes; .* at most 4294967295",
        ),
        ({"k": 2**32}, "k: 4294967296 does not fit 32 bits"),
        ({"m": -1}, "shape: M, N, K = -1, 8, 32; none may be negative"),
        ({"n": -1}, "shape: M, N, K = 1, -1, 32; none may be negative"),
        ({"k": -32}, "shape: M, N, K = 1, 8, -32; none may be negative"),
        ({"op": "hadamard", "n": 33}, "n: 33; hadamard takes a multiple of 32"),
        ({"m": 2**32}, "m: 4294967296 does not fit 32 bits"),
        ({"op": "act_mul", "n": 2**32}, "elements of gate: 4294967296 does not fit 32 bits"),
        ({"strategy": "fast"}, "strategy: unknown 'fast'; allowed: gemv, gemv_large_k"),
        (
            {"strategy": "embedding"},
            "strategy: embedding computes embedding, not linear; that takes",
        ),
        (
            {"op": "dot", "strategy": "gemm"},
            "strategy: gemm computes linear, not dot; .* takes dot",
        ),
        ({"w_alignment": 1}, "weight: rows of q4_0 begin at multiples of 2 bytes; alignment 1"),
        ({"w_stride": 19}, "weight: rows of q4_0 begin at multiples of 2 bytes; .* stride 19"),
        (
            {"op": "embedding", "strategy": "split_reduce"},
            "strategy: split_reduce computes linear, swiglu_down, not embedding",
        ),
        ({"op": "swiglu_up", "bias": True}, "bias, c, alpha: swiglu_up has none"),
        (
            {"y_f32": True, "bias": True},
            "y_f32: only of linear and expert_tiles without",
        ),
        ({"y_f32": True, "alpha": 2.0}, "y_f32: only of linear"),
        ({"y_f32": True, "op": "swiglu_down"}, "y_f32: only of linear"),
        ({"y_f32": True, "y_stride": 9}, "y_f32: rows of y follow each other; y_stride 9"),
        ({"beta": 1.0}, "c: missing, but beta is not 0"),
        ({"chip": "m9-mega"}, "chip: unknown 'm9-mega'; allowed: m1, m1-pro"),
        ({"dtype": "f64"}, "dtype: unknown 'f64'; allowed: f32, f16, bf16"),
        ({"format": "q9"}, "format: unknown 'q9'; allowed: f32"),
        ({"op": "conv"}, "op: unknown 'conv'; allowed: linear"),
    ],
)
def test_refused(problem: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.plan(**{"n": 8, "k": 32, "format": "q4_0", "chip": "m1"} | problem)


@pytest.mark.parametrize("chip", ["m1-max", "m4-max"])
def test_a_prompt_of_another_length_compiles_little(chip: str) -> None:
    """Kernels with their function constants of the products of a model, for prompts of 33 to 1024
    tokens: two sizes of tiles, a part of K or all, and the sum of the parts."""
    shapes = ((960, 576), (576, 576), (1536, 576), (576, 1536), (49152, 576))
    made = {
        (one["kernel"], *one["constants"].values())
        for m in range(33, 1025)
        for n, k in shapes
        for one in _C.plan(m=m, n=n, k=k, format="q4_0", chip=chip)["passes"]
    }
    bounds = {constants[-1] for kernel, *constants in made if kernel.startswith("gemm_")}
    assert all(b & _C.BOUNDS_BITS["m"] for b in bounds)
    batches = {constants[4] for kernel, *constants in made if kernel.startswith("gemm_")}
    assert batches == {48, 64} and len(made) <= 8


def test_rows_of_x_that_were_measured() -> None:
    """MM_BATCHED of tuning.def: up to so many rows a format takes gemv_batched, and no more."""
    structs = {
        struct: name for name, struct in _rows("metal/formats.def", r"MM_\w+ *\((\w+), +(\w+)")
    }
    measured = _rows(
        "csrc/plan/tuning.def", r"MM_BATCHED\(kTensorCores, k(F16|F32), +(\w+), +(\d+)\)"
    )
    assert len(measured) > 30
    for dtype, struct, most in measured:
        name = structs[struct]
        sizes = {"n": 14336, "k": 4096, "dtype": dtype.lower(), "chip": _C.CUDA}
        sizes["format"] = f"{name}_g64" if name.startswith("affine") else name
        plans = [_C.plan(m=m, **sizes) for m in range(2, 10)]
        names = [strategy_of(plan["passes"][plan["main"]]["kernel"]) for plan in plans]
        assert names.count("gemv_batched") == int(most) - 1, name
        assert "gemv_batched" not in names[int(most) - 1 :], name


def _rows(file: str, row: str) -> list[Any]:
    return re.findall(f"^{row}", (ROOT / file).read_text(), re.M)
