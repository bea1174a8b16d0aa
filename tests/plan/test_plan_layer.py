"""Plans of the ops between the matrix products, and of products that normalise x."""

from __future__ import annotations

from typing import Any

import pytest
from plan_cases import CHIPS, strategies_used

from torch_metalmm import _C, formats


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            {"op": "rms_norm", "bias": True},
            "bias, c, alpha: rms_norm has none; .* rms_norm and expert_down have c",
        ),
        ({"op": "swiglu_down", "norm": True}, "norm: of x of linear and swiglu_up, not of swiglu_"),
        ({"norm_weight": True}, "norm: a weight, but no norm"),
        ({"norm": True, "m": 40}, "norm: gemm does not normalise x; rms_norm is a pass before it"),
        ({"norm": True, "strategy": "gemm_small"}, "strategy: gemm_small does not normalise x"),
        ({"norm": True, "strategy": "split_reduce"}, "strategy: split_reduce does not normalise x"),
        ({"op": "rms_norm", "k": 2**31}, "k: 2147483648; rms_norm takes at most 2147483647"),
        (
            {"activation": "elu"},
            "activation: unknown 'elu'; allowed: silu, gelu, gelu_tanh, relu2, sigmoid",
        ),
        ({"op": "rope", "rope": {"heads": -1}}, "heads: -1 of q, .*; none may be negative"),
        ({"op": "rope", "rope": {"kv_heads": -1}}, "heads: .* of q, -1 of k; none may be negative"),
        ({"op": "rope", "rope": {"rotated": 3}}, "rotated: 3; must be even, 0 to the 32 values"),
        ({"op": "rope", "rope": {"rotated": 34}}, "rotated: 34; must be even, 0 to the 32 values"),
        ({"op": "rope", "m": 5, "rope": {"positions": 2}}, "positions: 2; must divide the 5 rows"),
        ({"op": "rope", "m": 6, "rope": {"angle_rows": 4}}, "angle_rows: 4; must be 1 or 6"),
        (
            {"op": "rope_append", "format": "q4_k", "k": 256},
            "format: no shader quantizes q4_k; rope and cache_append do what rope_append does",
        ),
        ({"op": "rope_append", "rope": {"rotated": 34}}, "rotated: 34; must be even, 0 to the 32"),
        ({"op": "rope_append", "k": 48}, "k: 48 is not a multiple of the 32 values of a block"),
        ({"op": "rope_append", "append": {"head_stride": -2}}, "stride: -2; must be 0 to"),
        (
            {"op": "rope_append", "append": {"head": 4}},
            "append: unknown 'head'; allowed: half_keys",
        ),
        ({"op": "rope_append", "w_stride": 9}, "rows of q4_0 begin at multiples of 2 .* stride 9"),
        (
            {"op": "rope_append", "strategy": "rope"},
            "strategy: rope computes rope, not rope_append",
        ),
        ({"op": "rope_tables", "tables": {"rows": 2}}, "rows: 2; must be 1, or more with axes"),
        ({"op": "rope_tables", "tables": {"interleaved": True}}, "interleaved: only where twice"),
        ({"op": "expert_down", "c": True, "beta": 2.0}, "beta: 2.*; expert_down adds c as it is"),
        ({"op": "rope", "scale": True}, "scale: of embedding, not of rope"),
        ({"op": "causal_conv", "k": 9}, "k: 9; must be 1 to 8"),
        ({"op": "causal_conv", "k": 4}, "width: 0; must be k - 1 or more"),
        ({"op": "causal_conv", "k": 1, "m": 5, "conv": {"positions": 2}}, "positions: 2; .* the 5"),
        ({"op": "causal_conv", "k": 1, "strategy": "rope"}, "rope computes rope, not causal_conv"),
        ({"op": "add_rms_norm", "gate": True}, "gate: of rms_norm and of ssm_scan, not of add"),
        ({"op": "gated_delta", "k": 257}, "k: 257; must be 1 to 256"),
        ({"op": "gated_delta", "n": 6}, "n: 6; must be a multiple of 4"),
        ({"op": "gated_delta", "delta": {"key_heads": 0}}, "key_heads: 0; must be at least 1"),
        ({"op": "gated_delta", "delta": {"key_heads": 2}}, "heads: 1; must be a multiple of the 2"),
        ({"op": "gated_delta", "m": 5, "delta": {"positions": 2}}, "positions: 2; .* the 5 rows"),
        ({"op": "add_rms_norm", "norm_rows": 2}, "norm_rows: 2; must be 1, of rms_norm 1 or more"),
        ({"op": "rms_norm", "norm_rows": 0}, "norm_rows: 0; must be 1, of rms_norm 1 or more"),
        ({"op": "swiglu_down", "n": 32, "norm_rows": 2}, "norm_rows: 2; must be 1"),
        ({"op": "ssm_scan", "k": 260}, "k: 260; must be a multiple of 4 up to 256"),
        ({"op": "ssm_scan", "k": 6}, "k: 6; must be a multiple of 4 up to 256"),
        ({"op": "ssm_scan", "k": 0}, "k: 0; must be a multiple of 4 up to 256"),
        ({"op": "ssm_scan", "k": 8, "ssm": {"groups": 0}}, "groups: 0; must be at least 1"),
        ({"op": "ssm_scan", "k": 8, "ssm": {"groups": 2}}, "heads: 1; must be a multiple of the 2"),
        (
            {"op": "gated_delta", "strategy": "rope"},
            "strategy: rope computes rope, not gated_delta",
        ),
        ({"op": "route", "k": 33, "n": 64}, "k: 33; must be 1 to 32, of 64 experts"),
        ({"op": "route", "k": 32, "n": 64, "route": {"shared": True}}, "k: 32; must be 1 to 31"),
        ({"op": "route", "k": 4, "route": {"groups": 3}}, "groups: 3; .* divide the 8 experts"),
        ({"op": "route", "k": 4, "route": {"kept_groups": 2}}, "kept_groups: 2; .* the 1 groups"),
        (
            {"op": "route", "k": 1, "route": {"groups": 8}},
            "group_best: 2; must be 1, or 2 of groups that have 2",
        ),
        ({"op": "route", "k": 4, "strategy": "rope"}, "strategy: rope computes rope, not route"),
        ({"op": "rope", "rope": {"head": 4}}, "rope: unknown 'head'; allowed: heads, kv_heads"),
    ],
)
def test_refused(problem: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.plan(**{"n": 8, "k": 32, "format": "q4_0", "chip": "m1"} | problem)


@pytest.mark.parametrize("chip", [*CHIPS, _C.CUDA])
def test_what_is_fused_can_be_planned(chip: str) -> None:
    """norm_is_fused promises that the choice normalises x, in one pass; at M = 1 it always does."""
    for name in formats.names():
        sizes = {"n": 4096, "k": 4096, "format": name, "chip": chip}
        fused = [m for m in range(17) if _C.norm_is_fused(m=m, format=name, chip=chip)]
        assert fused[:2] == [0, 1] and fused == list(range(len(fused)))
        for m in fused[1:]:
            plan = _C.plan(m=m, **sizes, norm=True)
            (used,) = strategies_used(plan)
            assert _C.strategy(used)["takes_norm"] and "; norm fused: " in plan["reason"]


def test_a_machine_that_waits_for_instructions_fuses_small_norms() -> None:
    """weights_per_core counts the weights of both matrices of a gated MLP."""
    for op, n in (("linear", 40 * 64), ("swiglu_up", 20 * 64)):
        asked = {"m": 1, "format": "q4_0", "chip": "m4-max", "k": 4096, "op": op}
        limit = {"weights_per_core": 64 * 4096}  # of 40 cores
        assert _C.norm_is_fused(n=n, **asked, **limit)
        assert not _C.norm_is_fused(n=n + 1, **asked, **limit)
        assert _C.norm_is_fused(n=n + 1, **asked)


@pytest.mark.parametrize("twice", [False, True])
def test_rows_of_cos_and_sin(twice: bool) -> None:
    (one,) = _C.plan("rope_tables", m=3, k=8, chip="m1", tables={"twice": twice})["passes"]
    assert (one["args"]["n"], one["args"]["k"]) == (16 if twice else 8, 8)


@pytest.mark.parametrize(
    ("op", "sizes", "values", "heads"),
    [
        ("causal_conv", {}, 12, 12),
        ("gated_delta", {"delta": {"heads": 4, "key_heads": 2}}, 2 * 2 * 4 + 4 * 12, 4),
        ("ssm_scan", {"ssm": {"heads": 4, "groups": 2}}, 2 * 2 * 4 + 4 * 12, 4),
    ],
)
def test_rows_of_recurrent_ops(op: str, sizes: dict[str, Any], values: int, heads: int) -> None:
    """Those of x hold q, k and v, or x, b and c, of all heads."""
    (one,) = _C.plan(op, m=3, n=12, k=4, chip="m1", **{"conv": {"width": 3}} | sizes)["passes"]
    assert (one["args"]["x_stride"], one["args"]["x2_stride"]) == (values, heads)


@pytest.mark.parametrize(("apart", "heads"), [(False, 8), (True, 6)])
def test_rows_of_rope_append(apart: bool, heads: int) -> None:
    """Those of x hold q and k, and v where it does not lie apart."""
    rope = {"heads": 4, "kv_heads": 2, "v_apart": apart}
    (one,) = _C.plan("rope_append", n=8, k=32, format="q8_0", chip="m1", rope=rope)["passes"]
    assert (one["args"]["x_stride"], one["args"]["x2_stride"]) == (heads * 32, 2 * 32)


def test_a_norm_does_not_split_k() -> None:
    """Every part would need the squares of all of K."""
    sizes = {"n": 8, "k": 1 << 17, "format": "q4_0", "chip": "m4-max"}
    assert len(_C.plan(**sizes)["passes"]) == 2
    assert len(_C.plan(**sizes, norm=True)["passes"]) == 1


@pytest.mark.parametrize(("k", "aligned", "tail"), [(4096, True, False), (4100, False, True)])
def test_rows_of_a_norm(k: int, aligned: bool, tail: bool) -> None:
    """A threadgroup a row; vectors where all rows begin at 16 bytes."""
    for op in ("rms_norm", "add_rms_norm"):
        (one,) = _C.plan(op, m=5, k=k, chip="m1")["passes"]
        bounds = one["constants"]["bounds"]
        assert one["grid"] == [5, 1, 1]
        assert bool(bounds & _C.BOUNDS_BITS["aligned_x"]) == aligned
        assert bool(bounds & _C.BOUNDS_BITS["k"]) == tail
        for changes in ({"x_alignment": 8}, {"x_stride": k + 1}):
            (apart,) = _C.plan(op, m=5, k=k, chip="m1", **changes)["passes"]
            assert not apart["constants"]["bounds"] & _C.BOUNDS_BITS["aligned_x"]
