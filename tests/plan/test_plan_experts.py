"""Plans of the ops on experts: one pass each, whose grid holds every result once."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import CHIPS, DTYPES

from torch_metalmm import _C, formats

pytestmark = pytest.mark.quick

OPS = [op for op in _C.ops() if op.startswith("expert_")]
KERNELS = set(_C.kernel_names())


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(OPS))
    fmt = formats.get(draw(st.sampled_from(formats.names())))
    rows = 8 * draw(st.integers(1, 8))
    m = rows * draw(st.integers(1, 400)) if op == "expert_tiles" else draw(st.integers(1, 5000))
    y_f32 = op == "expert_tiles"
    return {
        "op": op,
        "m": m,
        "n": draw(st.integers(1, 20_000)),
        "k": fmt.block_values * draw(st.integers(0, 100)),
        "format": fmt.name,
        "dtype": draw(st.sampled_from(DTYPES)),
        "chip": draw(st.sampled_from((*CHIPS, _C.CUDA))),
        "bias": not y_f32 and draw(st.booleans()),
        "y_f32": y_f32,
        "experts": {
            "experts": draw(st.integers(1, 512)),
            "choices": draw(st.integers(1, 20)),
            "sharing": draw(st.integers(1, 20)),
            "tile_rows": rows,
            "alternates": draw(st.booleans()),
            "limit": draw(st.sampled_from([0.0, 7.0])),
        },
    }


@given(problems())
def test_invariants(p: dict[str, Any]) -> None:
    (one,) = _C.plan(**p)["passes"]
    (strategy,) = _C.strategies(p["op"])
    row, args, e = _C.strategy(strategy), one["args"], p["experts"]
    assert one["kernel"] in KERNELS and one["kernel"].startswith(f"{strategy}_{p['format'][:2]}")
    rows = e["tile_rows"] if p["op"] == "expert_tiles" else 1
    assert one["grid"] == [p["m"] / rows, ceil(p["n"] / row["n"]), 1]
    assert one["constants"]["bounds"] & _C.BOUNDS_BITS["m"] == 0
    assert args["head_stride"] == p["n"] * formats.get(p["format"]).row_bytes(p["k"])
    assert [args[name] for name in ("heads", "kv_heads", "positions")] == [
        e[name] for name in ("choices", "experts", "sharing")
    ]
    last = args["window"] - 1  # the last bias, of up where there is one
    assert (p["n"] - 1) * args["count"] + args["rotated"] == last
    assert args["window"] == p["n"] * (2 if p["op"] == "expert_up" else 1)
    epilogue = one["constants"]["epilogue"]
    assert (epilogue & _C.EPILOGUE_BITS["bias"] > 0) == p["bias"]
    assert (epilogue & _C.EXPERT_BITS["limit"] > 0) == (e["limit"] > 0)


@pytest.mark.parametrize("stride", [32, 33])
def test_rows_of_x_of_one_token_are_several(stride: int) -> None:
    """A row of y sums the choices of a token, whose rows of x need not all be aligned."""
    sizes = {"experts": 4, "choices": 4, "sharing": 1}
    plan = _C.plan(
        "expert_down", m=1, k=32, format="f16", chip="m1", x_stride=stride, experts=sizes
    )
    bounds = plan["passes"][0]["constants"]["bounds"]
    assert (bounds & _C.BOUNDS_BITS["aligned_x"] > 0) == (stride == 32)


@pytest.mark.parametrize("experts", [1, 8, 128])
def test_rows_of_a_tile_follow_the_choices(experts: int) -> None:
    """8, or the least multiple of 16 a quarter above the average, up to the tiles of gemm."""
    rows = [_C.expert_tile_rows(n, experts) for n in range(1, 70 * experts)]
    assert rows == sorted(rows) and set(rows) == {8, 16, 32, 48, 64}
    assert [_C.expert_tile_rows(n * experts, experts) for n in (6, 32)] == [8, 48]
    tiled = [_C.experts_are_tiled(n, experts) for n in range(0, 9 * experts)]
    assert tiled == sorted(tiled) and not tiled[0] and tiled[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "experts: 0; at least 1"),
        ({"choices": 0}, "choices: 0"),
        ({"sharing": 0}, "choices: 1, 0"),
        ({"stride": 7}, "stride of experts: 7; rows of q4_0 begin at multiples of 2"),
        ({"stride2": -9}, "stride of experts: -9"),
        ({"tile_rows": 12}, "tile_rows: 12; a multiple of 8 up to 64"),
        ({"tile_rows": 72}, "tile_rows: 72"),
        ({"tile_rows": 0}, "tile_rows: 0"),
        ({"tile_rows": 40}, "divides the 48 rows of x"),
    ],
)
def test_what_cannot_be_planned(change: dict[str, int], message: str) -> None:
    sizes = {"experts": 4, "choices": 1, "sharing": 1, "tile_rows": 24}
    asked = {"m": 48, "n": 5, "k": 64, "format": "q4_0", "chip": "m1"}
    assert _C.plan("expert_tiles", **asked, experts=sizes)["passes"]
    with pytest.raises(ValueError, match=message):
        _C.plan("expert_tiles", **asked, experts=sizes | change)
    with pytest.raises(ValueError, match="bias, c, alpha: expert_tiles has none"):
        _C.plan("expert_tiles", **asked, experts=sizes, bias=True)
